"""Questions: how long does an allocation take, how many bytes do pools reserve, and how fast are runs without a slab?

    python bench/bench_storage.py [--rounds 5] [--mxnet-python PYTHON] [--torch-python PYTHON]
                                  [pairs] [traces] [steady] [dynamic] [recording] [spill]

* pairs: time of an allocation and its free from a warm pool, by size and number of threads, against ``numpy.empty``. If
  interpreters of MXNet 1.9.1 and PyTorch are given, arrays of these libraries are compared with ours.
* traces: bytes reserved over bytes live, at their peaks, by strategy. The traces are training steps with 1,000 random
  batch sizes, the arrays of an imperative LSTM, and packing instances of the planner replayed in the order of their
  first use. The published rules of PyTorch, RMM and CuPy (``peers/published_rules.py``) run on the same traces.
* steady: allocations from a pool and from the device during planned training steps after the first.
* dynamic: peak and step time of ``WEFTPLAN_EXECUTOR_STRATEGY=dynamic`` against the static plan and the plan without
  sharing.
* recording: time of training steps while pools are recorded and snapshots are made, against steps without.
* spill: time of training steps in half the memory that they need, with the remaining arrays in a file or on the host.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import blas_setting
import numpy as np
from storage_traces import HOST, POOLS, traces

import weftplan as mx
from weftplan import device, storage
from weftplan.storage import (
    AutoGrowth,
    LimitResource,
    NaivePool,
    StatisticsResource,
)
from weftplan.storage.offload import traffic

PYTHONS = {}
"""Python interpreters of the compared libraries, by library."""


# -- pairs ------------------------------------------------------------------------------------------------------------


def timed(pool, nbytes, count):
    """Return the CPU nanoseconds per allocate-free pair, for each of ``count`` batches of 20 pairs."""
    allocate, free, clock, actual = pool.allocate, pool.free, time.thread_time_ns, []
    for _ in range(count):
        begin = clock()
        for _ in range(20):
            free(allocate(nbytes))
        actual.append((clock() - begin) / 20)
    return actual


def gather(times, pool, nbytes, count):
    """Append the times of :func:`timed`, measured on the calling thread, to ``times``."""
    times += timed(pool, nbytes, count)


def pairs(rounds):
    """Print the CPU time of an allocate-free pair by pool, threads and size: median and 99th percentile in µs."""
    print("\n### An allocation and its free from a warm pool\n\nµs of CPU time a pair, p50 / p99 of batches of 20\n")
    sizes = (64, 4096, 65536, 1 << 20, 16 << 20)
    print("| pool | threads | " + " | ".join(f"{n:,} bytes" for n in sizes) + " |\n|---|---|" + "---|" * len(sizes))
    rows = [("Naive", 1), ("auto_growth", 1), ("naive_best_fit, 500 MiB", 1), ("auto_growth", 2), ("auto_growth", 8)]
    medians = {}
    for name, threads in rows:
        cells = []
        for nbytes in sizes:
            pool, results = POOLS[name](HOST), []
            timed(pool, nbytes, 20)
            for _ in range(rounds):
                workers = [
                    threading.Thread(target=gather, args=(results, pool, nbytes, 2000 // threads))
                    for _ in range(threads)
                ]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
            medians.setdefault((name, threads), []).append(np.percentile(results, 50))
            cells.append(f"{np.percentile(results, 50) / 1e3:.2f} / {np.percentile(results, 99) / 1e3:.2f}")
        print(f"| {name} | {threads} | " + " | ".join(cells) + " |")
    plain, cells = [], []
    for nbytes in sizes:
        results = []
        for _ in range(rounds * 500):
            begin = time.thread_time_ns()
            for _ in range(20):
                np.empty(nbytes, np.uint8)
            results.append((time.thread_time_ns() - begin) / 20)
        plain.append(np.percentile(results, 50))
        cells.append(f"{plain[-1] / 1e3:.2f} / {np.percentile(results, 99) / 1e3:.2f}")
    print("| `numpy.empty` | 1 | " + " | ".join(cells) + " |")
    ratios = [f"{ours / theirs:.2f}" for ours, theirs in zip(medians["auto_growth", 1], plain, strict=True)]
    print("| auto_growth / `numpy.empty`, p50 | 1 | " + " | ".join(ratios) + " |")
    if PYTHONS:
        pairs_of_arrays(sizes, rounds)


def pairs_of_arrays(sizes, rounds):
    """Print the CPU time of making and dropping an array in each library; each measurement runs in a new process."""
    print("\nArrays, made and dropped; CPU time of all threads, p50 / p99, medians of rounds in turn\n")
    print("| arrays | " + " | ".join(f"{n:,} bytes" for n in sizes) + " |\n|---|" + "---|" * len(sizes))
    by_name = {library: [] for library in ("weftplan", *PYTHONS)}
    for _ in range(rounds):
        for library, python in {"weftplan": sys.executable, **PYTHONS}.items():
            done = subprocess.run(
                [python, str(Path(__file__).parent / "peers" / "memory_pairs.py"), library, *map(str, sizes)],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"{library} failed:\n{done.stderr[-2000:]}")
            result = json.loads(done.stdout.strip().splitlines()[-1])
            by_name[library].append([result[str(nbytes)] for nbytes in sizes])
    figures = {library: np.median(np.array(each), axis=0) / 1e3 for library, each in by_name.items()}
    for library, each in figures.items():
        print(f"| {library} | " + " | ".join(f"{p50:.2f} / {p99:.2f}" for p50, p99 in each) + " |")
    for library in PYTHONS:
        ratios = figures["weftplan"][:, 0] / figures[library][:, 0]
        print(f"| weftplan / {library}, p50 | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


# -- planned and dynamic runs -----------------------------------------------------------------------------------------


def bound(name, batch, ctx):
    """Return a network's executor, bound for training and filled with random arguments; labels are 0."""
    executor = mx.models.get(name).simple_bind(ctx, **mx.models.input_shapes(name, batch))
    rng = np.random.RandomState(0)
    for key, array in executor.arg_dict.items():
        array[:] = 0 if "label" in key else rng.rand(*array.shape).astype("float32") * 0.1
    return executor


