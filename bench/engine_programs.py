"""The programs of the engine bench: lists of operations, each (reads, writes) over numbered variables.

Only the standard library is imported, so that every peer's interpreter can load this file.
"""

import gc
import os
import random
import threading

PLACEMENTS = ("apart", "together", "free")


def place():
    """Set the cores of this process's threads; call it after the peer has started its own threads.

    BENCH_PLACEMENT is ``apart`` (the main thread on one core, all others on a second, as on a machine with two idle
    cores), ``together`` (all on one core) or ``free`` (the kernel's choice, which changes from run to run and has more
    effect than the peer). Threads that Python starts later are placed, too.
    """
    placement = os.environ.get("BENCH_PLACEMENT", "free")
    if placement == "free" or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    first, others = {cores[0]}, {cores[1 if placement == "apart" and len(cores) > 1 else 0]}
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, first if thread == os.getpid() else others)
    run = threading.Thread.run

    def run_there(self):
        os.sched_setaffinity(0, others)
        run(self)

    threading.Thread.run = run_there


def one_core_each(prefix):
    """Give the k-th Python thread whose name begins with ``prefix`` its own core; if cores run out, threads share."""
    cores = sorted(os.sched_getaffinity(0))
    crew = sorted((t.name, t.native_id) for t in threading.enumerate() if t.name.startswith(prefix))
    for k, (_, thread) in enumerate(crew):
        os.sched_setaffinity(thread, {cores[k % len(cores)]})


def settle():
    """Collect garbage, so that the collector does not traverse the prepared program while a peer is timed."""
    gc.collect()


def independent(count):
    """Return a program whose operations each write a variable of their own."""
    return count, [((), (i,)) for i in range(count)]


def chain(count):
    """Return a program whose operations all write one variable."""
    return 1, [((), (0,))] * count


def diamond(count):
    """Return a program that repeats one source, four readers of it, and one sink."""
    program = []
    for _ in range(count // 6):
        program.append(((), (0,)))
        program += [((0,), (k,)) for k in (1, 2, 3, 4)]
        program.append(((1, 2, 3, 4), (0,)))
    return 5, program


def wavefront(count):
    """Return a program that writes the cells of a square; each cell reads its upper and left neighbours."""
    side = int(count**0.5)
    program = []
    for i in range(side):
        for j in range(side):
            reads = ([(i - 1) * side + j] if i else []) + ([i * side + j - 1] if j else [])
            program.append((tuple(reads), (i * side + j,)))
    return side * side, program


def random_program(count):
    """Return a program whose operations read up to three of 100 variables and write another; the seed is fixed."""
    rng = random.Random(7)
    program = []
    for _ in range(count):
        picked = rng.sample(range(100), rng.randint(1, 4))
        program.append((tuple(picked[1:]), (picked[0],)))
    return 100, program


SHAPES = {
    "independent": independent,
    "chain": chain,
    "diamond": diamond,
    "wavefront": wavefront,
    "random": random_program,
}


def ideal_span(program, workers, seconds):
    """Return the seconds of a good schedule without overhead; ``seconds[k - 1]`` is an operation's time if ``k`` run.

    A free worker takes the ready operation with the longest path to the end (Hu 1961: optimal for in-trees, close
    elsewhere).
    """
    import heapq

    users, missing = dependencies(program)
    count = len(program)
    way = [1] * count
    for i in range(count - 1, -1, -1):
        for j in users[i]:
            way[i] = max(way[i], 1 + way[j])
    ready = [(-way[i], i) for i in range(count) if not missing[i]]
    heapq.heapify(ready)
    span = 0.0
    while ready:  # all operations take equally long: simulate step by step
        now = [heapq.heappop(ready)[1] for _ in range(min(workers, len(ready)))]
        span += seconds[len(now) - 1]
        for i in now:
            for j in users[i]:
                missing[j] -= 1
                if not missing[j]:
                    heapq.heappush(ready, (-way[j], j))
    return span


def dependencies(program):
    """Return (users of each operation, number of operations that it waits for) under the read/write rule.

    Each pair of dependent operations counts once.
    """
    last_write, readers = {}, {}
    users, missing = [[] for _ in program], [0] * len(program)
    for i, (reads, writes) in enumerate(program):
        before = {last_write[v] for v in (*reads, *writes) if v in last_write}
        for v in writes:
            before.update(readers.get(v, ()))
        for j in before:
            users[j].append(i)
        missing[i] = len(before)
        for v in reads:
            readers.setdefault(v, []).append(i)
        for v in writes:
            last_write[v] = i
            readers[v] = []
    return users, missing
