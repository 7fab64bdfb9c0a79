"""A stencil on all cores without a barrier: a band starts a step once its neighbours have done the previous step.

    python examples/stencil_with_tasks.py

Each task names the rows that it reads and the rows that it writes. The engine orders two tasks whose rows overlap, so
the loop may run far ahead of the work, and the result is that of the plain loop, bit for bit. Tasks only gain if a band
takes much longer than waking a thread. Here a task takes some tenths of a millisecond: on two idle cores it takes 0.6
to 0.95 of the plain loop's time, while on a busy machine the loop may be faster. With a ``SIZE`` of 256 it always is.
"""

import os
import time

import numpy as np

from weftplan import engine

SIZE, BANDS, STEPS = 1024, 8, 40


def smooth(source, out):
    """Compute one step for a band: the mean of four neighbours."""
    np.add(source[:-2, 1:-1], source[2:, 1:-1], out=out[:, 1:-1])
    out[:, 1:-1] += source[1:-1, :-2]
    out[:, 1:-1] += source[1:-1, 2:]
    out[:, 1:-1] *= 0.25


def bands_of(size, bands):
    """Return (first row, end row) of each band, without the border of the grid."""
    rows = -(-size // bands)
    return [(max(first, 1), min(first + rows, size - 1)) for first in range(0, size, rows)]


def plain(old, new, bands, steps):
    """Compute all steps band by band on one core; return the result."""
    for _ in range(steps):
        for first, last in bands:
            smooth(old[first - 1 : last + 1], new[first:last])
        old, new = new, old
    return old


def tasks(old, new, bands, steps):
    """Submit a task for each band and step, wait for all, and return the result."""
    for _ in range(steps):
        for first, last in bands:
            engine.submit(smooth, old[first - 1 : last + 1], out=new[first:last])
        old, new = new, old
    engine.wait(old)
    engine.wait(new)
    return old


start = np.random.default_rng(0).random((SIZE, SIZE))
bands = bands_of(SIZE, BANDS)
tasks(start.copy(), start.copy(), bands, 2)  # starts the workers
seconds, results = {}, []
for function in (plain, tasks):
    buffers = start.copy(), start.copy()
    begin = time.perf_counter()
    results.append(function(*buffers, bands, STEPS))
    seconds[function.__name__] = time.perf_counter() - begin
    print(f"{function.__name__}: {1e3 * seconds[function.__name__]:.0f} ms")
assert np.array_equal(*results)
ratio = seconds["tasks"] / seconds["plain"]
print(f"both gave the same bits; with tasks it took {ratio:.2f} times as long, on {os.cpu_count()} cores")
