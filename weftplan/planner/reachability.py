"""Which steps wait for which others anyway, because they need their results.

A set of steps is one integer, bit s for step s, so that a question about many steps is one operation on long integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def step_set(steps: Iterable[int]) -> int:
    """The set of these steps.

    >>> bin(step_set([0, 3]))
    '0b1001'
    """
    found = 0
    for step in steps:
        found |= 1 << step
    return found
