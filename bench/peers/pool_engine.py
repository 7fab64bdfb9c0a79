"""Engine peer: ``ThreadPoolExecutor`` with dependency callbacks written by hand, and a plain loop of calls.

python bench/peers/pool_engine.py COUNT WORKERS
"""

import importlib.util
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

spec = importlib.util.spec_from_file_location(
    "engine_programs", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "engine_programs.py")
)
programs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(programs)


def nothing():
    """Do nothing: the function of every task."""


class Task:
    """One operation: ``wait`` counts unfinished dependencies, plus 1 during submission; ``next`` lists dependents."""

    __slots__ = ("next", "wait")

    def __init__(self):
        self.wait = 1
        self.next = []


def run(program, workers):
    """Submit the whole program in order; return the seconds from the first submission until all operations are done.

    One lock guards the counters. A finished task submits the tasks that became ready.
    """
    lock = threading.Lock()
    done = threading.Event()
    left = [len(program)]
    last_write, readers = {}, {}
    with ThreadPoolExecutor(workers) as pool:

        def execute(task):
            nothing()
            ready = []
            with lock:
                for second in task.next:
                    second.wait -= 1
                    if not second.wait:
                        ready.append(second)
                task.next = None
                left[0] -= 1
                last = not left[0]
            for second in ready:
                pool.submit(execute, second)
            if last:
                done.set()

        programs.settle()
        start = time.perf_counter()
        for reads, writes in program:
            task = Task()
            with lock:
                needs = [last_write.get(v) for v in (*reads, *writes)]
                for v in writes:
                    needs += readers.pop(v, ())
                    last_write[v] = task
                for v in reads:
                    readers.setdefault(v, []).append(task)
                for second in needs:
                    if second is not None and second.next is not None:
                        second.next.append(task)
                        task.wait += 1
                task.wait -= 1
                go = not task.wait
            if go:
                pool.submit(execute, task)
        done.wait()
        return time.perf_counter() - start


def main():
    """Time every program once, and the plain loop; print microseconds per operation as JSON."""
    count, workers = int(sys.argv[1]), int(sys.argv[2])
    result = {}
    programs.place()
    for name, make in programs.SHAPES.items():
        _, program = make(count)
        result[name] = run(program, workers) / len(program) * 1e6
    start = time.perf_counter()
    for _ in range(count):
        nothing()
    result["loop"] = (time.perf_counter() - start) / count * 1e6
    print(json.dumps(result))


main()
