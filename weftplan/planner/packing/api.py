"""`pack`: offsets for buffers with known lifetimes, close to the least memory possible.

This file owns the levels of effort, cuts a problem into parts that are packed one by one, and sweeps each part outwards
from its fullest moment. Parts that sweeps leave above their bound go to :mod:`weftplan.planner.packing.hard`. It relies
on nothing but NumPy, so other programs may use it alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from weftplan.planner.packing.from_the_peak import VARIANTS, pack_outwards, variants_of
from weftplan.planner.packing.hard.search import Allowance, improve, portfolio
from weftplan.planner.packing.problem import (
    MANY,
    Deadline,
    Int64,
    OutOfTime,
    Packing,
    PackingError,
    Problem,
    check_input,
    leaf_parts,
    peak_of,
    sectioned,
)
from weftplan.planner.packing.reuse import Precedence, reuse_edges

Effort = Literal["fast", "normal", "max"]

# A sweep from the fullest moment is given up above this many times the floor: other methods do better there.
WORTH_A_SWEEP = 1.05

# Holes that are looked at when time is over.
HOLES_IN_A_HURRY = 64

# The allowance grows with the largest part up to this many times: a descent costs more if there are more buffers.
BUFFERS_PER_ALLOWANCE, MOST_ALLOWANCES = 450, 3.0


@dataclass(frozen=True, slots=True)
class Spending:
    """The means of one effort.

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


EFFORTS: dict[str, Spending] = {
    "fast": Spending(work=400_000, good_enough=1.005, large_enough=1.02, largest=600, tries=3),
    "normal": Spending(work=13_000_000, good_enough=1.001, large_enough=1.005, largest=3000, tries=5),
    "max": Spending(work=80_000_000, good_enough=1.0, large_enough=1.0, largest=6000, tries=5),
}

# If memory may be spent on waiting less, this many times more places are looked at.
PATIENCE = 8


