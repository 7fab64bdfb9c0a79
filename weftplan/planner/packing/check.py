"""An independent checker of packings: plain Python integers, no code shared with the packers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from weftplan.errors import PlanError


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


def _ints(values: npt.ArrayLike) -> Sequence[int]:
    """Return the values as Python integers."""
    array: Any = values
    return array.tolist() if hasattr(array, "tolist") else [int(v) for v in array]
