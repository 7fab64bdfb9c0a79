"""Question: how much processor time and memory does it take to plan one graph, in a process of its own?

    python bench/planning_time.py "resnet50, training" 0
    python bench/planning_time.py "unrolled RNN, training" 20000

It prints the figures as JSON; ``bench_planner.py --only time`` makes the table of all graphs.
"""

import json
import resource
import statistics
import sys
import time

import mxnet_networks

import weftplan as mx
from weftplan import models
from weftplan.planner import plan_symbol


def graph(kind, nodes):
    """Return (symbol, input shapes): the network named in ``kind`` if ``nodes`` is 0, else a synthetic graph."""
    if not nodes:
        name = kind.split(",")[0]
        return mxnet_networks.load(name), models.input_shapes(name, mxnet_networks.batch_of(name))
    if kind.startswith("unrolled"):
        return unrolled_rnn(nodes), {"data": (8, 16), "h": (8, 16)}
    net = skip = mx.sym.Variable("data")
    for i in range(nodes // 2 if kind.endswith("training") else nodes):
        if i % 8 == 7:
            net = skip = net + skip
        else:
            net = mx.sym.tanh(net) if i % 2 else net + 1.0
    return net, {"data": (64, 16)}


def measure(kind, nodes):
    """Return the CPU seconds, memory in bytes, and peak / lower bound of planning one graph in this process.

    Up to 20,000 nodes seven plans are timed, for larger graphs one.
    """
    training = kind.endswith("training")
    symbol, shapes = graph(kind, nodes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    spent = []
    for _ in range(7 if nodes <= 20_000 else 1):
        start = time.process_time()
        planned = plan_symbol(symbol, shapes, grad_req="write" if training else "null")
        spent.append(time.process_time() - start)
    plan = planned.memory
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = {"seconds": min(spent), "median": statistics.median(spent), "rss": rss, "before": before}
    result["nodes"] = planned.graph.num_nodes
    return {**result, "ratio": plan.peak / max(plan.lower_bound, 1)}


def unrolled_rnn(nodes):
    """Return an RNN whose training graph has about ``nodes`` nodes: eight per step, forward and backward."""
    w, u, b = (mx.sym.Variable(name) for name in ("w", "u", "b"))
    h, x = mx.sym.Variable("h"), mx.sym.Variable("data")
    for _ in range(nodes // 8):
        fed = mx.sym.FullyConnected(x, w, b, num_hidden=16)
        h = mx.sym.Activation(fed + mx.sym.FullyConnected(h, u, b, num_hidden=16), act_type="tanh")
    return mx.sym.sum(h)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
