"""Measure the figures of speed in docs/comparison.md again, and print its tables.

    python bench/refresh.py --quick --mxnet-python PATH          # under 8 minutes; prints this machine's figures
    python bench/refresh.py --mxnet-python PATH --save           # adds them to data/figures.json
    python docs/refresh.py                                       # writes docs/comparison.md from that file

Run it on an idle machine. Each figure is the median over the rounds; a ratio is the median of each round's pair. If a
peer is not installed, its rows are left out.
"""

import argparse
import datetime
import importlib.util
import os
import platform
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bench_engine
import bench_kvstore
import bench_tasks
import bench_training
import figures

from weftplan import engine as engines

ME = sys.executable
SHAPES = {"independent": "independent", "chain": "chain", "diamond": "diamond", "push_wait": "push and wait"}


def processor():
    """Return the processor's name, as the operating system reports it, and its widest vector instructions."""
    path = Path("/proc/cpuinfo")
    facts = dict(re.findall(r"^(.*?)\s*: (.*)$", path.read_text(), re.MULTILINE)) if path.exists() else {}
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    wide = next((name for flag, name in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in facts["flags"]), "SSE")
    return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']}), {wide}"


def medians(rounds, keys):
    """Return the median over the rounds for each key."""
    return {key: statistics.median(one[key] for one in rounds) for key in keys}


def ratios(above, below, keys):
    """Return the median over the rounds of ``above / below``, for each key that both have."""
    pairs = list(zip(above, below, strict=True))
    common = [key for key in keys if key in above[0] and key in below[0]]
    return {key: statistics.median(one[key] / second[key] for one, second in pairs) for key in common}


def engine(mxnet, quick):
    """Return {row: {column: figure}} of empty operations: weftplan's µs and the peers' ratios, for both placements."""
    count, rounds = (50_000, 3) if quick else (100_000, 7)
    rows = {}
    for placement in bench_engine.PLACEMENTS:
        os.environ["BENCH_PLACEMENT"] = placement
        peers = {f"weftplan {workers}": (ME, "weftplan_engine.py", count, workers) for workers in (1, 2)}
        if mxnet:
            peers |= {f"MXNet {workers}": (mxnet, "mxnet_engine.py", count, workers) for workers in (1, 2)}
        peers["pool 1"] = (ME, "pool_engine.py", count, 1)
        if bench_engine.HAS_DASK:
            peers["dask 2"] = (ME, "dask_engine.py", count // 8, 2)
        by_name = {name: [] for name in peers}
        for _ in range(rounds):
            for name, command in peers.items():
                by_name[name].append(bench_engine.call(*command))
        rows[f"weftplan, threads {placement}, µs"] = medians(by_name["weftplan 1"], SHAPES)
        for name, runs in by_name.items():
            peer, workers = name.split()
            if peer != "weftplan":
                label = {"MXNet": "MXNet 1.9.1", "pool": "`ThreadPoolExecutor` with callbacks by hand"}.get(peer, peer)
                several = f"{workers} worker{'s' * (workers != '1')}"
                rows[f"{label} / weftplan, {several}, threads {placement}"] = ratios(
                    runs, by_name[f"weftplan {workers}"], SHAPES
                )
    del os.environ["BENCH_PLACEMENT"]
    return {row: {SHAPES[key]: value for key, value in figures_.items()} for row, figures_ in rows.items()}


def tasks(mxnet, quick):
    """Return {row: {column: figure}} of tasks: weftplan's time / that of a pool of two threads."""
    count, rounds = (4000, 5) if quick else (4000, 15)
    result = engines.create("ThreadedEnginePerDevice", task_workers=2)
    row = {}
    with engines.using(result), ThreadPoolExecutor(2) as pool:

        def compare(column, candidates, clock, ours="weftplan"):
            actual = bench_tasks.measure(candidates, rounds, clock)
            row[column] = actual[ours] / actual["ThreadPoolExecutor"]

        compare("empty", bench_tasks.cost(pool, count), time.process_time)
        compare("three arrays", bench_tasks.arrays(pool, count), time.process_time)
        for micros in (20, 50):
            work = bench_tasks.independent(pool, count // 4, micros * 1e-6)
            compare(f"{micros} µs", work, time.perf_counter)
        for size in (256, 1024):
            work = bench_tasks.stencil(pool, 8, size, 100)
            compare(f"stencil {size}²", work, time.perf_counter, "weftplan, slices")
    result.stop()
    return {"two workers": row}


def training(mxnet, quick):
    """Return {row: {column: figure}} of training steps: weftplan's time / MXNet's; {} without MXNet."""
    rows = {}
    for threads, row in ((1, "one thread each"), (2, "two threads each")) if mxnet else ():
        rows[row] = {}
        for network, label in figures.NETWORKS.items():
            if quick and network == "resnet18_224":
                continue
            quotients = []
            for _ in range(2 if quick else 5):
                ours, theirs = (
                    bench_training.call(
                        python, threads, "module_training.py", package, network, bench_training.STEPS[network]
                    )
                    for python, package in ((ME, "weftplan"), (mxnet, "mxnet"))
                )
                quotients.append(ours["step_s"] / theirs["step_s"])
            rows[row][label] = statistics.median(quotients)
    return rows


def store(mxnet, quick):
    """Return {row: {column: figure}} of exchanges in one process: MXNet's time / weftplan's; {} without MXNet."""
    row = {}
    columns = {10_000: "push and pull of 10,000 floats", 1_000_000: "of 1,000,000"}
    for elements, column in columns.items() if mxnet else ():
        quotients = []
        for _ in range(3 if quick else 7):
            ours, theirs = (
                bench_kvstore.peer(python, package, "device", elements)["push+pull"]
                for python, package in ((ME, "weftplan"), (mxnet, "mxnet"))
            )
            quotients.append(theirs / ours)
        row[column] = statistics.median(quotients)
    return {"times as fast": row} if row else {}


MEASUREMENTS = {"engine": engine, "tasks": tasks, "training": training, "store": store}


def main():
    """Measure the tables and print them; with ``--save`` store the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and without ResNet-18 at 224x224")
    parser.add_argument("--mxnet-python", help="interpreter of a virtual environment with mxnet==1.9.1")
    parser.add_argument("--only", choices=MEASUREMENTS, action="append", help="this table; may be repeated")
    parser.add_argument("--save", action="store_true", help="add the figures to data/figures.json")
    args = parser.parse_args()
    run = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "figures": {},
    }
    if args.save and run["load"] and run["load"] > 1:
        parser.error(f"--save needs a machine that does nothing else, but its load is {run['load']}; try again later")
    print(f"{run['processor']}, {os.cpu_count()} cores, load {run['load']}, Python {platform.python_version()}")
    for peer, actual in (("MXNet", args.mxnet_python), ("dask", importlib.util.find_spec("dask"))):
        if not actual:
            print(f"{peer} is skipped: it is not installed, or no --mxnet-python")
    for name in args.only or MEASUREMENTS:
        start = time.perf_counter()
        rows = MEASUREMENTS[name](args.mxnet_python, args.quick)
        if rows:
            run["figures"][name] = rows
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    print("\n" + figures.markdown([run]))
    if args.save:
        figures.save([*figures.load(), run])


if __name__ == "__main__":
    main()
