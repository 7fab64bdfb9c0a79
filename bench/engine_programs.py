"""The programs that the engine bench runs everywhere: lists of (reads, writes) over numbered vars. No imports beyond
the standard library, so that every peer's interpreter can load this file."""

import random


def independent(count):
    """Every operation writes a var of its own."""
    return count, [((), (i,)) for i in range(count)]


def chain(count):
    """All operations write one var."""
    return 1, [((), (0,))] * count


def diamond(count):
    """One source, four readers, one sink, again and again."""
    program = []
    for _ in range(count // 6):
        program.append(((), (0,)))
        program += [((0,), (k,)) for k in (1, 2, 3, 4)]
        program.append(((1, 2, 3, 4), (0,)))
    return 5, program


def wavefront(count):
    """A two-dimensional stencil: each cell reads its upper and left neighbours."""
    side = int(count**0.5)
    program = []
    for i in range(side):
        for j in range(side):
            reads = ([(i - 1) * side + j] if i else []) + ([i * side + j - 1] if j else [])
            program.append((tuple(reads), (i * side + j,)))
    return side * side, program


def random_program(count):
    """Each operation reads up to three of 100 vars and writes another one; seeded."""
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
    """Time of a list schedule without any overhead: unit operations of ``seconds`` each, in program order."""
    import heapq

    last_write, readers, ready = {}, {}, []
    free = [0.0] * workers
    heapq.heapify(free)
    finish = 0.0
    for reads, writes in program:
        start = max([last_write.get(v, 0.0) for v in (*reads, *writes)] + [readers.get(v, 0.0) for v in writes])
        ready.append(start)
        worker = heapq.heappop(free)
        end = max(start, worker) + seconds
        heapq.heappush(free, end)
        for v in reads:
            readers[v] = max(readers.get(v, 0.0), end)
        for v in writes:
            last_write[v] = end
            readers[v] = end
        finish = max(finish, end)
    return finish
