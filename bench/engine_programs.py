"""The programs that the engine bench runs everywhere: lists of (reads, writes) over numbered vars. No imports beyond
the standard library, so that every peer's interpreter can load this file."""

import gc
import os
import random
import threading

PLACEMENTS = ("apart", "together", "free")


def place():
    """Decide which cores the threads of this process use; call it when a peer's own threads exist.

    BENCH_PLACEMENT is ``apart`` (the main thread on one core, all others on the second: what happens when both cores
    are free and nothing else runs), ``together`` (all on one core) or ``free`` (the kernel's choice, which changes from
    run to run and decides more than the peer does). Threads that Python starts later obey, too.
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
    """Give the k-th Python thread whose name begins with ``prefix`` a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    crew = sorted((t.name, t.native_id) for t in threading.enumerate() if t.name.startswith(prefix))
    for k, (_, thread) in enumerate(crew):
        os.sched_setaffinity(thread, {cores[k % len(cores)]})


def settle():
    """Call it when a program is prepared, before the clock starts: otherwise the garbage collector would traverse the
    program while a peer is timed."""
    gc.collect()


def independent(count):
    """Every operation writes a var of its own."""
    return count, [((), (i,)) for i in range(count)]


def chain(count):
    """All operations write one var."""
    return 1, [((), (0,))] * count


def diamond(count):
    """Return one source, four readers, one sink, again and again."""
    program = []
    for _ in range(count // 6):
        program.append(((), (0,)))
        program += [((0,), (k,)) for k in (1, 2, 3, 4)]
        program.append(((1, 2, 3, 4), (0,)))
    return 5, program


def wavefront(count):
    """Return a two-dimensional stencil: each cell reads its upper and left neighbours."""
    side = int(count**0.5)
    program = []
    for i in range(side):
        for j in range(side):
            reads = ([(i - 1) * side + j] if i else []) + ([i * side + j - 1] if j else [])
            program.append((tuple(reads), (i * side + j,)))
    return side * side, program


def random_program(count):
    """Each operation reads up to three of 100 vars and writes a further var; seeded."""
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
    """Time of a good schedule without any overhead; ``seconds[k - 1]``: of an operation among k that run at once.

    Whenever a worker is free it takes, of the ready operations, that with the longest way to the end (Hu 1961:
    optimal for in-trees, close elsewhere).
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
    while ready:  # all take equally long, so time passes in whole steps
        now = [heapq.heappop(ready)[1] for _ in range(min(workers, len(ready)))]
        span += seconds[len(now) - 1]
        for i in now:
            for j in users[i]:
                missing[j] -= 1
                if not missing[j]:
                    heapq.heappush(ready, (-way[j], j))
    return span


def dependencies(program):
    """Return (users of each operation, how many it waits for) under the read/write rule; each pair once."""
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
