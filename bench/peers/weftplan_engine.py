"""weftplan's own side of the engine bench, in its own process like every peer.

python bench/peers/weftplan_engine.py COUNT WORKERS [work|memory|latency]
"""

import importlib.util
import json
import os
import sys
import threading
import time

import numpy as np

import weftplan as mx
from weftplan import engine

spec = importlib.util.spec_from_file_location(
    "engine_programs", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "engine_programs.py")
)
programs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(programs)


def nothing():
    """Do nothing: the pushed function."""


def prepare(eng, num_vars, program):
    """Return (variables read, variables written) of each operation, as tuples, which a push handles fastest."""
    result = [eng.new_variable() for _ in range(num_vars)]
    calls = [(tuple([result[i] for i in reads]), tuple([result[i] for i in writes])) for reads, writes in program]
    programs.settle()
    return calls


def push_all(eng, calls, fn):
    """Push ``fn`` for each of the prepared calls, and wait until all are done."""
    push = eng.push
    for reads, writes in calls:
        push(fn, reads, writes)
    eng.wait_for_all()


def push_and_wait(eng, var):
    """Push one operation, and wait for it."""
    eng.push(nothing, (), [var])
    eng.wait_for_var(var)


def run(eng, num_vars, program, fn):
    """Return the seconds from the first push of a program until all its operations are done."""
    calls = prepare(eng, num_vars, program)
    start = time.perf_counter()
    push_all(eng, calls, fn)
    return time.perf_counter() - start


def no_ops(count, workers):
    """Return microseconds per operation of each program, of a push and its wait, and of ``a += 1`` here and in NumPy.

    ``push_wait`` is for an operation that the waiting thread may run, as it may run the package's own operations;
    ``user_wait`` is for a user's function, which only a worker runs.
    """
    os.environ["WEFTPLAN_ENGINE_WAITERS_HELP"] = "all"
    programs.place()
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=workers)
    result = {}
    with engine.using(eng):
        run(eng, 1, programs.chain(1000)[1], nothing)
        for name, make in programs.SHAPES.items():
            num_vars, program = make(count)
            result[name] = run(eng, num_vars, program, nothing) / len(program) * 1e6
        var = eng.new_variable()
        rounds = 5000
        start = time.perf_counter()
        for _ in range(rounds):
            push_and_wait(eng, var)
        result["push_wait"] = (time.perf_counter() - start) / rounds * 1e6
        eng._waiters_help = "1"
        start = time.perf_counter()
        for _ in range(rounds):
            push_and_wait(eng, var)
        result["user_wait"] = (time.perf_counter() - start) / rounds * 1e6
        a = mx.nd.zeros((16,))
        for _ in range(100):
            a += 1
        mx.nd.waitall()
        rounds = 20000
        start = time.perf_counter()
        for _ in range(rounds):
            a += 1
        mx.nd.waitall()
        result["inplace_add"] = (time.perf_counter() - start) / rounds * 1e6
        b = np.zeros(16, np.float32)
        start = time.perf_counter()
        for _ in range(rounds):
            b += 1
        result["numpy_add"] = (time.perf_counter() - start) / rounds * 1e6
    eng.stop()
    return result


def worker_function(seconds):
    """Return (function that makes one NumPy call of about ``seconds`` without the GIL, its measured seconds)."""
    size = 1000
    while True:
        a, b = np.full(size, 2.0, np.float32), np.empty(size, np.float32)
        start = time.perf_counter()
        for _ in range(200):
            np.sqrt(a, out=b)
        took = (time.perf_counter() - start) / 200
        if took >= seconds * 0.95:
            break
        size = int(size * min(4.0, max(1.05, seconds / took)))
    local = threading.local()

    def work():
        out = getattr(local, "out", None)
        if out is None:
            out = local.out = np.empty(size, np.float32)
        np.sqrt(a, out=out)

    return work, took


def side_by_side(fn, threads, count=2000):
    """Return the seconds per call of ``fn`` while ``threads`` threads, each on a core, call it in a loop."""

    def loop():
        ready.wait()
        for _ in range(count):
            fn()

    ready = threading.Barrier(threads + 1)
    crew = [threading.Thread(target=loop, name=f"crew {k}") for k in range(threads)]
    for thread in crew:
        thread.start()
    programs.one_core_each("crew")
    ready.wait()
    start = time.perf_counter()
    for thread in crew:
        thread.join()
    return (time.perf_counter() - start) / count


def work(count, workers):
    """Return wall and ideal seconds of each program, with 50 microseconds of NumPy per operation."""
    fn, _ = worker_function(50e-6)
    each = [side_by_side(fn, k + 1) for k in range(workers)]
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=workers)
    together = threading.Barrier(workers)
    run(eng, workers, programs.independent(workers)[1], together.wait)  # starts all workers
    programs.one_core_each("weftplan")
    result = {"work_us": [seconds * 1e6 for seconds in each]}
    for name, make in programs.SHAPES.items():
        num_vars, program = make(count)
        wall = run(eng, num_vars, program, fn)
        result[name] = {"wall_s": wall, "ideal_s": programs.ideal_span(program, workers, each)}
    eng.stop()
    return result


def resident():
    """Return the resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(count, workers):
    """Return the bytes per pending operation, and the bytes per operation still held after all have run."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=workers)
    gate = threading.Event()
    var = eng.new_variable()
    eng.push(nothing, (), [var])
    eng.wait_for_all()
    before = resident()
    eng.push(gate.wait, (), [var])
    for _ in range(count):
        eng.push(nothing, (), [var])
    pending = resident() - before
    gate.set()
    eng.wait_for_all()
    after = resident() - before
    eng.stop()
    return {"bytes_per_pending": pending / count, "bytes_kept_per_operation": after / count, "operations": count}


def latency(count, workers):
    """Return the nanoseconds from the end of an operation to the start of its dependent: median, 99th percentile."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=workers)
    ends, starts = [], []
    clock = time.perf_counter_ns
    ballast = np.ones(20_000, np.float32)

    def stamp():
        starts.append(clock())
        ballast.sum()
        ends.append(clock())

    var = eng.new_variable()
    for _ in range(count):
        eng.push(stamp, (), [var])
    eng.wait_for_all()
    chain = np.array(starts[1:]) - np.array(ends[:-1])
    eng.stop()
    return {"queued_median_ns": float(np.median(chain)), "queued_p99_ns": float(np.percentile(chain, 99))}


MODES = {"work": work, "memory": memory, "latency": latency}
if __name__ == "__main__":
    mode = MODES[sys.argv[3]] if len(sys.argv) > 3 else no_ops
    print(json.dumps(mode(int(sys.argv[1]), int(sys.argv[2]))))
