"""Question: how much do idle cores speed up one model, and how much does dividing its large layers cost without them?

Training steps run in one process in three modes, which alternate: layers undivided on one core; divided into parts on
one core; divided on all cores. The table has wall milliseconds (median and least) and processor time of all threads.
The ratio in front compares the least wall times of the last and the first mode; it says little on a machine with other
work.

    python bench/bench_cores.py [--rounds 40] [--networks lenet resnet18 mobilenet]
"""

import argparse
import os
import sys
import time

import blas_setting
import numpy as np

import weftplan as mx
from weftplan.kernels.compiled import scratch
from weftplan.kernels.compiled.batch_norm import implementation as batch_norm
from weftplan.kernels.compiled.depthwise import tables as depthwise_tables
from weftplan.kernels.compiled.pooling import implementation as pooling
from weftplan.ops.core import products
from weftplan.support import blas_threads, core_sharing

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers"))
import training_networks


def dense_network(hidden, batch, columns):
    """Return (MLP of three hidden layers with a loss, shape of its data)."""
    x = mx.sym.Variable("data")
    for k in range(3):
        x = mx.sym.Activation(mx.sym.FullyConnected(x, num_hidden=hidden, name=f"f{k}"), act_type="relu")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=10, name="o"), name="softmax"), (batch, columns)


def lstm(units, steps, batch):
    """Return (two-layer LSTM as one ``RNN`` operator with a loss, shape of its data)."""
    x = mx.sym.RNN(mx.sym.Variable("data"), mode="lstm", state_size=units, num_layers=2, name="r")
    return mx.sym.MakeLoss(x), (steps, batch, units)


def training_network(name):
    """Return (network of bench_training.py with its loss, shape of its data)."""
    batch, shape = training_networks.SIZES[name]
    return training_networks.with_loss(mx.sym, name), (batch, *shape)


NETWORKS = {
    "dense 3 x 512, batch 128": lambda: dense_network(512, 128, 784),
    "dense 3 x 1024, batch 256": lambda: dense_network(1024, 256, 784),
    "dense 3 x 4096, batch 32": lambda: dense_network(4096, 32, 4096),
    "LSTM 2 x 650, 35 steps, batch 32": lambda: lstm(650, 35, 32),
    **{name: lambda name=name: training_network(name) for name in ("lenet", "resnet18", "resnet18_224", "mobilenet")},
}
CUTTING = {module: module.FEW for module in (products, scratch, depthwise_tables, batch_norm, pooling)}
"""The least work of a part, by module of kernels."""


def set_division(cut, count):
    """Divide the work of later kernels into parts if ``cut`` is true, else not; let them use ``count`` cores."""
    for module, few in CUTTING.items():
        module.FEW = few if cut else 1 << 62
    core_sharing.usable_cores = lambda: count


def bound(symbol, shape):
    """Return an executor, bound for training, whose arguments are small random numbers."""
    step = symbol.simple_bind(mx.cpu(), data=shape)
    random = np.random.RandomState(0)
    for array in step.arg_arrays:
        array[:] = random.standard_normal(array.shape) * 0.05
    return step


def main():
    """Measure the networks in all modes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), metavar="NAME")
    args = parser.parse_args()
    usable = blas_threads.usable_cpus()
    modes = {"whole": (False, 1), "cut, one core": (True, 1), f"cut, {usable} cores": (True, usable)}
    print(blas_setting.describe())
    print(
        "| step | ratio | " + " | ".join(f"{mode}: wall, least, CPU" for mode in modes) + " | plan, whole and cut, MB |"
    )
    print("|---" * (len(modes) + 3) + "|")
    for name in args.networks:
        steps = {}
        for cut in (False, True):
            set_division(cut, 1)  # the size of scratch depends on the division
            steps[cut] = bound(*NETWORKS[name]())
        by_name = {mode: [] for mode in modes}
        for turn in range(args.rounds + 1):
            for mode, (cut, count) in modes.items():
                set_division(cut, count)
                wall, used = time.perf_counter(), time.process_time()
                steps[cut].forward(is_train=True)
                steps[cut].backward()
                mx.nd.waitall()
                if turn:  # the first step prepares calls
                    by_name[mode].append((time.perf_counter() - wall, time.process_time() - used))
        cells, least = [], []
        for times in by_name.values():
            wall, cpu = np.array(times).T * 1e3
            cells.append(f"{np.median(wall):.1f}, {wall.min():.1f}, {np.median(cpu):.1f}")
            least.append(wall.min())
        plans = ", ".join(f"{steps[cut].memory_plan.peak / 1e6:.2f}" for cut in (False, True))
        print(f"| {name} | {least[-1] / least[0]:.2f} | {' | '.join(cells)} | {plans} |", flush=True)


if __name__ == "__main__":
    main()
