"""Reused bytes: their last holders, the order that reuse makes, and the waits that it adds.

That order, write after read, is computed for finished offsets, from sizes and lifetimes alone; it becomes
``MemoryPlan.after``. An object of `LastHolders` belongs to one sweep over time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from weftplan.planner.packing.problem import Int64


class LastHolders:
    """Ranges of addresses from 0 on, each with the buffer that held it last.

    Invariant: ``_starts`` ascends from 0; range k, up to the next start, was last held by ``_holders[k]`` (-1: none).

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

    def count(self, low: int, high: int, *, held: Sequence[int], mine: int, most: int) -> int:
        """How many of them have a common bit with ``mine`` in their item of ``held``, counted up to ``most``."""
        starts, common = self._starts, 0
        first = bisect_right(starts, low) - 1
        for k in self._holders[first : bisect_left(starts, high, first)]:
            if held[k] & mine:
                common += 1
                if common == most:
                    break
        return common

    def hold(self, buffer: int, low: int, high: int) -> list[int]:
        """Give these addresses to ``buffer``; return their last holders, as `within`."""
        starts, holders = self._starts, self._holders
        first = bisect_right(starts, low) - 1
        end = bisect_left(starts, high, first)
        before = holders[first:end]
        # The rest of the first range below the buffer, the buffer, and the rest of the last range above it.
        if starts[first] < low:
            first += 1
        if end == len(starts) or starts[end] > high:
            starts[first:end] = (low, high)
            holders[first:end] = (buffer, before[-1])
        else:
            starts[first:end] = (low,)
            holders[first:end] = (buffer,)
        return before


def reuse_edges(lower: Int64, size: Int64, offsets: Int64) -> tuple[Int64, Int64]:
    """For each buffer, the earlier buffers that were the last to hold some of its bytes.

    Earlier holders of the same bytes are reached through those, so waiting for the listed buffers is enough. This is
    one sweep over the births with a sorted list of address ranges: O((n + edges) log n) comparisons.

    The buffers are as for `pack`; nothing is checked here (see `check_packing`).

    Returns:
        ``(pointers, earlier)``, int64: buffer ``i`` overwrites ``earlier[pointers[i]:pointers[i + 1]]``, ascending.

    >>> pointers, earlier = reuse_edges(np.array([0, 1, 2]), np.array([8, 4, 8]), np.array([0, 0, 0]))
    >>> pointers.tolist(), earlier.tolist()
    ([0, 0, 1, 3], [0, 0, 1])
    """
    first, last = offsets.tolist(), (offsets + size).tolist()
    hold = LastHolders().hold
    rows: list[list[int]] = [[]] * len(first)
    for i in lower.argsort(kind="stable").tolist():
        before = hold(i, first[i], last[i])
        if len(before) > 1:
            before = sorted({*before})
        rows[i] = before if before[0] >= 0 else before[1:]
    pointers = [0, *accumulate(map(len, rows))]
    return np.array(pointers, np.int64), np.array([k for row in rows for k in row], np.int64)


def compressed_rows(row: Int64, value: Int64, count: int) -> tuple[Int64, Int64]:
    """The pairs (row, value) as (where each of ``count`` rows begins, values row by row, ascending)."""
    pointers = np.zeros(count + 1, np.int64)
    np.bincount(row, minlength=count).cumsum(out=pointers[1:])
    return pointers, value[np.lexsort((value, row))]


@dataclass(frozen=True)
class Precedence:
    """Sets of steps per buffer. A set is one integer, bit s for step s; how steps are numbered does not matter.

    The first writer of a buffer comes after all users of another buffer anyway if ``users | needed == needed``, of the
    other buffer's users and its own needs.

    Attributes:
        users: the steps that read or write the buffer.
        needed: the steps that the first writer of the buffer waits for anyway, and itself.
    """

    users: Sequence[int]
    needed: Sequence[int]

    def take(self, index: Int64) -> Precedence:
        """The same about the buffers of these numbers."""
        numbers = index.tolist()
        return Precedence([self.users[k] for k in numbers], [self.needed[k] for k in numbers])

    @cached_property
    def outside(self) -> list[int]:
        """For each buffer the steps, of all that there are, that its first writer need not wait for.

        >>> Precedence([0b1, 0b10], [0b1, 0b11]).outside
        [2, 0]
        """
        every = (1 << max(map(int.bit_length, (*self.users, *self.needed)), default=0)) - 1
        return [every ^ needed for needed in self.needed]

    def waits(self, pointers: Int64, earlier: Int64) -> int:
        """Return how many of the pairs that `reuse_edges` gives make a step wait."""
        begin, others, users, count = pointers.tolist(), earlier.tolist(), self.users, 0
        for later, needed in enumerate(self.needed):
            for k in others[begin[later] : begin[later + 1]]:
                count += users[k] | needed != needed
        return count
