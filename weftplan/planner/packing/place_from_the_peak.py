"""Packing outwards from the peak: stack the buffers alive at the peak, then sweep over time in both directions.

At the moment of maximum load, a packing whose height equals the lower bound is a stack without gaps. So this stack is
placed first. One sweep then goes forward in time and places buffers that begin after the moment in the holes of buffers
that have died; a mirrored sweep goes backward and places buffers that end before it. The two sweeps are independent,
because no buffer of one side lives at the same time as a buffer of the other. In training graphs lifetimes are nested
around the end of the forward part; if the stack is sorted by nesting, holes merge at its top.

With few holes a sweep costs about a microsecond a buffer, a hundredth of first fit. It reaches the lower bound on the
training graphs of ordinary networks; on other graphs it is one more candidate.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub

import numpy as np

from weftplan.planner.packing.problem import ENDLESS, FAR, Deadline, Int64, Problem, Scans
from weftplan.planner.packing.reuse import LastHolders, Precedence

# If reusing the tightest hole would add a wait: number of recently dead buffers and of offsets to consider instead.
RECENT, TRIES = 64, 8


@dataclass(frozen=True, slots=True)
class Variant:
    """A rule for stacking and placing the buffers of a sweep.

    Attributes:
        stack: the buffers at the bottom of the stack: ``"last"`` to die, ``"first"`` born, or ``"long"`` lived.
        late_peak: whether to start from the last of several moments of maximum load instead of the first.
        short_high: whether to place short-lived buffers at the high end of a hole, so that long-lived buffers are
            contiguous.
    """

    stack: str = "last"
    late_peak: bool = False
    short_high: bool = False


VARIANTS = (
    Variant(),
    Variant(late_peak=True),
    Variant("first"),
    Variant("long", short_high=True),
    Variant("first", late_peak=True, short_high=True),
)


def variants_of(problem: Problem, count: int = len(VARIANTS)) -> list[Variant]:
    """Return the first ``count`` variants without duplicates; with one moment of maximum load some coincide."""
    first_peak, last_peak = problem.first_peak.moment, problem.last_peak.moment
    distinct: dict[tuple[str, int, bool], Variant] = {}
    for variant in VARIANTS[:count]:
        distinct.setdefault(
            (variant.stack, last_peak if variant.late_peak else first_peak, variant.short_high), variant
        )
    return list(distinct.values())


def pack_outwards(
    problem: Problem,
    *,
    floor: int,
    limit: int,
    variant: Variant,
    order: Precedence | None = None,
    deadline: Deadline = ENDLESS,
    patience: int = 1,
    scans: Scans | None = None,
) -> tuple[Int64, int] | None:
    """Pack by sweeps outwards from the peak; return (offsets, number of reuses that add a wait), or None.

    Args:
        problem: the buffers, at least one.
        floor: preferred maximum height; a buffer is placed above it only if no hole below it fits. At least the lower
            bound.
        limit: hard maximum height in units.
        variant: the rule for stacking and placing.
        order: precedence of the buffers of ``problem``; a hole that adds no wait is preferred to a tighter hole. None:
            waits are not counted.
        deadline: the time limit.
        patience: factor on the number of offsets to consider if a reuse would add a wait.
        scans: number of holes that may be looked at, which the sweep lowers; None: no limit.

    Returns:
        None if a buffer would end above ``limit`` or the scans are used up.
    """
    deadline.check()
    lo, hi, sizes = problem.lists
    peak = problem.last_peak if variant.late_peak else problem.first_peak
    stack = peak.alive[:]
    early = [-end for end in hi]
    minor_and_major = {"last": (lo, early), "first": (early, lo), "long": (lo, list(map(sub, lo, hi)))}
    for values in minor_and_major[variant.stack]:
        stack.sort(key=values.__getitem__)
    tops = list(accumulate(sizes[i] for i in stack))
    offsets = [0] * len(lo)
    for i, top in zip(stack, tops, strict=True):
        offsets[i] = top - sizes[i]
    # A reuse adds a wait if the earlier buffer has a user that the later buffer's first writer does not need anyway.
    # The last item belongs to number -1: no buffer.
    users = outside = None
    if order is not None:
        users, outside = [*order.users, 0], [*order.outside, 0]
    spans = sorted(end - begin for begin, end in zip(lo, hi, strict=True)) if variant.short_high else [0]
    short = (spans[len(spans) // 2] + spans[~(len(spans) // 2)]) / 2  # the median
    waits = 0
    for side, earlier_sets, later_sets in (
        (peak.later, users, outside),
        (peak.earlier, outside, users),  # this sweep goes backwards, so the earlier holder comes later in time
    ):
        late, born, died = side.late, side.born, side.died
        deaths = sorted([*stack, *late], key=died.__getitem__)
        last_holders = LastHolders(stack, tops)
        space = _Space(floor, last_holders, top=tops[-1], held=earlier_sets, mine=later_sets, patience=patience)
        dead = 0
        for k, i in enumerate(late):
            if not k & 255:
                deadline.check()
                if scans is not None:
                    scans.left -= space.num_holes << 8
                    if scans.left < 0:
                        return None
            while died[deaths[dead]] <= born[i]:
                j = deaths[dead]
                dead += 1
                space.release(j, offsets[j], offsets[j] + sizes[j])
            off, wait = space.place(i, sizes[i], high=died[i] - born[i] <= short)
            if off + sizes[i] > limit:
                return None
            offsets[i] = off
            waits += wait
    return np.array(offsets, np.int64), waits


class _Space:
    """The holes of one slab, and the last holder of each range of addresses.

    Invariant: ``_low`` ascends, holes neither touch nor overlap, and the last hole has no upper end.
    """

    def __init__(
        self,
        floor: int,
        last_holders: LastHolders,
        *,
        top: int,
        held: Sequence[int] | None,
        mine: Sequence[int] | None,
        patience: int,
    ) -> None:
        """Start with one hole above ``top``.

        Args:
            floor: preferred maximum height.
            last_holders: the last holders of the addresses.
            top: end of the stack.
            held, mine: bit sets per buffer; buffer ``b`` on bytes of buffer ``k`` adds a wait if ``held[k] & mine[b]``
                is not 0. None: waits are not counted.
            patience: factor on the number of offsets to consider if a reuse would add a wait.
        """
        self._floor = floor
        self._last_holders = last_holders
        self._held, self._mine = held, mine
        self._low, self._high = [top], [FAR]
        self._tries = TRIES * patience
        self._dead: deque[tuple[int, int, int]] = deque(maxlen=RECENT * patience)
        """(item of ``held``, size, offset) of recently dead buffers."""

    @property
    def num_holes(self) -> int:
        """Number of holes; a placement looks at each of them."""
        return len(self._low)

    def release(self, buffer: int, low: int, high: int) -> None:
        """Free the bytes of a dead buffer and merge them with adjacent holes."""
        if self._held is not None:
            self._dead.append((self._held[buffer], high - low, low))
        lows, highs = self._low, self._high
        k = bisect_left(lows, low)
        joins_left = k > 0 and highs[k - 1] == low
        joins_right = k < len(lows) and lows[k] == high
        if joins_left and joins_right:
            highs[k - 1] = highs[k]
            del lows[k], highs[k]
        elif joins_left:
            highs[k - 1] = high
        elif joins_right:
            lows[k] = low
        else:
            lows.insert(k, low)
            highs.insert(k, high)

    def place(self, buffer: int, size: int, *, high: bool) -> tuple[int, int]:
        """Place a buffer; return (offset, number of buffers to wait for).

        The offset is in the tightest hole below the floor, else at the start of the last hole. If that adds waits,
        other offsets below the floor are considered.
        """
        lows, highs, floor = self._low, self._high, self._floor
        best, tightest = -1, FAR
        for k, end in enumerate(highs):
            free = (end if end < floor else floor) - lows[k]
            if size <= free < tightest:
                best, tightest = k, free
                if free == size:
                    break
        if best < 0:
            best = len(lows) - 1
            off = lows[best]
        else:
            off = lows[best] + (tightest - size if high else 0)
        waits = 0
        if self._held is not None and self._mine is not None:
            held, mine, count = self._held, self._mine[buffer], self._last_holders.count
            waits = count(off, off + size, held=held, mine=mine, most=FAR)
            if waits:
                # Take the offset with the fewest waits among recently dead buffers and the ends of holes.
                for k, low in self._candidates(mine, size):
                    fewer = count(low, low + size, held=held, mine=mine, most=waits)
                    if fewer < waits:
                        best, off, waits = k, low, fewer
                        if not waits:
                            break
            self._last_holders.hold(buffer, off, off + size)
        self._take(best, off, off + size)
        return off, waits

    def _take(self, k: int, low: int, high: int) -> None:
        """Remove the range ``low..high`` from hole ``k``."""
        lows, highs = self._low, self._high
        begin, end = lows[k], highs[k]
        if low == begin:
            if high == end:
                del lows[k], highs[k]
            else:
                lows[k] = high
        else:
            highs[k] = low
            if high < end:
                lows.insert(k + 1, high)
                highs.insert(k + 1, end)

    def _candidates(self, mine: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield about `TRIES` times patience candidates (hole, offset) below the floor.

        First come the places of recently dead buffers that need no wait, which is cheaper to test than the place
        itself; then both ends of each hole.
        """
        lows, highs, floor = self._low, self._high, self._floor
        tries_left = self._tries
        for held, extent, low in reversed(self._dead):
            if extent < size or held & mine:
                continue
            for offset in (low, low + extent - size) if extent > size else (low,):
                k = bisect_right(lows, offset) - 1
                if k >= 0 and offset + size <= highs[k] and offset + size <= floor:
                    yield k, offset
                    tries_left -= 1
            if tries_left <= 0:
                return
        for k, begin in enumerate(lows):
            end = min(highs[k], floor)
            if end - begin >= size:
                yield k, begin
                yield k, end - size
                tries_left -= 2
            if tries_left <= 0:
                return
