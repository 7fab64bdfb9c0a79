"""CPU time of making and dropping an array: ``python memory_pairs.py {weftplan|mxnet|torch} NBYTES…`` prints JSON.

The JSON has, for each size, the median and the 99th percentile of nanoseconds per array, measured in batches of 20;
threads of the library are included.
"""

import importlib
import json
import sys
import time

library = importlib.import_module(sys.argv[1])
BATCHES = 1500


def make(nbytes):
    """Return an uninitialized array of ``nbytes`` bytes."""
    if sys.argv[1] == "torch":
        return library.empty(nbytes, dtype=library.uint8)
    return library.nd.empty((nbytes,), dtype="uint8")


def batches(nbytes):
    """Return the sorted nanoseconds per array of each batch, without the first tenth of the batches."""
    results = []
    for _ in range(BATCHES):
        begin = time.process_time_ns()
        for _ in range(20):
            make(nbytes)
        results.append((time.process_time_ns() - begin) / 20)
        if sys.argv[1] != "torch":
            library.nd.waitall()
    return sorted(results[BATCHES // 10 :])


result = {}
for size in map(int, sys.argv[2:]):
    times = batches(size)
    result[size] = [times[len(times) // 2], times[len(times) * 99 // 100]]
print(json.dumps(result))
