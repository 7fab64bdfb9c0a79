"""`pack`: assign offsets to buffers with known lifetimes, close to the minimum memory.

This module owns the levels of effort. It divides a problem into independent parts and sweeps each part outwards from
its peak. A part that no sweep brings near its lower bound is passed to :mod:`weftplan.planner.packing.hard`. It depends
only on NumPy, so other programs may use it alone.
"""

from __future__ import annotations

import numbers
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from weftplan.planner.packing import constrained
from weftplan.planner.packing.constrained_problem import PackingProblem
from weftplan.planner.packing.hard.search import MAX_CELLS, Allowance, improve, portfolio, table_cells
from weftplan.planner.packing.place_by_birth import pack_by_birth, pack_tall_first
from weftplan.planner.packing.place_from_the_peak import VARIANTS, Variant, pack_outwards, variants_of
from weftplan.planner.packing.problem import (
    MANY,
    MAX_TOTAL,
    Deadline,
    Int64,
    OutOfTime,
    Packing,
    PackingError,
    Problem,
    Scans,
    check_input,
    leaf_parts,
    peak_of,
    sectioned,
)
from weftplan.planner.packing.reuse import Precedence, reuse_edges

Effort = Literal["fast", "normal", "max"]

# Maximum height of a sweep's packing, as a multiple of the floor: above it other methods do better.
WORTH_A_SWEEP = 1.05

MAX_SCANS = 20_000_000
"""Maximum number of holes that the sweeps of one call look at: about two seconds. No kind of a million buffers of the
benchmarks gains from more."""

WORTH_A_SECOND = 1.45
"""Ratio of the fallback's peak to the lower bound above which the tallest buffers are also placed first."""

MAX_FOR_FIRST_FIT = 1 << 17
"""Maximum number of buffers of a part that first fit places, in quadratic time: 2**17 buffers take 12 to 22 seconds,
for a packing that is up to 13 % lower."""

# The allowance of work grows with the largest part, at most by this factor: a descent over more buffers costs more.
BUFFERS_PER_ALLOWANCE, MAX_ALLOWANCES = 450, 3.0


