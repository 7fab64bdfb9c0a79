"""An independent judge of packings: plain Python integers, no code shared with the packers."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from weftplan.errors import PlanError


def check_packing(
    lower: npt.ArrayLike, upper: npt.ArrayLike, size: npt.ArrayLike, offsets: npt.ArrayLike, *, alignment: int = 1
) -> int:
    """Replay births and deaths in time and check that no two live buffers overlap.

    Returns:
        The highest end of any buffer, in bytes.

    Raises:
        PlanError: an offset is missing, negative or not aligned, or two live buffers overlap; names both buffers,
            their lifetimes and their bytes.

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
        if off < 0 or off % alignment:
            raise PlanError(f"buffer {i}: expected an offset >= 0 and a multiple of {alignment}, got {off}")
    # Deaths before births at equal times: lifetimes are half-open.
    events = sorted([(last[i], 0, i) for i in range(len(first))] + [(first[i], 1, i) for i in range(len(first))])
    live: list[tuple[int, int]] = []  # (offset, buffer), disjoint, so neighbours in this order suffice
    for moment, birth, i in events:
        if not birth:
            del live[bisect_left(live, (place[i], i))]
            continue
        at = bisect_left(live, (place[i], i))
        for off, k in live[max(at - 1, 0) : at + 1]:
            if off < place[i] + nbytes[i] and place[i] < off + nbytes[k]:
                raise PlanError(
                    f"buffers {k} and {i} overlap at time {moment}: {k} lives {first[k]}..{last[k]} in bytes "
                    f"{off}..{off + nbytes[k]}, {i} lives {first[i]}..{last[i]} in bytes "
                    f"{place[i]}..{place[i] + nbytes[i]}"
                )
        insort(live, (place[i], i))
    return max((place[i] + nbytes[i] for i in range(len(place))), default=0)


def _ints(values: npt.ArrayLike) -> Sequence[int]:
    plain: Any = values.tolist() if hasattr(values, "tolist") else values
    return [int(v) for v in plain]
