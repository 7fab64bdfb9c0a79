"""Question: how much does a task cost compared with a pool of threads and dask, and do tasks gain on two cores?

* *cost*: processor time of a task that does nothing; all tasks are submitted before the first result is taken.
* *three arrays*: the same for tasks that read two arrays and write a third.
* *20 us*, *50 us*: wall time of independent tasks that run NumPy for that long without the GIL, against a loop.
* *stencil*: an iteration over bands of a grid in two buffers. Tasks, on slices or on tiles, need no barrier; the pool
  waits for all bands after each step, as in code written by hand.

Each figure is the median over the rounds. In a round all candidates run in one process, one after the other; the order
is reversed every round. BLAS is not used.

    python bench/bench_tasks.py [--rounds 9] [--count 4000] [--workers 2]
"""

import argparse
import os
import platform
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from weftplan import engine

try:
    import dask
    import dask.threaded
except ImportError:
    dask = None


def nothing():
    """Do nothing, as an empty task."""


def sqrt_exp(x, out):
    """Write exp(sqrt(x)) to ``out``: a few microseconds for each thousand elements, without the GIL."""
    np.sqrt(x, out=out)
    np.exp(out, out=out)


def smooth(source, out):
    """Write one band of a five-point stencil; ``source`` has one more row above and below than ``out``."""
    np.add(source[:-2, 1:-1], source[2:, 1:-1], out=out[:, 1:-1])
    out[:, 1:-1] += source[1:-1, :-2]
    out[:, 1:-1] += source[1:-1, 2:]
    out[:, 1:-1] *= 0.25


def cost(pool, count):
    """Return {candidate: function that submits ``count`` empty tasks and takes their results}."""

    def ours():
        for task in [engine.submit(nothing) for _ in range(count)]:
            task.result()

    def executor():
        for future in [pool.submit(nothing) for _ in range(count)]:
            future.result()

    by_name = {"weftplan": ours, "ThreadPoolExecutor": executor}
    if dask is not None:
        graph = {("t", i): (nothing,) for i in range(count)}
        by_name["dask"] = lambda: dask.threaded.get(graph, list(graph), num_workers=2)
    return by_name


def three_arrays(x, y, out):
    """Do nothing, as an empty task with three arrays."""


def arrays(pool, count):
    """Return {candidate: function that runs ``count`` empty tasks, each with two arrays to read and one to write}."""
    x, y, outs = np.ones(4), np.ones(4), [np.ones(4) for _ in range(count)]

    def ours():
        for out in outs:
            engine.submit(three_arrays, x, y, out=out)
        engine.wait()

    def executor():
        for future in [pool.submit(three_arrays, x, y, out=out) for out in outs]:
            future.result()

    return {"weftplan": ours, "ThreadPoolExecutor": executor}


def array_for(seconds):
    """Return a random array for which :func:`sqrt_exp` takes about ``seconds``."""
    size = 10_000
    while True:
        x = np.random.default_rng(0).random(size).astype(np.float32)
        out = np.empty_like(x)
        sqrt_exp(x, out)
        start = time.perf_counter()
        for _ in range(200):
            sqrt_exp(x, out)
        took = (time.perf_counter() - start) / 200
        if 0.9 * seconds < took < 1.1 * seconds:
            return x
        size = max(int(size * seconds / took), 16)


def independent(pool, count, seconds):
    """Return {candidate: function that runs ``count`` independent tasks of about ``seconds`` each}."""
    x = array_for(seconds)
    outs = [np.empty_like(x) for _ in range(count)]

    def loop():
        for out in outs:
            sqrt_exp(x, out)

    def ours():
        for out in outs:
            engine.submit(sqrt_exp, x, out=out)
        engine.wait()

    def executor():
        for future in [pool.submit(sqrt_exp, x, out) for out in outs]:
            future.result()

    by_name = {"the loop": loop, "weftplan": ours, "ThreadPoolExecutor": executor}
    if dask is not None:
        graph = {("t", i): (sqrt_exp_by_number, i) for i in range(count)}

        def run():
            _outs[:] = [(x, out) for out in outs]
            dask.threaded.get(graph, list(graph), num_workers=2)

        by_name["dask"] = run
    return by_name


