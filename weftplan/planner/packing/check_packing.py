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
    first, last = _ints(lower), _ints(upper)
    nbytes, place = _ints(size), _ints(offsets)
    if not len(first) == len(last) == len(nbytes) == len(place):
        raise PlanError(
            "expected lower, upper, size and offsets of one length, got "
            f"{len(first)}, {len(last)}, {len(nbytes)}, {len(place)}"
        )
    for i, off in enumerate(place):
        if first[i] >= last[i] or nbytes[i] <= 0:
            raise PlanError(
                f"buffer {i}: expected lower < upper and a positive size, got {first[i]}, {last[i]} and {nbytes[i]}"
            )
        if off < 0 or off % alignment:
            raise PlanError(f"buffer {i}: expected an offset >= 0 and a multiple of {alignment}, got {off}")
    # Live ranges are disjoint and sorted by offset, so a new range can only overlap its two neighbours.
    starts: list[int] = []
    live: list[int] = []
    births = sorted(range(len(first)), key=first.__getitem__)
    deaths = sorted(births, key=last.__getitem__)
    dead = 0
    for i in births:
        moment = first[i]
        # Lifetimes are half-open: a buffer that dies at this moment is removed before a birth.
        while dead < len(deaths) and last[deaths[dead]] <= moment:
            at = bisect_left(starts, place[deaths[dead]])
            del starts[at], live[at]
            dead += 1
        at = bisect_left(starts, place[i])
        for k in live[at - 1 if at else 0 : at + 1]:
            if place[k] < place[i] + nbytes[i] and place[i] < place[k] + nbytes[k]:
                raise PlanError(
                    f"buffers {k} and {i} overlap at time {moment}: {k} lives {first[k]}..{last[k]} in bytes "
                    f"{place[k]}..{place[k] + nbytes[k]}, {i} lives {first[i]}..{last[i]} in bytes "
                    f"{place[i]}..{place[i] + nbytes[i]}"
                )
        starts.insert(at, place[i])
        live.insert(at, i)
    return max((place[i] + nbytes[i] for i in range(len(place))), default=0)


def check_problem(problem: PackingProblem, packing: Packing) -> None:
    """Check a packing against every constraint of its problem, bank by bank, and its peaks.

    Raises:
        PlanError: a constraint is violated; names the buffers.
    """
    first, last = _ints(problem.lower), _ints(problem.upper)  # the problem's columns are arrays by now
    nbytes, place = _ints(problem.size), _ints(packing.offsets)
    bank = [0] * len(place) if packing.bank is None else _ints(packing.bank)
    ends = [start + extent for start, extent in zip(place, nbytes, strict=True)]
    fixed = _ints(problem.bank if problem.bank is not None else [-1] * len(place))
    for i, number in enumerate(bank):
        if not 0 <= number < len(problem.banks) or fixed[i] not in (-1, number):
            raise PlanError(f"buffer {i} is in bank {number}; its problem has it in {fixed[i]} (-1: any)")
        capacity = problem.banks[number]
        if capacity is not None and ends[i] > capacity:
            raise PlanError(f"buffer {i} ends at byte {ends[i]} of bank {number}, which has {capacity} bytes")
        for reserved, low, high in problem.reserved:
            if reserved == number and place[i] < high and low < ends[i]:
                raise PlanError(f"buffer {i} uses bytes {place[i]}..{ends[i]}, but {low}..{high} is reserved")
    for i, offset in problem.pins.items():
        if place[i] != offset:
            raise PlanError(f"buffer {i} is pinned at {offset}, but lies at {place[i]}")
    for i, k in problem.apart:
        if bank[i] == bank[k] and place[i] < ends[k] and place[k] < ends[i]:
            raise PlanError(f"buffers {i} and {k} must be kept apart, but both use byte {max(place[i], place[k])}")
    peaks = []
    for number in range(len(problem.banks)):
        rows: list[tuple[int, int, int, int]] = []
        for i in range(len(place)):
            if bank[i] == number:
                begin = first[i]
                for pause, resume in problem.holes.get(i, ()):
                    rows.append((begin, pause, nbytes[i], place[i]))
                    begin = resume
                rows.append((begin, last[i], nbytes[i], place[i]))
        columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
        check_packing(*columns, alignment=problem.alignment)
        peaks.append(max((row[2] + row[3] for row in rows), default=0))
    rounded = [-(-peak // problem.alignment) * problem.alignment for peak in peaks]
    if sum(rounded) != packing.peak:
        raise PlanError(f"the packing reports a peak of {packing.peak} bytes, but its banks end at {rounded}")


def _ints(values: npt.ArrayLike) -> Sequence[int]:
    """Return the values as Python integers."""
    array: Any = values
    return array.tolist() if hasattr(array, "tolist") else [int(v) for v in array]
