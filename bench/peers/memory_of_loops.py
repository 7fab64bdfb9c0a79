"""One loop of array operations: ``python memory_of_loops.py {weftplan|mxnet} LOOP MIB STEPS`` prints JSON.

Resident bytes above those before the loop: the most, and the rest after all arrays have gone; and seconds.
"""

import gc
import importlib
import json
import sys
import threading
import time

package, loop, mib, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
mx = importlib.import_module(package)
nd = mx.nd
elements = mib * 2**18


def status():
    """Return (resident bytes now, most so far)."""
    with open("/proc/self/status") as file:
        actual = dict(line.split(":", 1) for line in file)
    return tuple(int(actual[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))


def one_size(wait):
    """The same array again and again: ``a = a * 1.0001``."""
    a = nd.ones((elements,))
    for _ in range(steps):
        a = a * 1.0001
        if wait:
            a.wait_to_read()


def temporaries(wait):
    """Results of one array; only their sum is kept."""
    a, total = nd.ones((elements,)), nd.zeros((1,))
    for step in range(steps):
        total += nd.sum(a * (step + 1))
        if wait:
            total.wait_to_read()


def other_sizes(wait):
    """Arrays of ever other sizes, from 1 / steps of the largest to all of it, one after the other."""
    for step in range(steps):
        a = nd.ones((elements * (step + 1) // steps,))
        a += 1
        if wait:
            a.wait_to_read()


nd.ones((1024,)).asnumpy()
(nd.ones((4,)) * 2 + 1).asnumpy()
nd.waitall()
before, top = status()
most = [before]
done = threading.Event()


def watch():
    """If the process was larger before the loop than in it, its mark says nothing, and samples are taken."""
    while not done.wait(0.002):
        most.append(status()[0])


watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
wall, cpu = time.perf_counter(), time.process_time()
{"one size": one_size, "temporaries": temporaries, "other sizes": other_sizes}[loop.removesuffix(", waiting")](
    loop.endswith(", waiting")
)
nd.waitall()
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
done.set()
watcher.join()
gc.collect()
nd.waitall()
now, mark = status()
peak = mark if mark > top else max(most)
print(json.dumps({"peak": peak - before, "left": now - before, "wall_s": wall, "cpu_s": cpu}))
