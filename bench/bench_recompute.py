"""Question: how much step time do the recompute policies cost, and how many bytes do they save?

For each network the same training step (forward and backward) runs without recomputation and with each policy,
alternating for several rounds. The speed kept is the median over the rounds of the time without / with recomputation.
Bytes are those of the plan, and are asserted to equal the allocated bytes.

``--prices`` compares the extra time that the planner models under budgets with the extra processor time of the steps.
Goal: a difference of at most five points.

    python bench/bench_recompute.py
    python bench/bench_recompute.py --deep        # a network of 1,000 layers and an LSTM of 1,000 steps, under sqrt
    python bench/bench_recompute.py --prices
"""

import argparse
import os
import platform
import re
import statistics
import time

import blas_setting
import deep_networks
import numpy as np

import weftplan as mx
from weftplan import models, planner
from weftplan.errors import BudgetError


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


def transformer():
    """Return (two transformer layers of 128 units with GELU, shapes of the inputs)."""
    net = mx.sym.Variable("data")
    for i in range(2):
        heads = [mx.sym.FullyConnected(net, num_hidden=128, flatten=False, name=f"{k}{i}") for k in "qkv"]
        weights = mx.sym.softmax(mx.sym.batch_dot(heads[0], heads[1], transpose_b=True) * 0.09)
        net = mx.sym.LayerNorm(net + mx.sym.batch_dot(weights, heads[2]), name=f"a{i}")
        wide = mx.sym.FullyConnected(net, num_hidden=512, flatten=False, name=f"wide{i}")
        wide = mx.sym.LeakyReLU(wide, act_type="gelu", name=f"gelu{i}")
        net = mx.sym.LayerNorm(net + mx.sym.FullyConnected(wide, num_hidden=128, flatten=False), name=f"b{i}")
    return mx.sym.MakeLoss(mx.sym.sum(net)), {"data": (16, 128, 128)}


def unet():
    """Return (a U-Net of three levels, shapes of the inputs)."""

    def layer(x, filters, name):
        x = mx.sym.Convolution(x, num_filter=filters, kernel=(3, 3), pad=(1, 1), no_bias=True, name=name)
        return mx.sym.Activation(mx.sym.BatchNorm(x, name=f"{name}_bn"), act_type="relu", name=f"{name}_relu")

    net, kept = mx.sym.Variable("data"), []
    for level in range(2):
        net = layer(layer(net, 8 << level, f"down{level}a"), 8 << level, f"down{level}b")
        kept.append(net)
        net = mx.sym.Pooling(net, kernel=(2, 2), stride=(2, 2), pool_type="max")
    net = layer(net, 32, "middle")
    for level in (1, 0):
        net = mx.sym.concat(mx.sym.UpSampling(net, scale=2, sample_type="nearest"), kept[level], dim=1)
        net = layer(layer(net, 8 << level, f"up{level}a"), 8 << level, f"up{level}b")
    return mx.sym.MakeLoss(mx.sym.sum(net)), {"data": (4, 3, 64, 64)}


def built_in(name, batch):
    """Return (a built-in network on images of 3 x 64 x 64, shapes of its inputs)."""
    return models.get(name, num_classes=10, image_shape=(3, 64, 64)), {
        "data": (batch, 3, 64, 64),
        "softmax_label": (batch,),
    }


PRICES = {
    "transformer": transformer,
    "U-Net": unet,
    "ResNet-50": lambda: built_in("resnet50", 4),
    "MobileNet": lambda: built_in("mobilenet", 8),
}


def prices(rounds, only):
    """Print the modelled and the measured extra time of two budgets for each network."""
    print("| network | budget / peak | modelled, % | measured, % | difference, points |")
    print("|---|---|---|---|---|")
    for name, make in PRICES.items():
        if only and name not in only:
            continue
        symbol, shapes = make()
        off = bound(symbol, shapes, "off", fusion=False)
        for share in (0.8, 0.6):
            budget = int(share * off.memory_plan.peak)
            try:
                on = bound(symbol, shapes, "off", budget=budget, fusion=False)
            except BudgetError as error:
                print(f"| {name} | {share} | {error} | | |", flush=True)
                continue
            note = next((note for note in on.memory_plan.notes if "% more" in note), "")
            modelled = float(re.findall(r"([\d.]+) % more", note)[0]) if note else 0.0
            step(off), step(on)
            pairs = [(step(off)[1], step(on)[1]) for _ in range(rounds)]
            measured = 100 * (statistics.median(b / a for a, b in pairs) - 1)
            gap = abs(modelled - measured)
            print(f"| {name} | {share} | {modelled:.1f} | {measured:.1f} | {gap:.1f} |", flush=True)


def bound(symbol, shapes, policy, **options):
    """Return an executor, bound for training under a recompute policy, with the same random arguments on every call."""
    options = planner.PlanOptions.from_environment(recompute=policy, **options)
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
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=["cheap", "mxnet", "sqrt"])
    parser.add_argument("--prices", action="store_true", help="modelled and measured extra time under budgets")
    parser.add_argument("--only", nargs="+", choices=PRICES)
    parser.add_argument("--deep", action="store_true", help="very deep networks, under sqrt")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(blas_setting.describe())
    if args.prices:
        return prices(args.rounds, args.only)
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


if __name__ == "__main__":
    main()
