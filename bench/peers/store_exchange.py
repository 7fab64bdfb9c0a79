"""Median seconds of push, pull and both on a ``device`` or ``local`` store of 4 CPU contexts.

    store_exchange.py PACKAGE STORE ELEMENTS REPEAT

PACKAGE is ``weftplan`` or ``mxnet``. Prints a JSON object: "push", "pull" and "push+pull" are the seconds until the
work is done, the same keys followed by " called" are the seconds until the calls return, and "right" says whether the
sum is right.
"""

import importlib
import json
import statistics
import sys
import time

import numpy as np

CONTEXTS = 4


def prepare(mx, store, elements):
    """Return (function that pushes one key of a new store, function that pulls it, arrays that a pull fills)."""
    kv = mx.kv.create(store)
    values = [mx.nd.full((elements,), i + 1.0, ctx=mx.cpu(i)) for i in range(CONTEXTS)]
    outs = [mx.nd.zeros((elements,), ctx=mx.cpu(i)) for i in range(CONTEXTS)]
    kv.init("w", mx.nd.zeros((elements,)))

    def push():
        kv.push("w", values)

    def pull():
        kv.pull("w", out=outs)

    return push, pull, outs


def main(package, store, elements, repeat):
    """Time ``repeat`` pushes, pulls and pairs of both; print the medians, and whether the sum is right, as JSON."""
    mx = importlib.import_module(package)
    push, pull, outs = prepare(mx, store, elements)

    def both():
        push()
        pull()

    result = {}
    for name, work in (("push", push), ("pull", pull), ("push+pull", both)):
        times, calls = [], []
        for _ in range(repeat + 2):
            mx.nd.waitall()
            start = time.perf_counter()
            work()
            calls.append(time.perf_counter() - start)
            mx.nd.waitall()
            times.append(time.perf_counter() - start)
        result[name], result[f"{name} called"] = statistics.median(times[2:]), statistics.median(calls[2:])
    result["right"] = all(bool((out.asnumpy() == np.float32(10)).all()) for out in outs)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
