"""``side_by_side``: adjacent arrays are viewed as one array without a copy."""

from __future__ import annotations

import numpy as np
import pytest

from weftplan.kvstore.distributed.arrays.contiguous import side_by_side


def test_neighbours_are_one_array():
    """Adjacent arrays give one flat view, and writes to the view change the arrays."""
    room = np.arange(20, dtype=np.float32)
    parts = [room[2:5], room[5:5], room[5:9].reshape(2, 2), room[9:12]]
    whole = side_by_side(parts)
    assert whole is not None
    np.testing.assert_array_equal(whole, room[2:12])
    whole[...] = -1
    assert room.tolist() == [0, 1, *[-1] * 10, *range(12, 20)]


@pytest.mark.parametrize("bounds", [((0, 3), (4, 6)), ((3, 6), (0, 3)), ((0, 3), (2, 5))])
def test_others_are_not(bounds):
    """Arrays with a gap, in another order or with an overlap give None."""
    room = np.zeros(10, np.float32)
    assert side_by_side([room[first:last] for first, last in bounds]) is None


def test_dtypes_do_not_mix():
    """``side_by_side`` returns None for arrays of two dtypes, and for an empty list."""
    room = np.zeros(16, np.uint8)
    assert side_by_side([room[:8].view(np.float32), room[8:].view(np.float64)]) is None
    assert side_by_side([]) is None
