"""Microseconds per imperative call on small arrays: ``python array_calls.py {weftplan|mxnet}`` prints JSON."""

import importlib
import json
import sys
import time

CALLS = 1500
WARM = 1_000
"""Warm-up calls before anything is measured."""


def cases(nd):
    """Return {text: function without arguments that makes this call}; ``nd`` is the array module of either library."""
    x, y, row, weight, bias = nd.ones((8, 16)), nd.ones((8, 16)), nd.ones((1, 16)), nd.ones((4, 16)), nd.ones((4,))
    return {
        "a + b": lambda: x + y,
        "a + 1": lambda: x + 1,
        "a += b": lambda: x.__iadd__(y),
        "nd.exp(a)": lambda: nd.exp(x),
        "nd.sum(a, axis=1)": lambda: nd.sum(x, axis=1),
        "nd.broadcast_add(a, row)": lambda: nd.broadcast_add(x, row),
        "nd.concat(a, b, dim=1)": lambda: nd.concat(x, y, dim=1),
        "nd.FullyConnected(a, w, b)": lambda: nd.FullyConnected(x, weight, bias, num_hidden=4),
        "nd.softmax(a)": lambda: nd.softmax(x),
        "nd.sgd_update(a, b, out=a)": lambda: nd.sgd_update(x, y, lr=0.1, out=x),
        "a.copyto(b)": lambda: x.copyto(y),
        "a.reshape": lambda: x.reshape((16, 8)),
        "a[2:4]": lambda: x[2:4],
        "a[0:2] = 1": lambda: x.__setitem__(slice(0, 2), 1.0),
        "nd.zeros": lambda: nd.zeros((8, 16)),
        "nd.array(list)": lambda: nd.array([1, 2, 3]),
        "a.asnumpy()": lambda: x.asnumpy(),
    }


def repeat(nd, call, count=CALLS):
    """Make ``count`` calls, and wait until all their work is done."""
    for _ in range(count):
        call()
    nd.waitall()


def measure(nd, call):
    """Return the microseconds per call of the fastest of three loops."""
    best = float("inf")
    for _ in range(3):
        nd.waitall()
        start = time.perf_counter()
        repeat(nd, call)
        best = min(best, (time.perf_counter() - start) / CALLS * 1e6)
    return best


if __name__ == "__main__":
    nd = importlib.import_module(sys.argv[1]).nd
    calls = cases(nd)
    for _ in range(WARM):
        calls["nd.exp(a)"]()
    print(json.dumps({name: measure(nd, call) for name, call in calls.items()}))
