"""`pack`: offsets for buffers with known lifetimes, close to the least memory possible.

This file owns the levels of effort, and cuts a problem into parts that are packed one by one. What sweeps leave
goes to :mod:`weftplan.planner.packing.hard`. It relies on nothing but NumPy, so other programs may use it alone.
"""

from __future__ import annotations

import time
from typing import Literal

import numpy as np
import numpy.typing as npt

from weftplan.planner.packing.from_the_peak import pack_outwards, variants_of
from weftplan.planner.packing.hard.methods import improver
from weftplan.planner.packing.incumbent import Incumbent, Spending
from weftplan.planner.packing.problem import (
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

EFFORTS: dict[str, Spending] = {
    "fast": Spending(work=400_000, good_enough=1.005, large_enough=1.02, largest=600, tries=3),
    "normal": Spending(work=13_000_000, good_enough=1.001, large_enough=1.005, largest=3000, tries=5),
    "max": Spending(work=80_000_000, good_enough=1.0, large_enough=1.0, largest=6000, tries=5),
}

# Where memory may be spent on waiting less, so many times more places are looked at.
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
        time_limit: seconds after which the best packing so far is returned; where there is none yet, a quick one is
            still made (some microseconds a buffer). None: no limit on time.
        effort: ``"fast"``: greedy, and a short search while more than 0.5 % above the lower bound; milliseconds for
            ordinary graphs. ``"normal"`` (the default): search towards the lower bound for seconds on hard inputs, not
            at all on easy ones. ``"max"``: longer.
        order: which steps use each buffer, and which its first writer waits for anyway. Reuse that makes nobody wait is
            then preferred, as far as that costs neither memory nor much time.
        room: bytes that may be used for reuse that makes nobody wait, where the least memory makes somebody wait.

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
    """Offsets in units. Every independent part is packed on its own, and searched where it rises above what the others
    need anyway: above ``bound``, which is that of the whole problem."""
    offsets = np.zeros(len(problem), np.int64)
    leaves = leaf_parts(problem)
    improve = improver(spending, deadline, sizes=[len(part) for _, part in leaves])
    for base, part in leaves:
        best = Incumbent(part, bound - base, spending=spending, deadline=deadline, order=order)
        try:
            if not best.swept():
                improve(best)
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
            found = pack_outwards(
                problem, floor=room, limit=room, variant=variant, order=order, deadline=deadline, patience=PATIENCE
            )
        except OutOfTime:
            break
        if found is not None and found[1] < best:
            offsets, best = found
    return offsets