@dataclass(frozen=True, slots=True)
class Spending:
    """The limits of one level of effort.

    Attributes:
        work: units of search work; a second is about 5e6 units.
        good_enough: ratio of peak to lower bound at which the search stops.
        large_enough: the same for parts of more than a few thousand buffers; the larger of the two ratios counts.
        largest: maximum number of buffers of a part that is searched (its conflict table is quadratic).
        tries: number of greedy packings before the search.
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

# Factor on the number of candidate offsets if memory may be spent to avoid waits.
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
    """Assign an offset to each buffer so that buffers alive at the same time do not overlap, in little memory.

    Work is limited by operation counts, not seconds, so the same input gives the same offsets on every machine.
    Only ``time_limit`` makes the result depend on time.

    Args:
        lower: first time at which each buffer is alive; integers.
        upper: first time at which each buffer is dead; ``lower < upper``.
        size: bytes of each buffer, positive; their sum is less than 2**62.
        alignment: offsets are multiples of it, and sizes are rounded up to it.
        time_limit: seconds after which the best packing so far is returned. It is never higher than the packing in
            order of birth, which is made first, in about ten microseconds a buffer. None: no time limit.
        effort: ``"fast"``: greedy packings, then a short search while the peak is more than 0.5 % above the lower
            bound; milliseconds for ordinary graphs. ``"normal"`` (the default): search towards the lower bound, for
            seconds on hard inputs, not at all on easy inputs. ``"max"``: search longer.
        order: steps that use each buffer, and steps that precede its first writer by data. If given, reuse that adds
            no wait is preferred, provided that it costs neither memory nor much time.
        room: total bytes up to which the packing may grow to avoid waits.

    Returns:
        The offsets, their peak, and the lower bound. Work stops as soon as the two are equal.

    Raises:
        PackingError: an array or option is invalid; no work has been done.

    >>> packing = pack([0, 1, 3], [2, 4, 5], [10, 20, 10])
    >>> packing.peak, packing.lower_bound
    (30, 30)
    >>> packing.offsets.tolist()
    [20, 0, 20]
    """
    deadline, effort = _limits(time_limit, effort)
    lo, up, sz = check_input(lower, upper, size, alignment)
    if order is not None and not (isinstance(order, Precedence) and len(order.users) == len(order.needed) == len(lo)):
        raise PackingError(f"order: expected a Precedence with {len(lo)} users and needed, got {order!r:.80}")
    if isinstance(room, bool) or not isinstance(room, numbers.Integral):
        raise PackingError(f"room: expected an integer number of bytes, got {room!r}")
    alignment = int(alignment)  # products with an integer of NumPy could overflow
    units = -(-sz // alignment)
    scale = int(np.gcd.reduce(units)) if len(units) else 1
    problem = sectioned(lo, up, units // scale, np.arange(len(lo)))
    bound = problem.lower_bound()
    offsets = _in_parts(problem, bound, spending=EFFORTS[effort], deadline=deadline, order=order)
    if order is not None and room > bound * scale * alignment:
        offsets = _spread(problem, offsets, room=room // (scale * alignment), order=order, deadline=deadline)
    peak = peak_of(problem, offsets)
    scale *= alignment
    offsets *= scale
    offsets.flags.writeable = False
    return Packing(offsets, peak * scale, bound * scale)


def _limits(time_limit: float | None, effort: Effort | None) -> tuple[Deadline, Effort]:
    """Return the checked limits of one call.

    Raises:
        PackingError: a limit is invalid.
    """
    effort = "normal" if effort is None else effort
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise PackingError(f"effort: expected one of {', '.join(EFFORTS)}, got {effort!r}")
    if time_limit is None:
        return Deadline(), effort
    if isinstance(time_limit, bool) or not isinstance(time_limit, numbers.Real) or not time_limit > 0:
        raise PackingError(f"time_limit: expected a positive number of seconds or None, got {time_limit!r}")
    return Deadline(time.perf_counter() + float(min(time_limit, MAX_TOTAL))), effort  # floats end at 2**1024


def pack_problem(problem: PackingProblem, *, effort: Effort | None = None, time_limit: float | None = None) -> Packing:
    """Assign a bank and an offset to each buffer of a problem with pins, banks and other constraints.

    The sum of the banks' peaks is minimized, but a buffer with an open bank goes to the first bank with room for it.
    Equal problems get equal packings, unless a time limit ends the search.

    Args:
        problem: the buffers and their constraints.
        effort: as for :func:`pack`.
        time_limit: seconds after which the best packing so far is returned, but not before the first one is complete.

    Raises:
        PackingError: an option is invalid, or no packing was found within the capacities of the banks.

    >>> problem = PackingProblem(lower=[0, 0, 2], upper=[2, 4, 4], size=[8, 8, 8], pins={1: 0}, apart=[(0, 2)])
    >>> pack_problem(problem).offsets.tolist()
    [16, 0, 8]
    """
    deadline, effort = _limits(time_limit, effort)
    if not isinstance(problem, PackingProblem):
        raise PackingError(f"problem: expected a PackingProblem, got {problem!r:.80}; pack takes lifetimes and sizes")

    def _plain(lower: Int64, upper: Int64, size: Int64) -> Packing:
        seconds = None if deadline.moment is None else max(deadline.left(), 1e-9)
        return pack(lower, upper, size, alignment=problem.alignment, effort=effort, time_limit=seconds)

    return constrained.solve(problem, _plain, effort=effort, deadline=deadline)


def _in_parts(
    problem: Problem, bound: int, *, spending: Spending, deadline: Deadline, order: Precedence | None
) -> Int64:
    """Return offsets in units of the alignment; pack each independent part on its own.

    A part is searched only if its packing is higher than ``bound``, the lower bound of the whole problem. Parts of more
    than `MANY` buffers come first, from the largest on; later parts need not be lower than the packings of these.
    """
    offsets, leaves = leaf_parts(problem)
    leaves.sort(key=lambda leaf: -len(leaf[1]) if len(leaf[1]) > MANY else 0)
    middling = max((len(part) for _, part in leaves if len(part) <= MANY), default=0)
    scale = min(max(middling / BUFFERS_PER_ALLOWANCE, 1.0), MAX_ALLOWANCES)
    allowance = Allowance(int(spending.work * scale), deadline)  # shared by the searches of all parts
    scans = Scans(MAX_SCANS)
    is_limited = deadline.moment is not None  # then large parts get their fallback before anything else
    fallbacks = [pack_by_birth(part) if is_limited and len(part) > MANY else None for _, part in leaves]
    for (base, part), fallback in zip(leaves, fallbacks, strict=True):
        best = Incumbent(
            part, bound - base, spending=spending, deadline=deadline, order=order, scans=scans, fallback=fallback
        )
        try:
            if not best.swept():
                best.improve(allowance)
            best.wait_less()
        except OutOfTime:
            best.hurry()
        offsets[part.index] = best.offsets + base
        if len(part) > MANY:
            bound = max(bound, best.peak + base)
    return offsets


def _spread(problem: Problem, offsets: Int64, *, room: int, order: Precedence, deadline: Deadline) -> Int64:
    """Return the packing with the fewest waits: ``offsets``, or that of a sweep of at most ``room`` units."""
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
    """The best packing of a part so far: the lowest; among equally low packings, one with few waits.

    Args:
        part: the buffers.
        floor: peak at which the part no longer determines the peak of the whole problem; search stops there.
        spending: the limits of the effort.
        deadline: the time limit.
        order: precedence of all buffers of the caller's problem, not only of the part.
        scans: what the sweeps of all parts may spend.
        fallback: the packing by birth, if it is known.
    """

    def __init__(
        self,
        part: Problem,
        floor: int,
        *,
        spending: Spending,
        deadline: Deadline,
        order: Precedence | None,
        scans: Scans,
        fallback: Int64 | None = None,
    ) -> None:
        self.part = part
        self.floor = floor
        self.spending = spending
        self.deadline = deadline
        self.scans = scans
        self.order = None if order is None else order.take(part.index)
        self.is_small = len(part) <= MANY
        ratio = spending.good_enough if self.is_small else max(spending.good_enough, spending.large_enough)
        self.enough = floor * ratio
        """The peak at which work stops."""
        self.offsets: Int64 = part.size.cumsum() - part.size  # all buffers stacked: valid, and the worst packing
        self.peak = int(part.size.sum())
        self._fallen_back = fallback is not None
        """Whether the packing is at most as high as the fallback's."""
        self._waits: int | None = None
        """Number of reuses that make a step wait; None: not counted."""
        self._none_below = 0
        """Highest limit at which the first sweep by :attr:`order` has failed."""
        if fallback is not None:
            self.offer(fallback)

    def offer(self, offsets: Int64) -> None:
        """Replace the best packing by ``offsets`` if these are lower."""
        peak = peak_of(self.part, offsets)
        if peak < self.peak:
            self.offsets, self.peak, self._waits = offsets, peak, None

    def hurry(self) -> None:
        """Offer the fallback if the time limit passed before a method made a packing at least as low as it."""
        if not self._fallen_back:
            self.offer(pack_by_birth(self.part))

    def swept(self) -> bool:
        """Sweep outwards from the peak until a packing is low enough; return whether one is.

        A sweep stops as soon as it exceeds `WORTH_A_SWEEP` times the floor. For a small part only the floor itself is
        low enough.
        """
        enough = self.floor if self.is_small else self.enough
        tries = len(VARIANTS) if self.is_small else 2
        for order in (None,) if self.order is None else (self.order, None):
            for variant in variants_of(self.part, tries) if order is None else VARIANTS[:1]:
                if self.peak <= enough:
                    return True
                limit = min(self.peak - 1, int(self.floor * WORTH_A_SWEEP))
                sweep = self._sweep(variant, limit, order)
                if sweep is None and order is not None:
                    self._none_below = limit
                elif sweep is not None:
                    self.offsets, self.peak = sweep[0], peak_of(self.part, sweep[0])
                    self._waits = None if order is None else sweep[1]
        return self.peak <= enough

    def _sweep(self, variant: Variant, limit: int, order: Precedence | None) -> tuple[Int64, int] | None:
        return pack_outwards(
            self.part,
            floor=self.floor,
            limit=limit,
            variant=variant,
            order=order,
            deadline=self.deadline,
            scans=self.scans,
        )

    def wait_less(self) -> None:
        """Replace the packing by one that is equally low and adds fewer waits, if a sweep finds one."""
        if self.order is None or self._waits is not None:
            return
        least = self.order.waits(*reuse_edges(self.part.lo, self.part.size, self.offsets))
        refuted = self.peak <= self._none_below
        for variant in variants_of(self.part)[refuted:] if least else ():
            sweep = self._sweep(variant, self.peak, self.order)
            if sweep is not None and sweep[1] < least:
                self.offsets, self.peak = sweep[0], peak_of(self.part, sweep[0])
                return

    def improve(self, allowance: Allowance) -> None:
        """Try the greedy packings; if they are not low enough, search until the allowance is spent."""
        part, spending = self.part, self.spending
        if self._improve_merged(allowance):
            return
        if not self.is_small:
            if not self._fallen_back:
                self.offer(pack_by_birth(part, self.deadline))
                self._fallen_back = True
            if self.peak > self.floor * WORTH_A_SECOND and not self.deadline.over():
                self.offer(pack_tall_first(part, self.deadline))
        if self.is_small or (self.peak > self.enough and len(part) <= MAX_FOR_FIRST_FIT):
            tries = spending.tries if self.is_small else 1  # the time of one is quadratic in the number of buffers
            self.offer(portfolio(part, self.floor, tries=tries, deadline=self.deadline))
        if self.peak > self.enough and len(part) <= spending.largest and table_cells(part) <= MAX_CELLS:
            good_enough = spending.good_enough
            self.offer(improve(part, self.offsets, floor=self.floor, allowance=allowance, good_enough=good_enough))

    def _improve_merged(self, allowance: Allowance) -> bool:
        """Pack merged buffers, if merging removes at least half of the buffers; return whether it does."""
        # Loaded here, because most parts reach their bound without it.
        from weftplan.planner.packing.exact_neighbours import merge_exact_neighbours, unmerge

        merged, rounds = merge_exact_neighbours(self.part, self.deadline)
        if 2 * len(merged) > len(self.part):
            return False
        best = Incumbent(
            merged, self.floor, spending=self.spending, deadline=self.deadline, order=None, scans=self.scans
        )
        try:
            if not best.swept():
                best.improve(allowance)
        except OutOfTime:
            if not self._fallen_back:
                best.hurry()
        self.offer(unmerge(best.offsets, rounds))
        return not self.is_small or self.peak <= self.enough
