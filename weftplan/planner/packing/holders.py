"""Who held each address last, while buffers are placed one after the other.

``edges.py`` and ``from_the_peak.py`` share it. An object belongs to one sweep over time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class LastHolders:
    """Ranges of addresses from 0 on, each with the buffer that held it last.

    Invariant: ``_starts`` ascends from 0; range k, up to the next start, was last held by ``_holders[k]`` (-1: nobody).

    At first the buffers of ``stack`` lie one on the other from address 0; ``tops`` says where each ends.

    >>> last = LastHolders([7], [8])
    >>> last.hold(9, 4, 12)
    [7, -1]
    >>> last.within(0, 16)
    [7, 9, -1]
    """

    __slots__ = ("_holders", "_starts")

    def __init__(self, stack: Sequence[int] = (), tops: Sequence[int] = ()) -> None:
        self._starts = [0, *tops]
        self._holders = [*stack, -1]

    def within(self, low: int, high: int) -> list[int]:
        """The last holders of the ranges that these addresses touch, by address."""
        starts = self._starts
        first = bisect_right(starts, low) - 1
        return self._holders[first : bisect_left(starts, high, first)]

    def hold(self, buffer: int, low: int, high: int) -> list[int]:
        """Give these addresses to ``buffer``; returns who held them last, as `within`."""
        starts, holders = self._starts, self._holders
        first = bisect_right(starts, low) - 1
        end = bisect_left(starts, high, first)
        before = holders[first:end]
        # What is left of the first range below the buffer, the buffer, and what is left of the last above it.
        if starts[first] < low:
            first += 1
        if end == len(starts) or starts[end] > high:
            starts[first:end] = (low, high)
            holders[first:end] = (buffer, before[-1])
        else:
            starts[first:end] = (low,)
            holders[first:end] = (buffer,)
        return before
