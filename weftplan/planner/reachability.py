"""Which steps wait for which others anyway, because they need their results.

A set of steps is one integer, bit s for step s, so that a question about many steps is one operation on long integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weftplan.planner.program import Program

MOST_STEPS = 8192
"""For more steps than this the sets (together steps * steps / 16 bytes, here 4 MiB) are not worth their memory."""


def ancestors(producers: Sequence[Iterable[int]], first: int = 0) -> list[int]:
    """For each step the set of steps whose results it needs, directly or through others, and itself.

    Sets hold at most `MOST_STEPS` steps from ``first`` on, as bits from 0 on, and begin with that of step ``first``.

    Args:
        producers: for each step the earlier steps whose results it reads.

    >>> [bin(found) for found in ancestors([(), (), (0,), (2, 0)])]
    ['0b1', '0b10', '0b101', '0b1101']
    """
    found: list[int] = []
    for step in range(first, len(producers)):
        mine = 1 << (step - first) if step < first + MOST_STEPS else 0
        for source in producers[step]:
            if source >= first:
                mine |= found[source - first]
        found.append(mine)
    return found


def last_needs_others(producers: Sequence[Iterable[int]], steps: Sequence[Sequence[int]]) -> list[bool]:
    """For each ascending list of steps whether the last one needs all the others, directly or through others.

    Sets hold `MOST_STEPS` steps at a time, so that their memory grows with the number of steps, not with its square. A
    list of at most one step is ordered.

    >>> last_needs_others([(), (), (0,), (2, 0)], [[0, 3], [1, 3], [1]])
    [True, False, True]
    """
    found = [True] * len(steps)
    asked: dict[int, list[tuple[int, int]]] = {}
    for k, row in enumerate(steps):
        for step in row[:-1]:
            if step != row[-1]:
                asked.setdefault(step // MOST_STEPS, []).append((k, step))
    for block, questions in asked.items():
        first = block * MOST_STEPS
        sets = ancestors(producers[: max(steps[k][-1] for k, _ in questions) + 1], first)
        for k, step in questions:
            found[k] = found[k] and bool(sets[steps[k][-1] - first] >> (step - first) & 1)
    return found


def producers(program: Program) -> list[list[int]]:
    """For each step the steps whose results it reads."""
    row = program.graph.row
    made = [-1] * program.graph.num_entries
    found: list[list[int]] = []
    for step, nid in enumerate(program.order):
        found.append([made[e] for e in program.reads[nid] if made[e] >= 0])
        for e in range(row[nid], row[nid + 1]):
            made[e] = step
    return found