_outs = []


def sqrt_exp_by_number(i):
    """Run task ``i``; its arrays are passed by number, because dask would copy them into its graph."""
    sqrt_exp(*_outs[i])


def stencil(pool, bands, size, steps):
    """Return {candidate: function that makes ``steps`` steps on a grid of ``size`` x ``size`` in ``bands`` bands}."""
    grids = [np.random.default_rng(0).random((size, size)) for _ in range(2)]
    rows = size // bands
    places = [(max(i * rows, 1), min((i + 1) * rows, size - 1)) for i in range(bands)]
    divided = [grid.copy() for grid in grids]
    for grid in divided:
        engine.tiles(grid, (rows, size))

    sliced = [grid.copy() for grid in grids]

    def loop():
        old, new = grids
        for _ in range(steps):
            for first, last in places:
                smooth(old[first - 1 : last + 1], new[first:last])
            old, new = new, old

    def ours(buffers):
        old, new = buffers
        for _ in range(steps):
            for first, last in places:
                engine.submit(smooth, old[first - 1 : last + 1], out=new[first:last])
            old, new = new, old
        engine.wait()

    def executor():
        old, new = grids
        for _ in range(steps):
            futures = [pool.submit(smooth, old[first - 1 : last + 1], new[first:last]) for first, last in places]
            for future in futures:
                future.result()
            old, new = new, old

    return {
        "the loop": loop,
        "weftplan, slices": partial(ours, sliced),
        "weftplan, tiles": partial(ours, divided),
        "ThreadPoolExecutor": executor,
    }


def measure(candidates, rounds, clock):
    """Return {candidate: median seconds over the rounds}, after one warm-up run of each."""
    seconds = {name: [] for name in candidates}
    for name in candidates:
        candidates[name]()
    for turn in range(rounds):
        for name in list(candidates)[:: 1 if turn % 2 else -1]:
            start = clock()
            candidates[name]()
            seconds[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def table(title, unit, scale, seconds_of, base):
    """Print one table; ``seconds_of`` has seconds by candidate, and ``base`` names the candidate to compare with."""
    print(f"\n| {title} | {unit} | times {base} |\n|---|---|---|")
    for name, seconds in seconds_of.items():
        print(f"| {name} | {seconds * scale:.1f} | {seconds / seconds_of[base]:.2f} |")


def main():
    """Measure tasks, the pool, dask and plain loops in every case, and print a table for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    peer = f"dask {dask.__version__}" if dask is not None else "no dask"
    python = f"Python {platform.python_version()}, NumPy {np.__version__}"
    print(f"{platform.machine()}, {os.cpu_count()} cores, {python}, {peer}")
    result = engine.create("ThreadedEnginePerDevice", task_workers=args.workers)
    with engine.using(result), ThreadPoolExecutor(args.workers) as pool:
        count = args.count
        actual = measure(cost(pool, count), args.rounds, time.process_time)
        table("cost of a task", "us of processor time", 1e6 / count, actual, "ThreadPoolExecutor")
        actual = measure(arrays(pool, count), args.rounds, time.process_time)
        table("the same with three arrays", "us of processor time", 1e6 / count, actual, "ThreadPoolExecutor")
        few = max(count // 4, 1)
        for micros in (20, 50):
            actual = measure(independent(pool, few, micros * 1e-6), args.rounds, time.perf_counter)
            table(f"independent tasks of {micros} us", "us of wall time each", 1e6 / few, actual, "the loop")
        steps = 100
        for size in (256, 1024):
            actual = measure(stencil(pool, 8, size, steps), args.rounds, time.perf_counter)
            table(f"stencil {size} x {size}, 8 bands", "us of wall time a step", 1e6 / steps, actual, "the loop")
    result.stop()


if __name__ == "__main__":
    main()
