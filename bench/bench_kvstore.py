"""Question: how fast does a store of one process exchange gradients, compared with plain NumPy and MXNet 1.9.1?

The first table (``sums``) is the sum of n arrays, in GB/s of useful bytes: n + 1 arrays. It is compared with a chain of
``np.add``, with the machine's copy bandwidth (the better of ``np.copyto`` on one thread and a copy on all), and with
the rate at which all threads read n arrays without writing, since a sum of many arrays is mostly reading. The methods
alternate, and a figure is the median of the rounds.

The second table (``store``) is the exchange of one float32 key on 4 CPU contexts, in GB/s of the fewest bytes that it
can touch: a push reads 4 arrays and writes one, a pull reads one and writes 4. The NumPy row does the same with
``np.add(a, b, out=)`` and ``np.copyto`` on one thread. Each framework runs in its own process; the frameworks
alternate, and figures are medians over the rounds.

    python bench/bench_kvstore.py --mxnet-python PATH [--rounds 3] [--store device] [--only PART]

Three parts follow. ``small``: microseconds of a key of 10 elements until the call returns, and until it is done.
``devices``: simulated time of a push and a pull between eight simulated devices, for each exchange method and for the
method that the store chooses. ``codec``: compression of gradients to two bits and one bit, in GB/s of the bytes read
and written, against the copies above and ``memset`` on all threads. Decompression reads very little, so the rate of
writing memory limits it.
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import blas_setting
import numpy as np

PEERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peers")
CONTEXTS = 4
REPEAT = {10: 2000, 10_000: 300, 1_000_000: 40, 10_000_000: 8}
SMALL = 10
SUMS = (2, 4, 8, 16)
SUM_ELEMENTS = 1 << 24
WAYS = ("fill", "pack", "NumPy", "one", "four")
STEPS = ("push", "pull", "push+pull")


def peer(python, package, store, elements):
    """Return the seconds of each step on a store, measured in a new process; exit if its sum is wrong."""
    command = [python, os.path.join(PEERS, "store_exchange.py"), package, store, str(elements), str(REPEAT[elements])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if run.returncode:
        raise SystemExit(f"{command} failed:\n{run.stderr[-2000:]}")
    result = json.loads(run.stdout.strip().splitlines()[-1])
    if not result["right"]:
        raise SystemExit(f"{package} {store}: the sum is wrong")
    return result


def plain(elements):
    """Return the seconds of each step with NumPy on one thread, in the form of :func:`peer`."""
    values = [np.full(elements, i + 1.0, np.float32) for i in range(CONTEXTS)]
    outs, total = [np.zeros(elements, np.float32) for _ in range(CONTEXTS)], np.zeros(elements, np.float32)

    def push():
        np.add(values[0], values[1], out=total)
        for value in values[2:]:
            np.add(total, value, out=total)

    def pull():
        for out in outs:
            np.copyto(out, total)

    def both():
        push()
        pull()

    result = {}
    for name, work in zip(STEPS, (push, pull, both), strict=True):
        times = []
        for _ in range(REPEAT[elements] + 2):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        result[name] = statistics.median(times[2:])
    return result


def sums(rounds):
    """Print the speed of each method of summing n arrays of 64 MB, in GB/s and in percent of the copy bandwidth."""
    from weftplan.kvstore.fixed_order_sums import reduce_arrays, spread_array, sum_grouped_block, sum_sequential_block
    from weftplan.support.core_sharing import share_out

    threads, nbytes = os.cpu_count() or 1, 4 * SUM_ELEMENTS
    arrays = [np.full(SUM_ELEMENTS, i + 1.0, np.float32) for i in range(max(SUMS))]
    out = np.zeros(SUM_ELEMENTS, np.float32)
    sharing = {"threads": threads, "bound": 1}
    add = partial(reduce_arrays, **sharing)

    def chain(count):
        np.add(arrays[0], arrays[1], out=out)
        for array in arrays[2:count]:
            np.add(out, array, out=out)

    def read(count):
        # A maximum is as fast as memory; a sum in a fixed order is slower.
        work = lambda first, last: [array[first:last].max() for array in arrays[:count]]  # noqa: E731
        share_out(work, SUM_ELEMENTS, 1 << 18, threads)

    print(f"sum of n float32 arrays of {nbytes >> 20} MB, {threads} threads, {rounds} rounds: GB/s (part of copy)\n")
    print("| n | copy | read | np.add chain | NumPy in blocks | left to right | local order | chain / left to right |")
    print("|---|---|---|---|---|---|---|---|")
    for count in SUMS:
        ways = {
            "copy": partial(np.copyto, out, arrays[0]),
            "copy on all": partial(spread_array, arrays[0], [out], **sharing),
            "read": partial(read, count),
            "chain": partial(chain, count),
            "blocks": partial(add, arrays[:count], out, block_sum=sum_sequential_block, compiled=False),
            "sequential": partial(add, arrays[:count], out, block_sum=sum_sequential_block),
            "grouped": partial(add, arrays[:count], out, block_sum=sum_grouped_block),
        }
        times = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, work in ways.items():
                start = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - start)
        if not (out == count * (count + 1) / 2).all():
            raise SystemExit(f"the sum of {count} arrays is wrong")
        median = {name: statistics.median(by_name[1:]) for name, by_name in times.items()}
        copy = 2 * nbytes / min(median["copy"], median["copy on all"]) / 1e9
        cells = [f"{copy:.1f}"]
        for name in ("read", "chain", "blocks", "sequential", "grouped"):
            speed = (count + (name != "read")) * nbytes / median[name] / 1e9
            cells.append(f"{speed:.1f} ({100 * speed / copy:.0f} %)")
        print(f"| {count} | " + " | ".join(cells) + f" | {median['chain'] / median['sequential']:.2f} |", flush=True)
    print()


def small(runs, rounds):
    """Print the microseconds of a push and a pull of a small key, until the call returns and until it is done."""
    print(
        f"a key of {SMALL} elements, {CONTEXTS} contexts, {rounds} rounds; microseconds until the call returns / done\n"
    )
    print("| | push | pull |\n|---|---|---|")
    times = {name: [] for name in runs if name != "NumPy, 1 thread"}
    for _ in range(rounds):
        for name, actual in times.items():
            actual.append(runs[name](SMALL))
    for name, actual in times.items():
        cells = []
        for step in ("push", "pull"):
            called, done = (1e6 * statistics.median(one[key] for one in actual) for key in (f"{step} called", step))
            cells.append(f"{called:.1f} / {done:.1f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main():
    """Run all parts, or the part named by ``--only``, and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", choices=("device", "local"), default="device")
    parser.add_argument("--mxnet-python", help="interpreter of a virtual environment with mxnet==1.9.1")
    parser.add_argument("--only", choices=("sums", "store", "small", "devices", "codec"))
    args = parser.parse_args()
    runs = {"weftplan": lambda n: peer(sys.executable, "weftplan", args.store, n), "NumPy, 1 thread": plain}
    if args.mxnet_python:
        runs["MXNet 1.9.1"] = lambda n: peer(args.mxnet_python, "mxnet", args.store, n)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(blas_setting.describe())
    if args.only in (None, "sums"):
        sums(3 * args.rounds)
    if args.only in (None, "store"):
        exchange(runs, args.store, args.rounds)
    if args.only in (None, "small"):
        small(runs, args.rounds)
    if args.only in (None, "devices"):
        devices()
    if args.only in (None, "codec"):
        codecs(3 * args.rounds)


