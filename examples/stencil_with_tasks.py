"""A stencil on all cores without a barrier: a band begins its next step when its neighbours have done the last.

    python examples/stencil_with_tasks.py

Each task names the rows that it reads and the rows that it writes. The engine orders tasks by the tiles of these, so
the loop may run far ahead of the work, and the result is that of the plain loop, bit for bit.
"""

import time

import numpy as np

from weftplan import engine

SIZE, BAND, STEPS = 512, 64, 40


def smooth(source, out):
    """One step for a band: the mean of four neighbours."""
    np.add(source[:-2, 1:-1], source[2:, 1:-1], out=out[:, 1:-1])
    out[:, 1:-1] += source[1:-1, :-2]
    out[:, 1:-1] += source[1:-1, 2:]
    out[:, 1:-1] *= 0.25


def plain(first):
    """Step by step, on one core."""
    old, new = first.copy(), first.copy()
    for _ in range(STEPS):
        smooth(old, new[1:-1])
        old, new = new, old
    return old


def tasks(first):
    """The same as tasks on bands."""
    old, new = first.copy(), first.copy()
    engine.tiles(old, (BAND, SIZE))
    engine.tiles(new, (BAND, SIZE))
    for _ in range(STEPS):
        for begin in range(1, SIZE - 1, BAND):
            end = min(begin + BAND, SIZE - 1)
            engine.submit(smooth, old[begin - 1 : end + 1], out=new[begin:end])
        old, new = new, old
    engine.wait(old)
    engine.wait(new)
    return old


start = np.random.default_rng(0).random((SIZE, SIZE))
results = []
for name, function in (("plain", plain), ("tasks", tasks)):
    begin = time.perf_counter()
    results.append(function(start))
    print(f"{name}: {1e3 * (time.perf_counter() - begin):.0f} ms")
assert np.array_equal(*results)
print("both gave the same bits")
