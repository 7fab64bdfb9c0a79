"""Packing outwards from the fullest moment: its live buffers are one gapless stack, the rest goes before or after it.

At the moment of the highest load every packing of height ``lower bound`` is a stack without gaps. So the stack comes
first, and time is swept away from it in both directions: buffers that begin after the moment into the holes that the
dying leave, and, mirrored, buffers that end before it. The two sweeps do not meet, since no buffer on one side lives
together with one on the other. In training graphs lifetimes are nested around the end of the forward part; stacked by
nesting, the holes grow together at the top.

A sweep costs about a microsecond a buffer while there are few holes, a hundredth of first fit. It hits the lower bound
on the training graphs of ordinary networks; elsewhere it is one more candidate.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub

import numpy as np

from weftplan.planner.packing.problem import ENDLESS, Deadline, Int64, Problem
from weftplan.planner.packing.reuse import LastHolders, Precedence

FAR = 1 << 62

# If the tightest hole would make a buffer wait: how many of the last dead are asked, and how many places are judged.
RECENT, TRIES = 64, 8


@dataclass(frozen=True, slots=True)
class Variant:
    """How a sweep stacks and places.

    Attributes:
        stack: the buffers at the bottom of the stack: ``"last"`` to die, ``"first"`` born, or ``"long"`` lived.
        late_peak: start from the last of several equally full moments, not from the first.
        short_high: short-lived buffers go to the high end of a hole, so that long-lived buffers lie together.
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


def variants_of(problem: Problem, most: int = len(VARIANTS)) -> list[Variant]:
    """Of the first ``most`` variants those that sweep differently: many problems have but one fullest moment."""
    first, last = problem.first_peak.moment, problem.last_peak.moment
    distinct: dict[tuple[str, int, bool], Variant] = {}
    for one in VARIANTS[:most]:
        distinct.setdefault((one.stack, last if one.late_peak else first, one.short_high), one)
    return list(distinct.values())


def pack_outwards(
    problem: Problem,
    *,
    floor: int,
    limit: int,
    variant: Variant,
    order: Precedence | None = None,
    deadline: Deadline = ENDLESS,
    most_holes: int = FAR,
    patience: int = 1,
) -> tuple[Int64, int] | None:
    """(offsets, number of pairs of buffers that share bytes one after the other against ``order``; 0 without it).

    Args:
        problem: the buffers, at least one.
        floor: holes end here as long as a buffer fits below; at least the lower bound.
        limit: give up and return None as soon as a buffer would end above this.
        order: of the buffers in ``problem``; a hole without waits is preferred to a tighter hole.
        most_holes: of more holes than this only the lowest are looked at; that bounds the time, and spoils the packing.
        patience: look at this many times more places if a buffer would make a step wait.
    """
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
    # Of two buffers the later waits for the earlier if it does not need all users of the earlier anyway. The last item
    # is that of no buffer, number -1.
    users = outside = None
    if order is not None:
        users, outside = [*order.users, 0], [*order.outside, 0]
    spans = sorted(end - begin for begin, end in zip(lo, hi, strict=True)) if variant.short_high else [0]
    short = (spans[len(spans) // 2] + spans[~(len(spans) // 2)]) / 2  # the median
    waits = 0
    for side, before, after in (
        (peak.behind, users, outside),
        (peak.before, outside, users),  # backwards bytes were held later in time
    ):
        late, born, died = side.late, side.born, side.died
        deaths = sorted([*stack, *late], key=died.__getitem__)
        last = LastHolders(stack, tops)
        space = _Space(floor, last, top=tops[-1], held=before, mine=after, most=most_holes, patience=patience)
        dead = 0
        for k, i in enumerate(late):
            if not k & 255:
                deadline.check()
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
    """Holes of one slab, and the last holder of each range of it.

    Invariant: ``_low`` ascends, holes neither touch nor overlap, and the last hole is endless.
    """

    def __init__(
        self,
        floor: int,
        last: LastHolders,
        *,
        top: int,
        held: Sequence[int] | None,
        mine: Sequence[int] | None,
        most: int,
        patience: int,
    ) -> None:
        """A buffer ``b`` over bytes that ``k`` held makes a step wait if ``held[k] & mine[b]``; None: never."""
        self._floor, self._most = floor, most
        self._last = last
        self._held, self._mine = held, mine
        self._low, self._high = [top], [FAR]
        self._tries = TRIES * patience
        self._dead: deque[tuple[int, int, int]] = deque(maxlen=RECENT * patience)
        """Of each its item of ``held``, its size and its offset."""

    def release(self, buffer: int, low: int, high: int) -> None:
        """Give back the bytes of a buffer that died; they join the holes that they touch."""
        if self._held is not None:
            self._dead.append((self._held[buffer], high - low, low))
        lows, highs = self._low, self._high
        k = bisect_left(lows, low)
        left = k > 0 and highs[k - 1] == low
        right = k < len(lows) and lows[k] == high
        if left and right:
            highs[k - 1] = highs[k]
            del lows[k], highs[k]
        elif left:
            highs[k - 1] = high
        elif right:
            lows[k] = low
        else:
            lows.insert(k, low)
            highs.insert(k, high)

    def place(self, buffer: int, size: int, *, high: bool) -> tuple[int, int]:
        """(offset, buffers to wait for): in the tightest hole under the floor, else at the begin of the last hole."""
        lows, highs, floor = self._low, self._high, self._floor
        best, room = -1, FAR
        for k, end in enumerate(highs if len(highs) <= self._most else highs[: self._most]):
            free = (end if end < floor else floor) - lows[k]
            if size <= free < room:
                best, room = k, free
                if free == size:
                    break
        if best < 0:
            best = len(lows) - 1
            off = lows[best]
        else:
            off = lows[best] + (room - size if high else 0)
        waits = 0
        if self._held is not None and self._mine is not None:
            held, mine, count = self._held, self._mine[buffer], self._last.count
            waits = count(off, off + size, held=held, mine=mine, most=FAR)
            if waits:
                # Under the floor, the place with the fewest waits: where a buffer died lately, or the end of a hole.
                for k, low in self._places(mine, size):
                    fewer = count(low, low + size, held=held, mine=mine, most=waits)
                    if fewer < waits:
                        best, off, waits = k, low, fewer
                        if not waits:
                            break
            self._last.hold(buffer, off, off + size)
        self._take(best, off, off + size)
        return off, waits

    def _take(self, k: int, low: int, high: int) -> None:
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

    def _places(self, mine: int, size: int) -> Iterator[tuple[int, int]]:
        """About `TRIES` places (times the patience) under the floor, as (hole, offset): where buffers died lately, then
        the ends of holes.

        The dead are asked first whether they would be waited for, which is cheaper than to look at the place.
        """
        lows, highs, floor = self._low, self._high, self._floor
        left = self._tries
        for held, extent, low in reversed(self._dead):
            if extent < size or held & mine:
                continue
            for place in (low, low + extent - size) if extent > size else (low,):
                k = bisect_right(lows, place) - 1
                if k >= 0 and place + size <= highs[k] and place + size <= floor:
                    yield k, place
                    left -= 1
            if left <= 0:
                return
        for k, begin in enumerate(lows):
            end = min(highs[k], floor)
            if end - begin >= size:
                yield k, begin
                yield k, end - size
                left -= 2
            if left <= 0:
                return
