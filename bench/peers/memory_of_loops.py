"""One loop of array operations: ``python memory_of_loops.py {weftplan|mxnet} LOOP MIB STEPS`` prints JSON.

The JSON has the peak of resident bytes above those before the loop, the remainder after all arrays are freed, and the
wall and CPU seconds.
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
    """Return (resident bytes now, peak of resident bytes)."""
    with open("/proc/self/status") as file:
        actual = dict(line.split(":", 1) for line in file)
    return tuple(int(actual[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))


def one_size(wait):
    """Replace an array by a result of the same size in every step: ``a = a * 1.0001``."""
    a = nd.ones((elements,))
    for _ in range(steps):
        a = a * 1.0001
        if wait:
            a.wait_to_read()


def temporaries(wait):
    """Compute a temporary array in every step, and add up the sums of these arrays."""
    a, total = nd.ones((elements,)), nd.zeros((1,))
    for step in range(steps):
        total += nd.sum(a * (step + 1))
        if wait:
            total.wait_to_read()


def other_sizes(wait):
    """Make one array per step; its size grows from 1 / steps of the largest size to the largest size."""
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
    """Append samples of the resident bytes to ``most``, used if the system's peak is from before the loop."""
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
