"""Which steps wait for which others anyway, because they need their results.

A set of steps is one integer, bit s for step s, so that a question about many steps is one operation on long integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weftplan.planner.liveness import Facts

MOST_STEPS = 8192
"""For more steps than this the sets (together steps * steps / 16 bytes, here 4 MiB) are not worth their memory."""


def ancestors(producers: Sequence[Iterable[int]]) -> list[int]:
    """For each step the set of steps whose results it needs, directly or through others, and itself.

    Args:
        producers: for each step the earlier steps whose results it reads.

    >>> [bin(found) for found in ancestors([(), (), (0,), (2, 0)])]
    ['0b1', '0b10', '0b101', '0b1101']
    """
    found: list[int] = []
    for step, sources in enumerate(producers):
        mine = 1 << step
        for source in sources:
            mine |= found[source]
        found.append(mine)
    return found


def producers(facts: Facts) -> list[list[int]]:
    """For each step the steps whose results it reads."""
    row = facts.graph.row
    made = [-1] * facts.graph.num_entries
    found: list[list[int]] = []
    for step, nid in enumerate(facts.order):
        found.append([made[e] for e in facts.reads[nid] if made[e] >= 0])
        for e in range(row[nid], row[nid + 1]):
            made[e] = step
    return found
