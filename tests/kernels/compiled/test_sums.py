"""Compiled sums and copies: NumPy's bits for 2 to 32 arrays and any range, also with writes past the caches."""

from __future__ import annotations

import numpy as np
import pytest

from weftplan.kernels.compiled.exchange import sums
from weftplan.kernels.compiled.target import host
from weftplan.support.addresses import address

pytestmark = pytest.mark.skipif(isinstance(host(), str), reason=str(host()))


def arrays(count: int, size: int, dtype: str) -> list[np.ndarray]:
    """Return arrays aligned to cache lines, whose sum depends on the order, with infinities and a NaN."""
    rng = np.random.default_rng(count * 100 + size)
    result = []
    for _ in range(count):
        room = np.empty(size + 64, dtype)
        begin = -room.ctypes.data % 64 // room.itemsize
        room[begin : begin + size] = rng.standard_normal(size) * 10.0 ** rng.integers(-4, 5, size)
        result.append(room[begin : begin + size])
    result[0][size // 2], result[-1][size // 3], result[0][0] = np.inf, -np.inf, np.nan
    return result


def numpy_sum(xs: list[np.ndarray], *, grouped: bool) -> np.ndarray:
    """Return the sum of arrays by NumPy, in order or in brackets of four terms."""
    total = xs[0].copy()
    step = 4 if grouped else 1
    for first in range(1, len(xs), step):
        bracket = xs[first]
        for term in xs[first + 1 : first + step]:
            bracket = bracket + term
        total = total + bracket
    return total


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("count", "grouped"), [(2, True), (6, True), (6, False), (32, False)])
def test_sums_have_numpys_bits(monkeypatch, count, grouped, dtype, past):
    """Sums in two ranges have NumPy's bits in both orders, also after the last whole line.

    Nothing is written outside of the result.
    """
    if past:
        monkeypatch.setattr(sums, "PAST", 0)
    size = 1003
    xs = arrays(count, size, dtype)
    out = arrays(1, size + 16, dtype)[0]
    behind = out[size:].copy()
    work = sums.compiled_sum(xs, out[:size], grouped=grouped)
    with np.errstate(all="ignore"):
        work(512, size)
        work(0, 512)
        np.testing.assert_array_equal(out[:size], numpy_sum(xs, grouped=grouped))
    np.testing.assert_array_equal(out[size:], behind)


def test_a_sum_into_its_first_source(monkeypatch):
    """A sum may overwrite its first source; it then does not write past the caches."""
    monkeypatch.setattr(sums, "PAST", 0)
    xs = arrays(3, 777, "float32")
    with np.errstate(all="ignore"):
        want = numpy_sum(xs, grouped=False)
    sums.compiled_sum(xs, xs[0], grouped=False)(0, 777)
    np.testing.assert_array_equal(xs[0], want)


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("size", [333, 3 * sums.BLOCK // 4 + 5])
def test_copies_to_several(monkeypatch, count, past, size):
    """Every target gets every element of the range, and nothing is written after it."""
    if past:
        monkeypatch.setattr(sums, "PAST", 0)
    source = arrays(1, size, "float32")[0]
    rooms = arrays(count, size + 16, "float32")
    before = [room.copy() for room in rooms]
    sums.compiled_spread(source, [room[:size] for room in rooms])(0, size)
    for room, old in zip(rooms, before, strict=True):
        np.testing.assert_array_equal(room[:size], source)
        np.testing.assert_array_equal(room[size:], old[size:])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8"])
@pytest.mark.parametrize(("begins", "size"), [(0, 333), (5, 333), (3, 64), (0, 64)])
def test_copies(dtype, begins, size):
    """Every element is copied, at any alignment, or none to a target below two cache lines; nothing else is written."""
    source = np.random.default_rng(0).integers(0, 100, size + 3).astype(dtype)[3:]
    room = np.full(size + 200, 7, dtype)
    target = room[begins : begins + size]
    assert sums.copy_past(source, target) or target.nbytes < 2 * sums.LINE
    if (target != 7).any():
        np.testing.assert_array_equal(target, source)
    target[...] = 7
    assert (room == 7).all()


def test_copies_of_less_than_a_line():
    """Copies of less than a cache line are left to NumPy."""
    assert not sums.copy_past(np.zeros(3, np.float32), np.ones(3, np.float32))


def test_results_that_do_not_begin_on_a_line(monkeypatch):
    """A result that is not aligned to a cache line is not written past the caches, which would fault."""
    monkeypatch.setattr(sums, "PAST", 0)
    xs = arrays(3, 100, "float32")
    out = arrays(1, 101, "float32")[0][1:]
    sums.compiled_sum(xs, out, grouped=False)(0, 100)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(out, numpy_sum(xs, grouped=False))


@pytest.mark.parametrize(("count", "dtype"), [(1, "float32"), (33, "float32"), (3, "int32"), (3, "float16")])
def test_what_is_left_to_numpy(count, dtype):
    """One array, more than 32 arrays, and dtypes other than float32 and float64 have no compiled sum."""
    xs = [np.zeros(10, dtype) for _ in range(count)]
    assert sums.compiled_sum(xs, np.zeros(10, dtype), grouped=False) is None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("terms", "targets"), [(1, 1), (1, 3), (2, 1), (5, 2)])
def test_pieces(terms, targets, dtype):
    """Pieces of any length and position are summed from left to right into every target.

    Nothing else is written.
    """
    size, ranges = 1003, [(0, 1), (3, 20), (20, 21), (40, 1000)]
    xs = arrays(terms, size, dtype)
    rooms = arrays(targets, size, dtype)
    want = [room.copy() for room in rooms]
    with np.errstate(all="ignore"):
        for room in want:
            for first, end in ranges:
                room[first:end] = numpy_sum(xs, grouped=False)[first:end]
    pieces = [
        ((end - first) * xs[0].itemsize, *(address(one[first:]) for one in (*xs, *rooms))) for first, end in ranges
    ]
    sums.compiled_pieces(pieces, terms, np.dtype(dtype))()
    np.testing.assert_array_equal(rooms, want)


def test_pieces_that_are_left_to_numpy():
    """No pieces, other dtypes and more than 32 terms have no compiled loop."""
    assert sums.compiled_pieces([], 1, np.dtype("float32")) is None
    assert sums.compiled_pieces([(4, 0, 0)], 1, np.dtype("int32")) is None
    assert sums.compiled_pieces([(4, *range(40))], 33, np.dtype("float32")) is None