def step(executor):
    """Run one training step (forward and backward), and wait for it."""
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()


def steady(rounds):
    """Print the allocations from a pool and from its device during 20 planned training steps after the first."""
    del rounds
    print("\n### Allocations of planned training after the first step\n")
    print("| network | steps | of any pool | of the device |\n|---|---|---|---|")
    for name, batch in (("mlp", 64), ("lenet", 32)):
        ctx = mx.cpu(0)
        pool = NaivePool(HOST)
        with storage.using(pool):
            executor = bound(name, batch, ctx)
            step(executor)
            before = pool.statistics()
            for _ in range(20):
                step(executor)
            now = pool.statistics()
            asked = now.system_allocations - before.system_allocations
            print(f"| {name} | 20 | {now.allocations - before.allocations} | {asked} |")
            del executor
            gc.collect()
            mx.nd.waitall()


def dynamic(rounds):
    """Print the peaks of static and dynamic executors, and the ratio of their CPU times."""
    print("\n### Executors without a slab\n")
    print("| network | static plan | without sharing | dynamic, at once | dynamic, never | time dynamic / static |")
    print("|---|---|---|---|---|---|")
    for name, batch in (("mlp", 64), ("lenet", 64), ("resnet18", 4)):
        peaks, executors, pools = {}, {}, {}
        for label, settings in {
            "static": {},
            "at once": {"WEFTPLAN_EXECUTOR_STRATEGY": "dynamic"},
            "never": {"WEFTPLAN_EXECUTOR_STRATEGY": "dynamic", "FLAGS_eager_delete_tensor_gb": "-1"},
        }.items():
            os.environ.update(settings)
            ctx = mx.cpu(10 + len(pools))
            pool = pools[label] = AutoGrowth(device.get(ctx))
            with storage.using(pool):
                executor = bound(name, batch, ctx)
                mx.nd.waitall()
                before = pool.statistics().requested_bytes - executor.allocated_bytes
                step(executor)
                step(executor)
                peaks[label] = pool.statistics().peak_requested_bytes - before
            executors[label] = (executor, ctx)
            for key in settings:
                del os.environ[key]
        total = executors["at once"][0].memory_plan.peak
        ratios = []
        for _ in range(rounds):
            spent = {}
            for label in ("static", "at once"):
                executor, ctx = executors[label]
                with storage.using(pools[label]):
                    begin = time.process_time()
                    for _ in range(3):
                        step(executor)
                    spent[label] = time.process_time() - begin
            ratios.append(spent["at once"] / spent["static"])
        mib = [f"{n / 2**20:.2f} MiB" for n in (peaks["static"], total, peaks["at once"], peaks["never"])]
        print(f"| {name}, batch {batch} | " + " | ".join(mib) + f" | {statistics.median(ratios):.2f} |")
        del executors, executor
        gc.collect()
        mx.nd.waitall()


