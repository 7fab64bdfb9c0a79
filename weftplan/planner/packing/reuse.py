"""Memory reuse: the last holders of bytes, the write-after-read edges of reuse, and the waits that they add.

The edges are computed from finished offsets, sizes and lifetimes; they become ``MemoryPlan.after``. A `LastHolders`
object belongs to one sweep over time.
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
    """A map from address ranges to the buffer that held each range last.

    Invariant: ``_starts`` ascends from 0; range k, up to the next start, was last held by ``_holders[k]`` (-1: none).

    Args:
        stack: initial holders, stacked from address 0.
        tops: end of each buffer of ``stack``.

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
        """Return the last holders of the ranges that overlap ``low..high``, in address order."""
        starts = self._starts
        begin = bisect_right(starts, low) - 1
        return self._holders[begin : bisect_left(starts, high, begin)]

    def count(self, low: int, high: int, *, held: Sequence[int], mine: int, most: int) -> int:
        """Return the number of last holders ``k`` of ``low..high`` with ``held[k] & mine``, counted up to ``most``."""
        starts, common = self._starts, 0
        begin = bisect_right(starts, low) - 1
        for k in self._holders[begin : bisect_left(starts, high, begin)]:
            if held[k] & mine:
                common += 1
                if common == most:
                    break
        return common

    def hold(self, buffer: int, low: int, high: int) -> list[int]:
        """Assign ``low..high`` to ``buffer``; return the previous holders in address order."""
        starts, holders = self._starts, self._holders
        begin = bisect_right(starts, low) - 1
        end = bisect_left(starts, high, begin)
        overwritten = holders[begin:end]
        # Keep the part of the first range below the buffer and the part of the last range above it.
        if starts[begin] < low:
            begin += 1
        if end == len(starts) or starts[end] > high:
            starts[begin:end] = (low, high)
            holders[begin:end] = (buffer, overwritten[-1])
        else:
            starts[begin:end] = (low,)
            holders[begin:end] = (buffer,)
        return overwritten


def reuse_edges(lower: Int64, size: Int64, offsets: Int64) -> tuple[Int64, Int64]:
    """Return, for each buffer, the earlier buffers that were the last to hold some of its bytes.

    These have waited for the holders before them, so waiting for the listed buffers is enough. The function sweeps
    over the births with a sorted list of address ranges: O((n + edges) log n) comparisons.

    The input is not checked (see `check_packing`).

    Returns:
        ``(pointers, earlier)``, int64: buffer ``i`` overwrites ``earlier[pointers[i]:pointers[i + 1]]``, ascending.

    >>> pointers, earlier = reuse_edges(np.array([0, 1, 2]), np.array([8, 4, 8]), np.array([0, 0, 0]))
    >>> pointers.tolist(), earlier.tolist()
    ([0, 0, 1, 3], [0, 0, 1])
    """
    starts, ends = offsets.tolist(), (offsets + size).tolist()
    hold = LastHolders().hold
    rows: list[list[int]] = [[]] * len(starts)
    for i in lower.argsort(kind="stable").tolist():
        overwritten = hold(i, starts[i], ends[i])
        if len(overwritten) > 1:
            overwritten = sorted({*overwritten})
        rows[i] = overwritten if overwritten[0] >= 0 else overwritten[1:]
    pointers = [0, *accumulate(map(len, rows))]
    return np.array(pointers, np.int64), np.array([k for row in rows for k in row], np.int64)


def compressed_rows(row: Int64, value: Int64, count: int) -> tuple[Int64, Int64]:
    """Return the pairs (row, value) in compressed row format: (start of each of ``count`` rows, sorted values)."""
    pointers = np.zeros(count + 1, np.int64)
    np.bincount(row, minlength=count).cumsum(out=pointers[1:])
    return pointers, value[np.lexsort((value, row))]


@dataclass(frozen=True)
class Precedence:
    """The users and the ancestors of each buffer, as sets of steps.

    A set is one integer, bit s for step s; any numbering of the steps is valid. A buffer may reuse the bytes of another
    without a wait if ``users[other] & ~needed[buffer]`` is 0.

    Attributes:
        users: steps that read or write each buffer.
        needed: steps that precede the first writer of each buffer by data, and that writer's step.
    """

    users: Sequence[int]
    needed: Sequence[int]

    def take(self, index: Int64) -> Precedence:
        """Return the precedence of the buffers ``index``."""
        numbers = index.tolist()
        return Precedence([self.users[k] for k in numbers], [self.needed[k] for k in numbers])

    @cached_property
    def outside(self) -> list[int]:
        """Per buffer: the complement of ``needed``, the steps that its first writer does not wait for by data.

        >>> Precedence([0b1, 0b10], [0b1, 0b11]).outside
        [2, 0]
        """
        every = (1 << max(map(int.bit_length, (*self.users, *self.needed)), default=0)) - 1
        return [every ^ needed for needed in self.needed]

    def waits(self, pointers: Int64, earlier: Int64) -> int:
        """Return the number of edges of `reuse_edges` that add a wait."""
        begin, predecessors, users, count = pointers.tolist(), earlier.tolist(), self.users, 0
        for later, needed in enumerate(self.needed):
            for k in predecessors[begin[later] : begin[later + 1]]:
                count += users[k] | needed != needed
        return count
