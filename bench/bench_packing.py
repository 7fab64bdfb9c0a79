"""Question: how close to the lower bound, and how fast, are buffers packed into one slab?

Instances are recorded problems in ``bench/data`` (the MiniMalloc challenge problems A to K and a SOMAS trace of
ResNet-50), generated problems of the same kinds whose optimum equals the bound (``challenge``), planted problems cut
from a full rectangle, and generated traces of large training runs. Baselines in the same run are first fit by size, as
in most compilers, and best fit by birth. Every packing is checked.

``growth`` packs eight kinds of buffers in child processes, up to ``--max-buffers`` of each. Goals for a million: at
most 1.5 times the lower bound, 20 s of processor time, 2 GB. ``limits`` packs under a time limit, which may be exceeded
by a fifth, and never gives more than the fallback by birth.

    python bench/bench_packing.py [--effort normal] [--only hard]
    python bench/bench_packing.py --only growth --max-buffers 1000000
"""

import argparse
import math
import multiprocessing
import os
import platform
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import blas_setting
import numpy as np
from packing_instances import KINDS, challenges, planted, skewed_trace, training_trace

from weftplan.cli.pack_csv import read_csv
from weftplan.planner.packing import check_packing, pack
from weftplan.planner.packing.hard import search
from weftplan.planner.packing.place_by_birth import pack_by_birth
from weftplan.planner.packing.problem import peak_of, sectioned

DATA = Path(__file__).parent / "data"


def instances(only, most):
    """Yield (group, name, buffers) of group ``only`` (None: all); planted instances have at most ``most`` buffers."""
    if only in (None, "hard"):
        for path in sorted((DATA / "minimalloc").glob("*.csv")):
            yield "hard", path.name.split(".")[0], read_csv(path)[1:]
    if only in (None, "challenge"):
        for name, buffers in challenges(1, (250, 450)):
            yield "challenge", name, buffers
    if only in (None, "somas"):
        yield "somas", "resnet50", read_csv(DATA / "somas_resnet50.csv")[1:]
    if only in (None, "planted"):
        for n in (1_000, 10_000, 100_000, 1_000_000):
            for side in (20, 30):
                if n <= most and not (n > 100_000 and side == 20):
                    yield "planted", f"{n} in 2^{side} x 2^{side}", planted(n, 1, duration=1 << side, memory=1 << side)
    if only in (None, "large"):
        yield "large", "training 100 x 60", training_trace(100, 60, 1)
        yield "large", "training 60 x 160", training_trace(60, 160, 2)
        yield "large", "training 100 x 200", training_trace(100, 200, 3)
        yield "large", "skewed 20k", skewed_trace(20_000, 1)
        yield "large", "skewed 60k", skewed_trace(60_000, 2)


def baseline(buffers, *, by_birth):
    """Return peak / lower bound of first fit by size, or best fit by birth; None for over 50,000 buffers."""
    lower, upper, size = buffers
    if len(lower) > 50_000:
        return None
    problem = sectioned(lower, upper, size, np.arange(len(lower)))
    order = np.lexsort((-size, problem.lo)) if by_birth else search.orders(problem)[0][0]
    return peak_of(problem, search.fit(problem, order, best=by_birth)) / problem.lower_bound()


def measured(buffers, effort):
    """Pack the buffers, check the result, and return (peak / lower bound, seconds of processor time)."""
    began = time.process_time()
    packing = pack(*buffers, effort=effort)
    seconds = time.process_time() - began
    if check_packing(*buffers, packing.offsets) > packing.peak:
        raise SystemExit("the packing is higher than it says")
    return packing.ratio, seconds


def grown(kind, count, effort):
    """Pack ``count`` buffers of a kind; return (buffers, peak / lower bound, seconds, most bytes of this process)."""
    buffers = KINDS[kind](count, 7)
    ratio, seconds = measured(buffers, effort)
    return len(buffers[0]), ratio, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def growth(effort, most):
    """Print a row for each kind and count; each runs in a process of its own, whose memory is printed."""
    print("| kind | buffers | ratio | s | memory of the process, MB |")
    print("|---|---|---|---|---|")
    spawn = multiprocessing.get_context("spawn")
    for count in (10_000, 100_000, 700_000, 1_000_000):
        for kind in KINDS if count <= most else ():
            with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                buffers, ratio, seconds, nbytes = pool.submit(grown, kind, count, effort).result()
            print(f"| {kind} | {buffers} | {ratio:.4f} | {seconds:.1f} | {nbytes / 1e6:.0f} |", flush=True)


def limits(most):
    """Print what `pack` returns under time limits, next to the fallback and to the result without a limit."""
    print("| kind | buffers | limit, s | wall s | ratio | fallback |")
    print("|---|---|---|---|---|---|")
    for count, seconds in ((2_000, (0.1, 0.3)), (10_000, (0.3, 1)), (100_000, (1, 3)), (1_000_000, (8, 15))):
        for kind in KINDS if count <= most else ():
            buffers = KINDS[kind](count, 7)
            problem = sectioned(*buffers, np.arange(len(buffers[0])))
            fallback = peak_of(problem, pack_by_birth(problem)) / problem.lower_bound()
            for limit in seconds:
                began = time.perf_counter()
                ratio = pack(*buffers, time_limit=limit).ratio
                wall = time.perf_counter() - began
                late = "" if wall <= 1.2 * limit else " (late)"
                print(f"| {kind} | {count} | {limit} | {wall:.2f}{late} | {ratio:.4f} | {fallback:.4f} |", flush=True)
                assert ratio <= fallback


def main():
    """Measure and print the table and the geometric means."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effort", default="normal", choices=["fast", "normal", "max"])
    parser.add_argument("--only", choices=["hard", "challenge", "somas", "planted", "large", "growth", "limits"])
    parser.add_argument("--max-buffers", type=int, default=100_000, help="largest planted or growing instance")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, NumPy {np.__version__}")
    print(blas_setting.describe())
    print(f"effort {args.effort}; ratio = peak / most live bytes; seconds of processor time; one thread\n")
    if args.only == "growth":
        return growth(args.effort, args.max_buffers)
    if args.only == "limits":
        return limits(args.max_buffers)
    print("| set | instance | buffers | size first fit | birth best fit | ratio | s |")
    print("|---|---|---|---|---|---|---|")
    ratios = {}
    for group, name, buffers in instances(args.only, args.max_buffers):
        rivals = [baseline(buffers, by_birth=b) for b in (False, True)]
        ratio, seconds = measured(buffers, args.effort)
        ratios.setdefault(group, []).append(ratio)
        cells = [*(f"{v:.4f}" if v else "-" for v in rivals), f"{ratio:.4f}", f"{seconds:.2f}"]
        print(f"| {group} | {name} | {len(buffers[0])} | {' | '.join(cells)} |", flush=True)
    print("\ngeometric means (worst)")
    for group, actual in ratios.items():
        print(f"  {group:10} {math.exp(sum(map(math.log, actual)) / len(actual)):.4f} ({max(actual):.4f})")


if __name__ == "__main__":
    main()
