"""An independent checker of packings: plain Python integers, no code shared with the packers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from weftplan.errors import PlanError

if TYPE_CHECKING:
    from weftplan.planner.packing.constrained_problem import PackingProblem
    from weftplan.planner.packing.problem import Packing


def check_packing(
    lower: npt.ArrayLike, upper: npt.ArrayLike, size: npt.ArrayLike, offsets: npt.ArrayLike, *, alignment: int = 1
) -> int:
    """Replay births and deaths in time order and check that no two live buffers overlap.

    Returns:
        The maximum end of a buffer, in bytes.

    Raises:
        PlanError: an offset is missing, negative or not aligned, a lifetime or size is empty, or two live buffers
            overlap; names both buffers, their lifetimes and their bytes.

    >>> check_packing([0, 1], [2, 3], [8, 8], [0, 8])
    16
    """
    lows, highs = _ints(lower), _ints(upper)
    nbytes, positions = _ints(size), _ints(offsets)
    if not len(lows) == len(highs) == len(nbytes) == len(positions):
        raise PlanError(
            "expected lower, upper, size and offsets of one length, got "
            f"{len(lows)}, {len(highs)}, {len(nbytes)}, {len(positions)}"
        )
    for i, off in enumerate(positions):
        if lows[i] >= highs[i] or nbytes[i] <= 0:
            raise PlanError(
                f"buffer {i}: expected lower < upper and a positive size, got {lows[i]}, {highs[i]} and {nbytes[i]}"
            )
        if off < 0 or off % alignment:
            raise PlanError(f"buffer {i}: expected an offset >= 0 and a multiple of {alignment}, got {off}")
    # Live ranges are disjoint and sorted by offset, so a new range can only overlap its two neighbours.
    starts: list[int] = []
    live: list[int] = []
    births = sorted(range(len(lows)), key=lows.__getitem__)
    deaths = sorted(births, key=highs.__getitem__)
    dead = 0
    for i in births:
        moment = lows[i]
        # Lifetimes are half-open: a buffer that dies at this moment is removed before a birth.
        while dead < len(deaths) and highs[deaths[dead]] <= moment:
            at = bisect_left(starts, positions[deaths[dead]])
            del starts[at], live[at]
            dead += 1
        at = bisect_left(starts, positions[i])
        for k in live[at - 1 if at else 0 : at + 1]:
            if positions[k] < positions[i] + nbytes[i] and positions[i] < positions[k] + nbytes[k]:
                raise PlanError(
                    f"buffers {k} and {i} overlap at time {moment}: {k} lives {lows[k]}..{highs[k]} in bytes "
                    f"{positions[k]}..{positions[k] + nbytes[k]}, {i} lives {lows[i]}..{highs[i]} in bytes "
                    f"{positions[i]}..{positions[i] + nbytes[i]}"
                )
        starts.insert(at, positions[i])
        live.insert(at, i)
    return max((positions[i] + nbytes[i] for i in range(len(positions))), default=0)


def check_problem(problem: PackingProblem, packing: Packing) -> None:
    """Check a packing against every constraint of its problem, bank by bank, and its peaks.

    Raises:
        PlanError: a constraint is violated; names the buffers.
    """
    births, deaths = _ints(problem.lower), _ints(problem.upper)  # the problem's columns are arrays by now
    unit, starts = problem.alignment, _ints(packing.offsets)
    nbytes = [-(-extent // unit) * unit for extent in _ints(problem.size)]
    bank = [0] * len(starts) if packing.bank is None else _ints(packing.bank)
    ends = [start + extent for start, extent in zip(starts, nbytes, strict=True)]
    fixed = _ints(problem.bank if problem.bank is not None else [-1] * len(starts))
    for i, number in enumerate(bank):
        if not 0 <= number < len(problem.banks) or fixed[i] not in (-1, number):
            raise PlanError(f"buffer {i} is in bank {number}; its problem has it in {fixed[i]} (-1: any)")
        capacity = problem.banks[number]
        if capacity is not None and ends[i] > capacity:
            raise PlanError(f"buffer {i} ends at byte {ends[i]} of bank {number}, which has {capacity} bytes")
        for reserved, low, high in problem.reserved:
            if reserved == number and starts[i] < high and low < ends[i]:
                raise PlanError(f"buffer {i} uses bytes {starts[i]}..{ends[i]}, but {low}..{high} is reserved")
    for i, offset in problem.pins.items():
        if starts[i] != offset:
            raise PlanError(f"buffer {i} is pinned at {offset}, but lies at {starts[i]}")
    for i, k in problem.apart:
        if bank[i] == bank[k] and starts[i] < ends[k] and starts[k] < ends[i]:
            raise PlanError(f"buffers {i} and {k} must be kept apart, but both use byte {max(starts[i], starts[k])}")
    peaks = []
    for number in range(len(problem.banks)):
        rows: list[tuple[int, int, int, int]] = []
        for i in range(len(starts)):
            if bank[i] == number:
                begin = births[i]
                for pause, resume in problem.holes.get(i, ()):
                    if begin < pause:  # else this hole begins where the previous one ends
                        rows.append((begin, pause, nbytes[i], starts[i]))
                    begin = resume
                rows.append((begin, deaths[i], nbytes[i], starts[i]))
        columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
        peaks.append(check_packing(*columns, alignment=unit))
    if sum(peaks) != packing.peak:
        raise PlanError(f"the packing reports a peak of {packing.peak} bytes, but its banks end at {peaks}")


def _ints(values: npt.ArrayLike) -> Sequence[int]:
    """Return the values as Python integers."""
    array: Any = values
    return array.tolist() if hasattr(array, "tolist") else [int(v) for v in array]
