"""Questions: what does an allocation cost, how much does each strategy hold, and what does a run without a slab take?

    python bench/bench_storage.py [--rounds 5] [--mxnet-python PYTHON] [--torch-python PYTHON]
                                  [pairs] [traces] [steady] [dynamic] [recording] [spill]

* pairs: an allocation and its free from a warm pool, by size and number of threads, beside ``numpy.empty``; where their
  interpreters are given, arrays of MXNet 1.9.1 and PyTorch, beside ours.
* traces: bytes reserved over bytes live, at their peaks, by strategy: training steps with 1,000 random batch sizes, an
  imperative LSTM's arrays, and instances of the planner replayed in the order in which they begin; beside them the
  published rules of PyTorch, RMM and CuPy (``peers/published_rules.py``) on the same traces.
* steady: allocations of any pool and of the device during planned training steps after the first.
* dynamic: peak and step time of ``WEFTPLAN_EXECUTOR_STRATEGY=dynamic`` beside the static plan and the plan without
  sharing. The lower bound is the largest sum of bytes that are live at once.
* spill: time of training steps in half the memory that they need, the rest in a file or on the host.
* recording: time of training steps while pools are recorded and a snapshot is made now and then, beside steps without.
"""

import argparse
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import blas_setting
import numpy as np
import packing_instances
from peers.published_rules import Cupy, Rmm, Torch

import weftplan as mx
from weftplan import device, storage
from weftplan.cli.pack_csv import read_csv
from weftplan.storage import (
    AutoGrowth,
    LimitResource,
    NaiveBestFit,
    NaivePool,
    RawResource,
    RoundPool,
    StatisticsResource,
)
from weftplan.storage.homes import traffic

DATA = Path(__file__).parent / "data"
HOST = device.get(device.cpu())
POOLS = {
    "Naive": NaivePool,
    "Naive, slack 16 MiB": lambda place: NaivePool(place, slack=16 << 20),
    "Round": RoundPool,
    "auto_growth": lambda place: AutoGrowth(place, spare=1 / 16),
    "auto_growth, Paddle's rule": AutoGrowth,
    "auto_growth, chunks of 16 MiB": lambda place: AutoGrowth(place, chunk=16 << 20),
    "auto_growth, idle chunks go": lambda place: AutoGrowth(place, release_idle=True),
    "naive_best_fit, 500 MiB": NaiveBestFit,
    "naive_best_fit, 64 MiB": lambda place: NaiveBestFit(place, first=64 << 20),
    "Unpooled": RawResource,
}

RULES = {"PyTorch's published rule": Torch, "RMM's published rule": Rmm, "CuPy's published rule": Cupy}
PYTHONS = {}
"""Interpreters of other libraries, by the library."""


class Counting:
    """A device that gives addresses and no memory, so that only the pool's own rules count."""

    asynchronous, alignment = False, 64

    def __init__(self):
        self.context, self.xp, self.asked = HOST.context, np, 0
        self._bytes = np.empty(0, np.uint8)

    def allocate(self, nbytes):
        self.asked += 1
        return np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (nbytes,), (0,))

    def free(self, raw):
        pass

    def memory_info(self):
        return 1 << 50, 1 << 50


# -- pairs ------------------------------------------------------------------------------------------------------------


def timed(pool, nbytes, count):
    """CPU nanoseconds of each of ``count`` batches of 20 pairs, a pair."""
    allocate, free, clock, found = pool.allocate, pool.free, time.thread_time_ns, []
    for _ in range(count):
        begin = clock()
        for _ in range(20):
            free(allocate(nbytes))
        found.append((clock() - begin) / 20)
    return found


def gather(found, pool, nbytes, count):
    """Add the times of one thread to those of all."""
    found += timed(pool, nbytes, count)