def pack(
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    size: npt.ArrayLike,
    *,
    alignment: int = 1,
    time_limit: float | None = None,
    effort: Effort | None = None,
    order: Precedence | None = None,
    room: int = 0,
) -> Packing:
    """Give every buffer an offset such that buffers alive at the same time do not overlap, in little memory.

    The work is counted in steps, not seconds, so the same input gives the same offsets on every machine.
    ``time_limit`` only cuts that work short.

    Args:
        lower: first time at which each buffer is alive; integers.
        upper: first time at which it is dead again; ``lower < upper``.
        size: bytes of each buffer, positive; all together less than 2**62.
        alignment: offsets are multiples of it, and sizes are rounded up to it.
        time_limit: seconds after which the best packing so far is returned; if there is none yet, a quick packing is
            still made (some microseconds a buffer). None: no limit on time.
        effort: ``"fast"``: greedy, and a short search while more than 0.5 % above the lower bound; milliseconds for
            ordinary graphs. ``"normal"`` (the default): search towards the lower bound for seconds on hard inputs, not
            at all on easy inputs. ``"max"``: longer.
        order: which steps use each buffer, and which its first writer waits for anyway. Reuse without a wait is
            then preferred, as far as that costs neither memory nor much time.
        room: bytes that may be used to avoid waits, if the least memory needs some.

    Returns:
        The offsets, the peak they need, and the lower bound. Work stops at once when the two are equal.

    Raises:
        PackingError: an array or option is not acceptable; nothing has been done then.

    >>> packing = pack([0, 1, 3], [2, 4, 5], [10, 20, 10])
    >>> packing.peak, packing.lower_bound
    (30, 30)
    >>> packing.offsets.tolist()
    [20, 0, 20]
    """
    began = time.perf_counter()
    lo, up, sz = check_input(lower, upper, size, alignment)
    if time_limit is not None and not time_limit > 0:
        raise PackingError(f"time_limit: expected a positive number of seconds or None, got {time_limit!r}")
    effort = "normal" if effort is None else effort
    if effort not in EFFORTS:
        raise PackingError(f"effort: expected one of {', '.join(EFFORTS)}, got {effort!r}")
    units = -(-sz // alignment)
    scale = int(np.gcd.reduce(units)) if len(units) else 1
    problem = sectioned(lo, up, units // scale, np.arange(len(lo)))
    bound = problem.lower_bound()
    deadline = Deadline(None if time_limit is None else began + time_limit)
    offsets = _in_parts(problem, bound, spending=EFFORTS[effort], deadline=deadline, order=order)
    if order is not None and room > bound * scale * alignment:
        offsets = _spread(problem, offsets, room=room // (scale * alignment), order=order, deadline=deadline)
    peak = peak_of(problem, offsets)
    scale *= alignment
    offsets *= scale
    offsets.flags.writeable = False
    return Packing(offsets, peak * scale, bound * scale)


def _in_parts(
    problem: Problem, bound: int, *, spending: Spending, deadline: Deadline, order: Precedence | None
) -> Int64:
    """Offsets in units. Every independent part is packed on its own, and searched if it rises above the need of the
    others: above ``bound``, which is that of the whole problem."""
    offsets = np.zeros(len(problem), np.int64)
    leaves = leaf_parts(problem)
    middling = max((len(part) for _, part in leaves if len(part) <= MANY), default=0)
    scale = min(max(middling / BUFFERS_PER_ALLOWANCE, 1.0), MOST_ALLOWANCES)
    allowance = Allowance(int(spending.work * scale), deadline)  # what searches of all parts may spend together
    for base, part in leaves:
        best = Incumbent(part, bound - base, spending=spending, deadline=deadline, order=order)
        try:
            if not best.swept():
                best.improve(allowance)
            best.wait_less()
        except OutOfTime:
            best.hurry()
        offsets[part.index] = best.offsets + base
    return offsets


def _spread(problem: Problem, offsets: Int64, *, room: int, order: Precedence, deadline: Deadline) -> Int64:
    """The packing of at most ``room`` units with the fewest waits that sweeps find, or ``offsets``."""
    best = order.waits(*reuse_edges(problem.lo, problem.size, offsets))
    for variant in variants_of(problem):
        if not best:
            break
        try:
            sweep = pack_outwards(
                problem, floor=room, limit=room, variant=variant, order=order, deadline=deadline, patience=PATIENCE
            )
        except OutOfTime:
            break
        if sweep is not None and sweep[1] < best:
            offsets, best = sweep
    return offsets


class Incumbent:
    """The best packing of a part so far: the lowest, and of equally low packings one with few waits.

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
        """How many reuses make a step wait; None: not counted."""
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
                    sweep = pack_outwards(
                        self.part, floor=self.floor, limit=limit, variant=variant, order=order, deadline=self.deadline
                    )
                    if sweep is None and order is not None:
                        self._none_below = limit
                    elif sweep is not None:
                        self._made = True
                        self.offsets, self.peak = sweep[0], peak_of(self.part, sweep[0])
                        self._waits = None if order is None else sweep[1]
        return self.peak <= enough

    def wait_less(self) -> None:
        """Look for packings that are as low but make buffers wait for fewer others."""
        if self.order is None or self._waits is not None:
            return
        least = self.order.waits(*reuse_edges(self.part.lo, self.part.size, self.offsets))
        known = self.peak <= self._none_below
        for variant in variants_of(self.part)[known:] if least else ():
            sweep = pack_outwards(
                self.part, floor=self.floor, limit=self.peak, variant=variant, order=self.order, deadline=self.deadline
            )
            if sweep is not None and sweep[1] < least:
                self.offsets, self.peak = sweep[0], peak_of(self.part, sweep[0])
                return

    def improve(self, allowance: Allowance) -> None:
        """Try what sweeps are not: greedy packings, and then a search, as far as the allowance of all parts goes."""
        part, spending = self.part, self.spending
        tries = spending.tries if self.is_small else 1  # the time of one grows with the square of the buffers
        self.offer(portfolio(part, self.floor, tries=tries, deadline=self.deadline))
        if self.peak > self.enough and len(part) <= spending.largest:
            good_enough = spending.good_enough
            self.offer(improve(part, self.offsets, floor=self.floor, allowance=allowance, good_enough=good_enough))
