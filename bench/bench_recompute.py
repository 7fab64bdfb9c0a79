"""Question: how much step time do the recompute policies cost, and how many bytes do they save?

For each network the same training step (forward and backward) runs without recomputation and with each policy,
alternating for several rounds. The speed kept is the median over the rounds of the time without / with recomputation.
Bytes are those of the plan, and are asserted to equal the allocated bytes.

    python bench/bench_recompute.py
    python bench/bench_recompute.py --deep        # a network of 1,000 layers and an LSTM of 1,000 steps, under sqrt
"""

import argparse
import os
import platform
import statistics
import time

import blas_setting
import deep_networks
import numpy as np

import weftplan as mx
from weftplan import models, planner


def deep_mlp():
    """Return (MLP of twenty layers of 1,024 units, shapes of its inputs)."""
    net = mx.sym.Variable("data")
    for i in range(20):
        net = mx.sym.Activation(mx.sym.FullyConnected(net, num_hidden=1024, name=f"fc{i}"), act_type="relu")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=10), name="softmax"), {"data": (256, 1024)}


NETWORKS = {
    "lenet 1x28x28 b64": lambda: (models.get("lenet"), models.input_shapes("lenet", 64)),
    "mlp 20 x 1024 b256": deep_mlp,
    "resnet18 3x32x32 b32": lambda: (
        models.get("resnet18", num_classes=10, image_shape=(3, 32, 32)),
        {"data": (32, 3, 32, 32), "softmax_label": (32,)},
    ),
    "densenet-like blocks 64 x 16x16 b16": lambda: (dense_blocks(), {"data": (16, 16, 16, 16)}),
}


DEEP = {
    "residual network, 1,000 layers, 2x16x16x16": lambda: deep_networks.residual(1000, batch=2, side=16)[:2],
    "LSTM, 1,000 steps, 256 units, b32": lambda: deep_networks.lstm(1000)[:2],
    "LSTM, 1,000 steps, 256 units, b128": lambda: deep_networks.lstm(1000, batch=128)[:2],
}


def dense_blocks():
    """Return eight layers of batch norm, relu and convolution; each reads the outputs of all earlier layers."""
    net = mx.sym.Variable("data")
    for i in range(8):
        h = mx.sym.Activation(mx.sym.BatchNorm(net, name=f"bn{i}"), act_type="relu", name=f"relu{i}")
        h = mx.sym.Convolution(h, num_filter=16, kernel=(3, 3), pad=(1, 1), no_bias=True, name=f"conv{i}")
        net = mx.sym.concat(net, h, dim=1, name=f"concat{i}")
    net = mx.sym.Pooling(net, global_pool=True, kernel=(1, 1), pool_type="avg")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=10), name="softmax")


def bound(symbol, shapes, policy):
    """Return an executor, bound for training under a recompute policy, with the same random arguments on every call."""
    options = planner.PlanOptions.from_environment(recompute=policy)
    req = {n: "null" if n in shapes or n.endswith("label") else "write" for n in symbol.list_arguments()}
    executor = symbol.simple_bind(mx.cpu(), grad_req=req, plan_options=options, **shapes)
    rng = np.random.default_rng(0)
    for name, array in executor.arg_dict.items():
        array[:] = (rng.standard_normal(array.shape) * 0.05).astype("float32") if "label" not in name else 1
    assert executor.allocated_bytes == executor.memory_plan.peak
    return executor


def step(executor):
    """Return (wall seconds, CPU seconds of all threads) of one training step; other programs disturb CPU time less."""
    start, used = time.perf_counter(), time.process_time()
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()
    return time.perf_counter() - start, time.process_time() - used


def best(executor, steps):
    """Return the smallest wall seconds and the smallest CPU seconds of several steps."""
    return tuple(map(min, zip(*(step(executor) for _ in range(steps)), strict=True)))


def main():
    """Measure the networks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=["cheap", "mxnet", "sqrt"])
    parser.add_argument("--deep", action="store_true", help="very deep networks, under sqrt")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(blas_setting.describe())
    print("| network | policy | planned bytes, off | with policy | ratio | step off, ms | speed kept | by CPU time |")
    print("|---|---|---|---|---|---|---|---|")
    for name, make in (DEEP if args.deep else NETWORKS).items():
        symbol, shapes = make()
        off = bound(symbol, shapes, "off")
        for policy in ["sqrt"] if args.deep else args.policies:
            on = bound(symbol, shapes, policy)
            step(off), step(on)
            pairs = []
            for _ in range(args.rounds):
                pairs.append((best(off, args.steps), best(on, args.steps)))
            kept, kept_cpu = (statistics.median(a[k] / b[k] for a, b in pairs) for k in (0, 1))
            base = statistics.median(a[0] for a, _ in pairs) * 1e3
            before, after = off.memory_plan.peak, on.memory_plan.peak
            print(
                f"| {name} | {policy} | {before:,} | {after:,} | {after / before:.3f} | {base:.1f} | "
                f"{kept:.1%} | {kept_cpu:.1%} |",
                flush=True,
            )
            if after < before:
                off_out, on_out = off.outputs[0].asnumpy(), on.outputs[0].asnumpy()
                assert np.array_equal(off_out, on_out)


main()