def recording(rounds):
    """Print the CPU time of a training step without and with recording, and their ratio."""
    print("\n### Recording, statistics every step and a snapshot every 100 steps\n")
    print("| what | without | with | ratio |\n|---|---|---|---|")
    for label, name, batch, imperative in (
        ("planned training step, mlp", "mlp", 64, False),
        ("planned training step, lenet", "lenet", 16, False),
        ("planned step and SGD on arrays, mlp", "mlp", 64, True),
    ):
        executor = bound(name, batch, mx.cpu(0))
        pool, spent = storage.get(mx.cpu(0)), {False: [], True: []}
        step(executor)
        for _ in range(rounds):
            storage.record()
            recorder, total = storage.recording.recorder, {False: 0.0, True: 0.0}
            for number in range(100):  # alternating, so that both see the same load
                for on in (False, True) if number % 2 else (True, False):
                    storage.recording.recorder = recorder if on else None
                    begin = time.process_time()
                    step(executor)
                    if imperative:
                        for key, grad in executor.grad_dict.items():
                            executor.arg_dict[key][:] = executor.arg_dict[key] - 0.01 * grad
                        mx.nd.waitall()
                    if on:
                        pool.statistics()
                        if number == 99:
                            storage.snapshot()
                    total[on] += time.process_time() - begin
            for on in spent:
                spent[on].append(total[on] / 100)
            storage.stop_recording()
        off, on = min(spent[False]), min(spent[True])
        ratio = statistics.median(b / a for a, b in zip(spent[False], spent[True], strict=True))
        print(f"| {label}, batch {batch} | {off * 1e3:.3f} ms | {on * 1e3:.3f} ms | {ratio:.3f} |")
        del executor
        gc.collect()
        mx.nd.waitall()


def trained(ctx, pool, rounds):
    """Train a ResNet-18 for ``rounds + 1`` steps; return (seconds of all but the first, final bytes by argument)."""
    with storage.using(pool):
        executor, spent = bound("resnet18", 4, ctx), []
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            step(executor)
            for name, gradient in executor.grad_dict.items():
                if name != "data" and "label" not in name:
                    executor.arg_dict[name][:] = executor.arg_dict[name] - 0.001 * gradient
            mx.nd.waitall()
            spent.append(time.perf_counter() - begin)
        bits = {name: array.asnumpy().tobytes() for name, array in executor.arg_dict.items()}
        del executor
        gc.collect()
        mx.nd.waitall()
    return spent[1:], bits


def spill(rounds):
    """Print the wall time of training in half the memory; CPU time would not include the copies to a file."""
    print("\n### Training in half the memory: ResNet-18, batch 4, WEFTPLAN_EXECUTOR_STRATEGY=dynamic\n")
    print("| device | target | peak with room enough | limit | step | step in half | ratio | bits | MiB sent a step |")
    print("|---|---|---|---|---|---|---|---|---|")
    os.environ["WEFTPLAN_EXECUTOR_STRATEGY"] = "dynamic"
    with tempfile.TemporaryDirectory() as folder:
        file = f"file:{folder}"
        for number, (kind, target) in enumerate((("cpu", file), ("sim", "host"), ("sim", file))):
            place = {"cpu": mx.cpu, "sim": mx.sim}[kind]
            pool = StatisticsResource(AutoGrowth(device.get(place(20 + number))))
            plain, bits = trained(place(20 + number), pool, rounds)
            peak, before = pool.statistics().peak_requested_bytes, traffic.out_bytes
            with mx.nd.spilling.using(target):
                limited = LimitResource(AutoGrowth(device.get(place(30 + number))), peak // 2)
                halved, same = trained(place(30 + number), limited, rounds)
            moved = (traffic.out_bytes - before) / (rounds + 1) / 2**20
            cells = [
                f"{peak / 2**20:.0f} MiB",
                f"{peak / 2**21:.0f} MiB",
                f"{min(plain):.3f} s",
                f"{min(halved):.3f} s",
            ]
            cells += [f"{min(halved) / min(plain):.2f}", "equal" if same == bits else "DIFFER", f"{moved:.0f}"]
            print(f"| {kind} | {target.partition(':')[0]} | " + " | ".join(cells) + " |")
    del os.environ["WEFTPLAN_EXECUTOR_STRATEGY"]


PARTS = {
    "pairs": pairs,
    "traces": traces,
    "steady": steady,
    "dynamic": dynamic,
    "recording": recording,
    "spill": spill,
}


def main():
    """Run the parts that the command line names, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mxnet-python", help="interpreter of an environment with mxnet==1.9.1, for pairs")
    parser.add_argument("--torch-python", help="interpreter of an environment with torch, for pairs")
    args = parser.parse_args()
    inputs = {"mxnet": args.mxnet_python, "torch": args.torch_python}
    PYTHONS.update({library: python for library, python in inputs.items() if python})
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(blas_setting.describe())
    for part in args.parts or PARTS:
        PARTS[part](args.rounds)


if __name__ == "__main__":
    main()
