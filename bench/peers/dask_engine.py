"""Engine peer: dask's threaded scheduler runs the programs as graphs of no-op tasks.

python bench/peers/dask_engine.py COUNT WORKERS
"""

import importlib.util
import json
import os
import sys
import time

import dask.threaded

spec = importlib.util.spec_from_file_location(
    "engine_programs", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "engine_programs.py")
)
programs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(programs)


def nothing(*_):
    """Do nothing: the function of every task."""


def graph_of(program):
    """Return (dask graph with the program's dependencies, keys of the tasks that no task depends on)."""
    graph, last_write, readers = {}, {}, {}
    for i, (reads, writes) in enumerate(program):
        needs = {last_write[v] for v in (*reads, *writes) if v in last_write}
        for v in writes:
            needs.update(readers.pop(v, ()))
        graph[i] = (nothing, *needs)
        for v in reads:
            readers.setdefault(v, []).append(i)
        for v in writes:
            last_write[v] = i
    used = {k for task in graph.values() for k in task[1:]}
    return graph, [k for k in graph if k not in used]


def main():
    """Time every program once, and print microseconds per operation as JSON."""
    count, workers = int(sys.argv[1]), int(sys.argv[2])
    programs.place()
    result = {}
    for name, make in programs.SHAPES.items():
        _, program = make(count)
        graph, last = graph_of(program)
        programs.settle()
        start = time.perf_counter()
        dask.threaded.get(graph, last, num_workers=workers)
        result[name] = (time.perf_counter() - start) / len(program) * 1e6
    print(json.dumps(result))


main()
