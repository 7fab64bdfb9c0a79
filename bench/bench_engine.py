"""Question: how long does an operation pushed from Python take until it is done, in weftplan and in its peers?

weftplan and the peers run in alternation for several rounds, each in its own process. Figures are medians in
microseconds per operation, and the median of each round's ratio peer / weftplan. Peers are MXNet 1.9.1 (its own
interpreter: ``--mxnet-python``), dask's threaded scheduler, ``ThreadPoolExecutor`` with dependency callbacks written by
hand, and a plain loop. The placement of threads on cores has the largest effect, so the bench sets it, in two ways.
Then it measures operations with 50 microseconds of NumPy each, memory per pending operation, and latency. A peer that
is not installed is skipped.

    python bench/bench_engine.py [--mxnet-python PATH]
    python bench/bench_engine.py --placement apart       # operations without work, in this placement only
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys

import blas_setting

HERE = os.path.dirname(os.path.abspath(__file__))
PEERS = os.path.join(HERE, "peers")
PLACEMENTS = {
    "apart": "the pushing thread on one core, all others on the second",
    "together": "all on one core, as the kernel often has it, too",
}
HAS_DASK = importlib.util.find_spec("dask") is not None
SHAPES = ("independent", "chain", "diamond", "wavefront", "random")


def call(python, script, *args):
    """Run a peer's script, and return the JSON that it prints."""
    run = subprocess.run(
        [python, os.path.join(PEERS, script), *map(str, args)], capture_output=True, text=True, timeout=900, check=False
    )
    if run.returncode:
        raise SystemExit(f"{script} {args} failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def no_ops(args, placement):
    """Measure operations without work under one placement of threads, and print their tables."""
    os.environ["BENCH_PLACEMENT"] = placement
    me, rows = sys.executable, {}

    def measure(label, python, script, *extra):
        rows.setdefault(label, []).append(call(python, script, *extra))

    for _ in range(args.rounds):
        measure("weftplan, 1 worker", me, "weftplan_engine.py", args.count, 1)
        measure("weftplan, 2 workers", me, "weftplan_engine.py", args.count, 2)
        if args.mxnet_python:
            measure("MXNet, 1 worker", args.mxnet_python, "mxnet_engine.py", args.count, 1)
            measure("MXNet, 2 workers", args.mxnet_python, "mxnet_engine.py", args.count, 2)
        if HAS_DASK:
            measure("dask threaded, 2 workers", me, "dask_engine.py", max(1000, args.count // 8), 2)
        measure("ThreadPoolExecutor, 1 worker", me, "pool_engine.py", args.count, 1)
        measure("ThreadPoolExecutor, 2 workers", me, "pool_engine.py", args.count, 2)
    print(f"\n### Threads {placement}: {PLACEMENTS[placement]}\n")
    print(f"{args.count} no-op operations a shape, {args.rounds} rounds, median µs an operation, push to done\n")
    keys = [*SHAPES, "push_wait", "user_wait", "inplace_add"]
    print("| | " + " | ".join(keys) + " |")
    print("|---|" + "---|" * len(keys))
    for label, results in rows.items():
        cells = [f"{statistics.median(r[k] for r in results):.2f}" if k in results[0] else "" for k in keys]
        print(f"| {label} | " + " | ".join(cells) + " |")
    print("\nHow many times faster weftplan is (median of each round's pair):\n")
    print("| peer | against weftplan with | " + " | ".join(keys) + " |")
    print("|---|---|" + "---|" * len(keys))
    for label, results in rows.items():
        if label.startswith("weftplan"):
            continue
        own = "weftplan, 2 workers" if "2 workers" in label else "weftplan, 1 worker"
        cells = []
        for k in keys:
            pairs = [p[k] / o[k] for p, o in zip(results, rows[own], strict=True) if k in p]
            cells.append(f"{statistics.median(pairs):.1f}" if pairs else "")
        print(f"| {label} | {own.removeprefix('weftplan, ')} | " + " | ".join(cells) + " |")
    loop = statistics.median(r["loop"] for r in rows["ThreadPoolExecutor, 1 worker"])
    numpy = statistics.median(r["numpy_add"] for r in rows["weftplan, 1 worker"])
    print(f"\nThe floor: a plain loop of Python calls {loop:.3f} µs; NumPy's own a += 1 on 16 floats {numpy:.2f} µs.")


def main():
    """Measure weftplan and its peers, and print the tables; ``--placement`` and ``--profiler`` select a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mxnet-python", help="interpreter of a virtual environment with mxnet==1.9.1")
    parser.add_argument("--placement", choices=PLACEMENTS, help="only: operations without work, threads placed so")
    parser.add_argument("--profiler", action="store_true", help="only: what the profiler costs an operation")
    args = parser.parse_args()
    if args.profiler:
        raise SystemExit(subprocess.call([sys.executable, os.path.join(HERE, "profiler_cost.py")]))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}")
    print(blas_setting.describe())
    for peer, actual in (("MXNet", args.mxnet_python), ("dask", HAS_DASK)):
        if not actual:
            print(f"{peer} is skipped: {'it is not installed' if peer == 'dask' else 'no --mxnet-python'}")
    for placement in (args.placement,) if args.placement else PLACEMENTS:
        no_ops(args, placement)
    if args.placement:
        return
    del os.environ["BENCH_PLACEMENT"]
    me = sys.executable
    print("\n### 50 µs of NumPy in each operation, a core for each worker\n")
    print("| | " + " | ".join(SHAPES) + " |\n|---|" + "---|" * len(SHAPES))
    count = max(2000, args.count // 20)
    runs = [[call(me, "weftplan_engine.py", count, w, "work") for w in (1, 2)] for _ in range(args.rounds)]
    speedup = [statistics.median(one[s]["wall_s"] / two[s]["wall_s"] for one, two in runs) for s in SHAPES]
    print("| two workers, times faster than one | " + " | ".join(f"{x:.2f}" for x in speedup) + " |")
    for w in (0, 1):
        over = [statistics.median(r[w][s]["wall_s"] / r[w][s]["ideal_s"] for r in runs) for s in SHAPES]
        print(f"| wall / ideal schedule, {w + 1} worker(s) | " + " | ".join(f"{x:.3f}" for x in over) + " |")
    memory = call(me, "weftplan_engine.py", 1_000_000, 1, "memory")
    print(
        f"\nMemory: {memory['bytes_per_pending']:.0f} bytes per pending operation with {memory['operations']:,} "
        f"pending, {memory['bytes_kept_per_operation']:.1f} still resident per operation after they ran."
    )
    for w in (1, 2):
        times = call(me, "weftplan_engine.py", 20_000, w, "latency")
        print(
            f"Latency, {w} worker(s): from the end of the last dependency to the start of the next operation: median "
            f"{times['queued_median_ns'] / 1e3:.2f} µs, 99th percentile {times['queued_p99_ns'] / 1e3:.2f} µs."
        )


if __name__ == "__main__":
    main()
