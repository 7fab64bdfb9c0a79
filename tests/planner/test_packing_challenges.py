"""Generated packing problems, which resemble hard public problems: their properties and packings."""

from __future__ import annotations

import math

import numpy as np
import pytest

from bench.packing_instances import FAMILIES, SIDE, challenge, challenges
from weftplan.planner.packing import check_packing, pack


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n", [40, 150, 450])
def test_the_bound_is_the_height_of_the_rectangle(family: str, n: int) -> None:
    """A problem has about ``n`` buffers inside a rectangle, whose height is the largest load."""
    lower, upper, size = challenge(family, n, 3)
    assert abs(len(size) - n) <= max(0.15 * n, 12)
    assert (lower >= 0).all()
    assert (upper > lower).all()
    assert (size > 0).all()
    assert upper.max() <= SIDE * SIDE
    change = np.zeros(SIDE + 1, np.int64)
    np.add.at(change, lower // SIDE, size)
    np.subtract.at(change, upper // SIDE, size)
    assert np.cumsum(change).max() == SIDE * SIDE


def test_same_seed_same_problem() -> None:
    """Equal seeds give equal problems; seeds and families differ; an unknown family raises an error."""
    result = {name: [column.tolist() for column in buffers] for name, buffers in challenges(2, (60,))}
    assert result == {name: [column.tolist() for column in buffers] for name, buffers in challenges(2, (60,))}
    assert len({str(columns) for columns in result.values()}) == len(result) == 2 * len(FAMILIES)
    with pytest.raises(ValueError, match="expected one of cut, "):
        challenge("knots", 10)


def test_full_rectangles_are_packed_at_the_bound() -> None:
    """150 buffers that were cut from a full rectangle are packed at the bound."""
    for family in ("cut", "slices", "boxes"):
        assert pack(*challenge(family, 150, 7)).ratio == 1.0


def test_all_families() -> None:
    """Packings of all families are valid, and within 15 % of the bound in the geometric mean."""
    ratios = []
    for _, buffers in challenges(1, (100,)):
        packing = pack(*buffers)
        assert check_packing(*buffers, packing.offsets) == packing.peak
        ratios.append(packing.ratio)
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) <= 1.15
