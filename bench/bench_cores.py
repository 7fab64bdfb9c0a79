"""Question: what do idle cores gain on one model, and what does cutting its large products cost where none is idle?

Training steps of networks of large layers, in one process, in turn: products whole, on one core; cut into parts, on one
core; cut, on as many cores as there are. Wall milliseconds (median and least) and processor time of all threads. The
ratio in front is cut on all cores to whole, of the least wall times; on a machine with other work it says little.

    python bench/bench_cores.py [--rounds 40]
"""

import argparse
import time

import blas_setting
import numpy as np

import weftplan as mx
from weftplan import blas, cores
from weftplan.ops import products


def dense(hidden, batch, columns):
    """Three layers and a loss."""
    x = mx.sym.Variable("data")
    for k in range(3):
        x = mx.sym.Activation(mx.sym.FullyConnected(x, num_hidden=hidden, name=f"f{k}"), act_type="relu")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=10, name="o"), name="softmax"), (batch, columns)


def lstm(units, steps, batch):
    """Two layers of ``RNN``."""
    x = mx.sym.RNN(mx.sym.Variable("data"), mode="lstm", state_size=units, num_layers=2, name="r")
    return mx.sym.MakeLoss(x), (steps, batch, units)


NETWORKS = {
    "dense 3 x 512, batch 128": lambda: dense(512, 128, 784),
    "dense 3 x 1024, batch 256": lambda: dense(1024, 256, 784),
    "dense 3 x 4096, batch 32": lambda: dense(4096, 32, 4096),
    "LSTM 2 x 650, 35 steps, batch 32": lambda: lstm(650, 35, 32),
}


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    few, usable = products.FEW, blas.usable_cpus()
    modes = {"whole": (1 << 62, 1), "cut, one core": (few, 1), f"cut, {usable} cores": (few, usable)}
    print(blas_setting.describe())
    print("| step | ratio | " + " | ".join(f"{mode}: wall, least, CPU" for mode in modes) + " |")
    print("|---" * (len(modes) + 2) + "|")
    for name, make in NETWORKS.items():
        symbol, shape = make()
        step = symbol.simple_bind(mx.cpu(), data=shape)
        random = np.random.RandomState(0)
        for array in step.arg_arrays:
            array[:] = random.standard_normal(array.shape) * 0.05
        found = {mode: [] for mode in modes}
        for turn in range(args.rounds + 1):
            for mode, (products.FEW, count) in modes.items():
                cores.usable_cores = lambda count=count: count
                wall, used = time.perf_counter(), time.process_time()
                step.forward(is_train=True)
                step.backward()
                mx.nd.waitall()
                if turn:  # the first prepares calls
                    found[mode].append((time.perf_counter() - wall, time.process_time() - used))
        cells, least = [], []
        for times in found.values():
            wall, cpu = np.array(times).T * 1e3
            cells.append(f"{np.median(wall):.1f}, {wall.min():.1f}, {np.median(cpu):.1f}")
            least.append(wall.min())
        print(f"| {name} | {least[-1] / least[0]:.2f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
