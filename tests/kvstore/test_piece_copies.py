"""Copies and sums of several arrays as one: compiled calls write the bits that NumPy writes."""

from __future__ import annotations

import numpy as np
import pytest

from weftplan.kvstore.distributed.arrays import piece_copies
from weftplan.kvstore.distributed.arrays.piece_copies import Mover, OffsetRow, Span
from weftplan.support import slots

SIZES = (5, 0, 700, 1, 64)


def make_arrays(rng: np.random.Generator, dtype: str) -> list[np.ndarray]:
    """Return random arrays of the sizes in ``SIZES``."""
    return [(rng.standard_normal(size) * 1000).astype(dtype) for size in SIZES]


def run_moves(mover: Mover, dtype: str) -> list[np.ndarray]:
    """Move arrays as one of three processes does in a sum, and return all arrays that were written.

    These are the shares, a shared row, a summed range, and two lists of results.
    """
    rng = np.random.default_rng(3)
    shares, totals, also = make_arrays(rng, dtype), make_arrays(rng, dtype), make_arrays(rng, dtype)
    size, kind = sum(SIZES), np.dtype(dtype)
    shown, first, last = (
        np.full(size, 7, dtype),
        np.concatenate(make_arrays(rng, dtype)),
        np.concatenate(make_arrays(rng, dtype)),
    )
    mover.move(
        SIZES, kind, [Span(0, 100, (shares,), (OffsetRow(shown),)), Span(300, size, (shares,), (OffsetRow(shown),))]
    )
    summed = np.zeros(200, dtype)
    mover.move(SIZES, kind, [Span(100, 300, (OffsetRow(first), shares, OffsetRow(last)), (OffsetRow(summed, 100),))])
    left, right = first[:100].copy(), last[300:].copy()
    spans = [(0, 100, OffsetRow(left)), (100, 300, OffsetRow(summed, 100)), (300, size, OffsetRow(right, 300))]
    mover.move(SIZES, kind, [Span(begin, end, (row,), (totals, also)) for begin, end, row in spans])
    return [*shares, shown, summed, *totals, *also]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32"])
def test_compiled_loops_write_what_numpy_writes(dtype):
    """Compiled moves write NumPy's bits, on the first call and on a repeated one."""
    want = run_moves(Mover(compiled=False), dtype)
    row = np.concatenate(want[: len(SIZES)])
    np.testing.assert_array_equal(want[len(SIZES)], [*row[:100], *[7] * 200, *row[300:]])
    for _ in range(2):
        actual = run_moves(Mover(), dtype)
        for one, second in zip(actual, want, strict=True):
            np.testing.assert_array_equal(one, second)


def test_large_moves_bypass_the_caches(monkeypatch):
    """Arrays of at least ``SINGLE_CALL`` bytes are moved without the compiled call; the results have NumPy's bits."""
    want = run_moves(Mover(compiled=False), "float32")
    monkeypatch.setattr(piece_copies, "SINGLE_CALL", 0)
    monkeypatch.setattr(slots.COMPILED_PIECES, "value", pytest.fail)
    for one, second in zip(run_moves(Mover(), "float32"), want, strict=True):
        np.testing.assert_array_equal(one, second)


def test_an_array_that_has_moved():
    """Repeated moves of arrays at new addresses read and write the current arrays."""
    mover, dtype = Mover(), np.dtype("float32")
    for number in range(20):
        source, target = np.full(50, number, dtype), np.zeros(50, dtype)
        mover.move((50,), dtype, [Span(0, 50, ([source],), ([target],))])
        assert (target == number).all()