def codecs(rounds):
    """Print the speed of compressing and decompressing a gradient, in GB/s and percent of the copy bandwidth."""
    from weftplan.kvstore.compression import Compression
    from weftplan.kvstore.fixed_order_sums import spread_array

    size, threads = SUM_ELEMENTS, os.cpu_count() or 1
    gradient = np.random.default_rng(0).standard_normal(size, np.float32)
    residual, out = np.zeros(size, np.float32), np.empty(size, np.float32)
    pool = ThreadPoolExecutor(threads)
    print(f"float32 gradient of {4 * size >> 20} MB, {threads} threads, {rounds} rounds: GB/s (part of copy)\n")
    print("| | copy | fill | pack | pack, NumPy | unpack one | sum of four | bytes |")
    print("|---|---|---|---|---|---|---|---|")
    parts = [array.ctypes.data for array in np.array_split(out, threads)]

    def fill():
        list(pool.map(lambda address: ctypes.memset(address, 1, 4 * (size // threads)), parts))

    for kind in ("2bit", "1bit"):
        rule = Compression(0.5, kind)
        packed = [np.zeros(rule.packed_size(size), np.uint8) for _ in range(4)]
        bits = packed[0].nbytes
        ways = {
            "copy": (8 * size, partial(np.copyto, out, gradient)),
            "copy on all": (8 * size, partial(spread_array, gradient, [out], threads=threads, bound=1)),
            "fill": (4 * size, fill),
            "pack": (12 * size + bits, partial(rule.pack, gradient, residual, packed[0], threads=threads)),
            "NumPy": (12 * size + bits, partial(rule.pack, gradient, residual, packed[0], compiled=False)),
            "one": (4 * size + bits, partial(rule.unpack_sum, packed[:1], out, threads=threads)),
            "four": (4 * size + 4 * bits, partial(rule.unpack_sum, packed, out, threads=threads)),
        }
        times = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, (_, work) in ways.items():
                start = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - start)
        speed = {name: ways[name][0] / statistics.median(by_name[1:]) / 1e9 for name, by_name in times.items()}
        copy = max(speed["copy"], speed["copy on all"])
        cells = [f"{speed[name]:.1f} ({100 * speed[name] / copy:.0f} %)" for name in WAYS]
        print(f"| {kind} | {copy:.1f} | {' | '.join(cells)} | 1/{4 * size / bits:.0f} |", flush=True)
    print()


def devices():
    """Print the simulated time of a push and pull between eight devices, with each method and as the store chooses."""
    import weftplan as mx
    from weftplan.device.links import connect, nvlink_mesh, pcie_tree
    from weftplan.device.simulated import seconds_of
    from weftplan.kvstore.exchange.choice import Chooser
    from weftplan.kvstore.exchange.ways import TreeRule

    contexts = [mx.sim(index) for index in range(8)]
    print("push and pull on 8 simulated devices, simulated microseconds\n")
    for name, make in (("NVLink mesh", nvlink_mesh), ("PCIe tree", pcie_tree)):
        for elements in (1_000, 100_000, 1_000_000, 4_000_000):
            connect(make())
            chooser = Chooser(peers=True, trees_only=False, rule=TreeRule(), log_trees=False)
            plan = chooser.plan(contexts, 0, elements, 4)
            kv = mx.kv.create("device")
            kv.init("w", mx.nd.zeros((elements,), ctx=contexts[0]))
            kv.set_updater(lambda key, merged, stored: None)  # without it the sum is also copied
            arrays = [mx.nd.ones((elements,), ctx=ctx) for ctx in contexts]

            def both(kv=kv, arrays=arrays):
                kv.push("w", arrays)
                kv.pull("w", arrays)
                mx.nd.waitall()

            both()
            took = seconds_of(both, contexts)
            best = min(plan.seconds[way] for way in ("one_step", "ring", "tree", "trees"))
            cells = [f"{way} {1e6 * seconds:.0f}" for way, seconds in plan.seconds.items()]
            print(
                f"{name}, {elements:,} elements: {', '.join(cells)}; the store chose {plan.way.name}: "
                f"{1e6 * took:.0f}, {took / best:.2f} of the best of one step, ring and tree",
                flush=True,
            )
    connect(None)
    print()


def exchange(runs, store, rounds):
    """Print the speed of pushing and pulling one key, by number of elements."""
    print(f"store {store!r}, {CONTEXTS} contexts, {rounds} rounds; GB/s (microseconds)\n")
    print("| elements | | " + " | ".join(STEPS) + " |\n|---|---|" + "---|" * len(STEPS))
    for elements in list(REPEAT)[1:]:
        times = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(run(elements))
        for name, results in times.items():
            cells = []
            for step in STEPS:
                seconds = statistics.median(result[step] for result in results)
                arrays = (CONTEXTS + 1) * (2 if step == "push+pull" else 1)
                cells.append(f"{arrays * 4 * elements / seconds / 1e9:.1f} ({seconds * 1e6:,.0f})")
            print(f"| {elements:,} | {name} | " + " | ".join(cells) + " |", flush=True)
    print()


if __name__ == "__main__":
    main()
