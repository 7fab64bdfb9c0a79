"""Concatenated arrays, copied and added piece by piece: one compiled call gives NumPy's bits."""

from __future__ import annotations

import numpy as np
import pytest

from weftplan.kvstore.distributed.arrays import piece_copies
from weftplan.kvstore.distributed.arrays.piece_copies import Mover, Row, Span

SIZES = (5, 0, 700, 1, 64)


def made(rng: np.random.Generator, dtype: str) -> list[np.ndarray]:
    """Arrays of these sizes."""
    return [(rng.standard_normal(size) * 1000).astype(dtype) for size in SIZES]


def moved(mover: Mover, dtype: str) -> list[np.ndarray]:
    """Return all that a sum of three processes writes: a row that is shown, a range that is added, and two rows of
    results."""
    rng = np.random.default_rng(3)
    shares, totals, also = made(rng, dtype), made(rng, dtype), made(rng, dtype)
    size, kind = sum(SIZES), np.dtype(dtype)
    shown, first, last = np.full(size, 7, dtype), np.concatenate(made(rng, dtype)), np.concatenate(made(rng, dtype))
    mover.move(SIZES, kind, [Span(0, 100, (shares,), (Row(shown),)), Span(300, size, (shares,), (Row(shown),))])
    summed = np.zeros(200, dtype)
    mover.move(SIZES, kind, [Span(100, 300, (Row(first), shares, Row(last)), (Row(summed, 100),))])
    left, right = first[:100].copy(), last[300:].copy()
    spans = [(0, 100, Row(left)), (100, 300, Row(summed, 100)), (300, size, Row(right, 300))]
    mover.move(SIZES, kind, [Span(begin, end, (row,), (totals, also)) for begin, end, row in spans])
    return [*shares, shown, summed, *totals, *also]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32"])
def test_compiled_loops_write_what_numpy_writes(dtype):
    """To the bit, and the second time as the first."""
    want = moved(Mover(compiled=False), dtype)
    row = np.concatenate(want[: len(SIZES)])
    np.testing.assert_array_equal(want[len(SIZES)], [*row[:100], *[7] * 200, *row[300:]])
    for _ in range(2):
        actual = moved(Mover(), dtype)
        for one, second in zip(actual, want, strict=True):
            np.testing.assert_array_equal(one, second)


def test_what_does_not_fit_into_the_caches(monkeypatch):
    """Is left to copies past them."""
    want = moved(Mover(compiled=False), "float32")
    monkeypatch.setattr(piece_copies, "ONE_CALL", 0)
    monkeypatch.setattr(piece_copies, "compiled_pieces", None)
    for one, second in zip(moved(Mover(), "float32"), want, strict=True):
        np.testing.assert_array_equal(one, second)


def test_an_array_that_has_moved():
    """It is read at its current address."""
    mover, dtype = Mover(), np.dtype("float32")
    for number in range(20):
        source, target = np.full(50, number, dtype), np.zeros(50, dtype)
        mover.move((50,), dtype, [Span(0, 50, ([source],), ([target],))])
        assert (target == number).all()
