"""The best packing of a part so far, what may be spent on a better one, and the sweeps that find most of them."""

from __future__ import annotations

from dataclasses import dataclass

from weftplan.planner.packing.from_the_peak import VARIANTS, pack_outwards, variants_of
from weftplan.planner.packing.problem import MANY, Deadline, Int64, Problem, peak_of
from weftplan.planner.packing.reuse import Precedence, reuse_edges

# A sweep from the fullest moment is given up above this many times the floor: other methods do better there.
WORTH_A_SWEEP = 1.05

# Holes that are looked at when time is over.
HOLES_IN_A_HURRY = 64


@dataclass(frozen=True, slots=True)
class Spending:
    """What one effort spends.

    Attributes:
        work: search work, about 5e6 per second.
        good_enough: search only while peak / lower bound is above this.
        large_enough: the same for parts of more than a few thousand buffers, if that is more.
        largest: parts with more buffers than this are not searched (their conflict table is quadratic).
        tries: greedy packings tried before the search.
    """

    work: int
    good_enough: float
    large_enough: float
    largest: int
    tries: int


class Incumbent:
    """The best packing of a part so far: the lowest, and of equally low ones one whose buffers wait for few others.

    Below the peak ``floor`` nothing is gained. ``order`` is that of all buffers of the problem that the user gave.
    """

    def __init__(
        self, part: Problem, floor: int, *, spending: Spending, deadline: Deadline, order: Precedence | None = None
    ) -> None:
        self.part = part
        self.floor = floor
        self.spending = spending
        self.deadline = deadline
        self.order = None if order is None else order.take(part.index)
        self.is_small = len(part) <= MANY
        ratio = spending.good_enough if self.is_small else max(spending.good_enough, spending.large_enough)
        self.enough = floor * ratio
        """The peak at which work stops."""
        self.offsets: Int64 = part.size.cumsum() - part.size  # one on the other: valid, and never better than any
        self.peak = int(part.size.sum())
        self._made = False
        """Whether anything else was packed so far."""
        self._waits: int | None = None
        """How many reuses make somebody wait; None: not counted, or nobody asked."""
        self._none_below = 0
        """Up to this peak the first sweep by :attr:`order` finds nothing."""

    def offer(self, offsets: Int64) -> None:
        """Keep ``offsets`` if they are lower."""
        peak = peak_of(self.part, offsets)
        self._made = True
        if peak < self.peak:
            self.offsets, self.peak, self._waits = offsets, peak, None

    def hurry(self) -> None:
        """Make some packing, where time was over before there was any."""
        if not self._made:
            quick = pack_outwards(
                self.part, floor=self.floor, limit=self.peak, variant=VARIANTS[0], most_holes=HOLES_IN_A_HURRY
            )
            if quick is not None:
                self.offer(quick[0])

    def swept(self) -> bool:
        """Build packings outwards from the fullest moment, until one is low enough; whether one is.

        They are given up above what other methods reach. Few buffers must reach the floor. At first all are given up
        above what is low enough: how low others are is asked where none is.
        """
        enough = self.floor if self.is_small else self.enough
        tries = len(VARIANTS) if self.is_small else 2
        for most in (int(enough), int(self.floor * WORTH_A_SWEEP)):
            for order in (None,) if self.order is None else (self.order, None):
                for variant in variants_of(self.part, tries) if order is None else VARIANTS[:1]:
                    if self.peak <= enough:
                        return True
                    limit = min(self.peak - 1, most)
                    found = pack_outwards(
                        self.part, floor=self.floor, limit=limit, variant=variant, order=order, deadline=self.deadline
                    )
                    if found is None and order is not None:
                        self._none_below = limit
                    elif found is not None:
                        self._made = True
                        self.offsets, self.peak = found[0], peak_of(self.part, found[0])
                        self._waits = None if order is None else found[1]
        return self.peak <= enough

    def wait_less(self) -> None:
        """Look for packings that are as low but in which buffers wait for fewer others."""
        if self.order is None or self._waits is not None:
            return
        least = self.order.waits(*reuse_edges(self.part.lo, self.part.size, self.offsets))
        known = self.peak <= self._none_below
        for variant in variants_of(self.part)[known:] if least else ():
            found = pack_outwards(
                self.part, floor=self.floor, limit=self.peak, variant=variant, order=self.order, deadline=self.deadline
            )
            if found is not None and found[1] < least:
                self.offsets, self.peak = found[0], peak_of(self.part, found[0])
                return