def pairs(rounds):
    """Medians and 99th percentiles in µs."""
    print("\n### An allocation and its free from a warm pool\n\nµs of CPU time a pair, p50 / p99 of batches of 20\n")
    sizes = (64, 4096, 65536, 1 << 20, 16 << 20)
    print("| pool | threads | " + " | ".join(f"{n:,} bytes" for n in sizes) + " |\n|---|---|" + "---|" * len(sizes))
    rows = [("Naive", 1), ("auto_growth", 1), ("naive_best_fit, 500 MiB", 1), ("auto_growth", 2), ("auto_growth", 8)]
    for name, threads in rows:
        cells = []
        for nbytes in sizes:
            pool, found = POOLS[name](HOST), []
            timed(pool, nbytes, 20)
            for _ in range(rounds):
                workers = [
                    threading.Thread(target=gather, args=(found, pool, nbytes, 2000 // threads)) for _ in range(threads)
                ]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
            cells.append(f"{np.percentile(found, 50) / 1e3:.2f} / {np.percentile(found, 99) / 1e3:.2f}")
        print(f"| {name} | {threads} | " + " | ".join(cells) + " |")
    cells = []
    for nbytes in sizes:
        found = []
        for _ in range(rounds * 500):
            begin = time.thread_time_ns()
            for _ in range(20):
                np.empty(nbytes, np.uint8)
            found.append((time.thread_time_ns() - begin) / 20)
        cells.append(f"{np.percentile(found, 50) / 1e3:.2f} / {np.percentile(found, 99) / 1e3:.2f}")
    print("| `numpy.empty` | 1 | " + " | ".join(cells) + " |")
    if not PYTHONS:
        return
    print("\nArrays, made and dropped; CPU time of all threads, p50 / p99\n")
    print("| arrays | " + " | ".join(f"{n:,} bytes" for n in sizes) + " |\n|---|" + "---|" * len(sizes))
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
        found = json.loads(done.stdout.strip().splitlines()[-1])
        cells = [f"{found[str(n)][0] / 1e3:.2f} / {found[str(n)][1] / 1e3:.2f}" for n in sizes]
        print(f"| {library} | " + " | ".join(cells) + " |")


# -- traces -----------------------------------------------------------------------------------------------------------


def batches():
    """Training steps of four layers, forward and backward, with 1,000 batch sizes."""
    rng, name = random.Random(0), 0
    widths = (3072, 4096, 1024, 256, 10)
    for _ in range(1000):
        batch, held = rng.randint(1, 128), []
        for width in widths:
            name += 1
            held.append(name)
            yield name, 4 * batch * width
        for width in reversed(widths):
            name += 1
            yield name, 4 * batch * width
            yield held.pop(), None
            yield name, None


def lstm():
    """An imperative LSTM: gates, cells and states of 60 steps, 20 sequences of other lengths and batches."""
    rng, name = random.Random(1), 0
    for _ in range(20):
        batch, hidden, kept = rng.choice((16, 24, 32, 40)), 512, []
        for _ in range(rng.randint(20, 60)):
            short = []
            for nbytes in (4 * batch * 4 * hidden, *(4 * batch * hidden,) * 6):
                name += 1
                short.append(name)
                yield name, nbytes
            kept += short[:3]
            for one in short[3:]:
                yield one, None
        for one in reversed(kept):
            yield one, None


def planned(lower, upper, sizes):
    """The buffers of a plan, taken when they begin and given back when they end."""
    events = [(int(at), 1, k, int(n)) for k, (at, n) in enumerate(zip(lower, sizes, strict=True))]
    events += [(int(at), 0, k, None) for k, at in enumerate(upper)]
    for _, _, name, nbytes in sorted(events, key=lambda event: event[:3]):
        yield name, nbytes


def traces(rounds):
    """Reserved over live."""
    del rounds
    print("\n### Bytes reserved over bytes live, at their peaks\n")
    every = {"1,000 batch sizes": list(batches()), "imperative LSTM": list(lstm())}
    for name, lower, upper, sizes in packing_traces():
        every[name] = list(planned(lower, upper, sizes))
    print("| strategy | " + " | ".join(every) + " |\n|---|" + "---|" * len(every))
    for label, make in {**POOLS, **RULES}.items():
        cells = []
        for events in every.values():
            pool, held = make(Counting()), {}
            live = peak = 0
            for name, nbytes in events:
                if nbytes is None:
                    live -= held[name].nbytes
                    pool.free(held.pop(name))
                else:
                    held[name] = pool.allocate(nbytes)
                    live += nbytes
                    peak = max(peak, live)
            reserved = pool.reserved() if isinstance(pool, Torch) else pool.statistics().peak_reserved_bytes
            cells.append(f"{reserved / peak:.3f}")
        print(f"| {label} | " + " | ".join(cells) + " |")


def packing_traces():
    """(name, lower, upper, sizes) of a few instances of the planner's; sizes of one unit are taken as KiB."""
    found = []
    for name, buffers in (
        ("ResNet-50 (SOMAS)", read_csv(DATA / "somas_resnet50.csv")[1:]),
        ("plan of 60 layers", packing_instances.training_trace(100, 60, 1)),
        ("plan of 200 layers", packing_instances.training_trace(100, 200, 3)),
    ):
        lower, upper, sizes = buffers
        scale = 1024 if int(np.max(sizes)) < 1 << 20 else 1
        found.append((name, lower, upper, np.asarray(sizes) * scale))
    return found


# -- planned and dynamic runs -----------------------------------------------------------------------------------------


def bound(name, batch, ctx):
    """A network bound for training, with random arguments."""
    executor = mx.models.get(name).simple_bind(ctx, **mx.models.input_shapes(name, batch))
    rng = np.random.RandomState(0)
    for key, array in executor.arg_dict.items():
        array[:] = 0 if "label" in key else rng.rand(*array.shape).astype("float32") * 0.1
    return executor


def step(executor):
    """One forward and backward."""
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()


def steady(rounds):
    """Counts."""
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
    """Peaks and times."""
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
    """Ratios of CPU time."""
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
            for on in (False, True):
                if on:
                    storage.record()
                begin = time.process_time()
                for number in range(100):
                    step(executor)
                    if imperative:
                        for key, grad in executor.grad_dict.items():
                            executor.arg_dict[key][:] = executor.arg_dict[key] - 0.01 * grad
                        mx.nd.waitall()
                    if on:
                        pool.statistics()
                        if number == 99:
                            storage.snapshot()
                spent[on].append((time.process_time() - begin) / 100)
                storage.stop_recording()
        off, on = min(spent[False]), min(spent[True])
        ratio = statistics.median(b / a for a, b in zip(spent[False], spent[True], strict=True))
        print(f"| {label}, batch {batch} | {off * 1e3:.3f} ms | {on * 1e3:.3f} ms | {ratio:.3f} |")
        del executor
        gc.collect()
        mx.nd.waitall()


def trained(ctx, pool, rounds):
    """(seconds of each step, the parameters' bytes) of a ResNet-18 on arrays that may move."""
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
    """Ratios of wall time: copies to a file are none of the process's CPU time."""
    print("\n### Training in half the memory: ResNet-18, batch 4, WEFTPLAN_EXECUTOR_STRATEGY=dynamic\n")
    print("| device | home | peak with room enough | limit | step | step in half | ratio | bits | MiB sent a step |")
    print("|---|---|---|---|---|---|---|---|---|")
    os.environ["WEFTPLAN_EXECUTOR_STRATEGY"] = "dynamic"
    with tempfile.TemporaryDirectory() as folder:
        file = f"file:{folder}"
        for number, (kind, home) in enumerate((("cpu", file), ("sim", "host"), ("sim", file))):
            place = {"cpu": mx.cpu, "sim": mx.sim}[kind]
            pool = StatisticsResource(AutoGrowth(device.get(place(20 + number))))
            plain, bits = trained(place(20 + number), pool, rounds)
            peak, before = pool.statistics().peak_requested_bytes, traffic.out_bytes
            with mx.nd.spilling.using(home):
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
            print(f"| {kind} | {home.partition(':')[0]} | " + " | ".join(cells) + " |")
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
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mxnet-python", help="interpreter of an environment with mxnet==1.9.1, for pairs")
    parser.add_argument("--torch-python", help="interpreter of an environment with torch, for pairs")
    args = parser.parse_args()
    given = {"mxnet": args.mxnet_python, "torch": args.torch_python}
    PYTHONS.update({library: python for library, python in given.items() if python})
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(blas_setting.describe())
    for part in args.parts or PARTS:
        PARTS[part](args.rounds)


if __name__ == "__main__":
    main()
