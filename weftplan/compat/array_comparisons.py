"""Array comparisons of ``mx.test_utils``, for NumPy's arrays and ours, with informative messages.

The module is stateless; any thread may call its functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from weftplan.ndarray import NDArray
from weftplan.support.array_types import DType, DTypeLike
from weftplan.training.metrics.base import Array

Host = np.ndarray[Any, DType]


def get_atol(atol: float | None = None, dtype: DTypeLike = np.float64) -> float:
    """Return the absolute tolerance of comparisons: 1e-20 by default, for every ``dtype``."""
    return 1e-20 if atol is None else atol


def get_rtol(rtol: float | None = None, dtype: DTypeLike = np.float64) -> float:
    """Return the relative tolerance of comparisons: 1e-5 by default, for every ``dtype``."""
    return 1e-5 if rtol is None else rtol


def host(value: Array) -> Host:
    """Return the values of an array of either kind, or of nested lists, as a NumPy array."""
    return value.asnumpy() if isinstance(value, NDArray) else np.asarray(value)


def same(a: Array, b: Array) -> bool:
    """Return whether all elements are equal.

    >>> from weftplan import nd
    >>> same(nd.ones((2,)), np.ones(2)), same([1], [2])
    (True, False)
    """
    return np.array_equal(host(a), host(b))


def almost_equal(
    a: Array,
    b: Array,
    rtol: float | None = None,
    atol: float | None = None,
    equal_nan: bool = False,
    use_broadcast: bool = True,
) -> bool:
    """Return whether ``|a - b| <= atol + rtol |b|`` holds for all elements.

    Raises:
        AssertionError: the shapes differ and ``use_broadcast`` is False.
    """
    assert use_broadcast or host(a).shape == host(b).shape, (host(a).shape, host(b).shape)
    return np.allclose(host(a), host(b), get_rtol(rtol), get_atol(atol), equal_nan)


def _without_nan(a: Array, b: Array) -> tuple[Host, Host]:
    lhs, right = np.array(host(a)), np.array(host(b))
    lost = np.isnan(lhs) | np.isnan(right)
    lhs[lost] = right[lost] = 0
    return lhs, right


def almost_equal_ignore_nan(a: Array, b: Array, rtol: float | None = None, atol: float | None = None) -> bool:
    """Return the result of :func:`almost_equal` for the elements that are not NaN in either array."""
    return almost_equal(*_without_nan(a, b), rtol, atol)


def find_max_violation(
    a: Array, b: Array, rtol: float | None = None, atol: float | None = None
) -> tuple[tuple[int, ...], float]:
    """Return (index, multiple of the tolerance) of the largest difference."""
    lhs, right = host(a), host(b)
    allowed = get_atol(atol) + get_rtol(rtol) * np.abs(right)
    with np.errstate(all="ignore"):
        worse = np.abs(lhs - right) / (allowed + 1e-300)
    position = np.unravel_index(int(np.argmax(np.nan_to_num(worse, nan=np.inf))), worse.shape)
    return tuple(int(k) for k in position), float(worse[position])


def assert_almost_equal(
    a: Array,
    b: Array,
    rtol: float | None = None,
    atol: float | None = None,
    names: Sequence[str] = ("a", "b"),
    equal_nan: bool = False,
    use_broadcast: bool = True,
    mismatches: tuple[int, int] = (10, 10),
) -> None:
    """Raise AssertionError unless :func:`almost_equal` holds; the message shows the largest difference.

    >>> from weftplan import nd
    >>> assert_almost_equal(nd.ones((2,)), 1)
    >>> assert_almost_equal(1.0, 1.1)
    Traceback (most recent call last):
    AssertionError: a and b differ (rtol 1e-05, atol 1e-20), most at (): 1.0 and 1.1, 9090.91 times the tolerance
    """
    lhs, right = host(a), host(b)
    if not use_broadcast and lhs.shape != right.shape:
        raise AssertionError(f"{names[0]} has shape {lhs.shape}, {names[1]} {right.shape}")
    if almost_equal(lhs, right, rtol, atol, equal_nan):
        return
    lhs, right = np.broadcast_arrays(lhs, right)
    position, times = find_max_violation(lhs, right, rtol, atol)
    wrong = np.argwhere(~np.isclose(lhs, right, get_rtol(rtol), get_atol(atol), equal_nan))
    shown = [f"{tuple(map(int, at))}: {lhs[tuple(at)]} and {right[tuple(at)]}" for at in wrong[: mismatches[1]]]
    more = f"\n{len(wrong)} of {lhs.size} elements:\n" + "\n".join(shown) if lhs.ndim else ""
    raise AssertionError(
        f"{names[0]} and {names[1]} differ (rtol {get_rtol(rtol)}, atol {get_atol(atol)}), most at {position}: "
        f"{lhs[position]} and {right[position]}, {times:.6g} times the tolerance{more}"
    )


def assert_almost_equal_ignore_nan(
    a: Array, b: Array, rtol: float | None = None, atol: float | None = None, names: Sequence[str] = ("a", "b")
) -> None:
    """Call :func:`assert_almost_equal` for the elements that are not NaN in either array."""
    assert_almost_equal(*_without_nan(a, b), rtol, atol, names)


def assert_almost_equal_with_err(
    a: Array,
    b: Array,
    rtol: float | None = None,
    atol: float | None = None,
    etol: float | None = None,
    names: Sequence[str] = ("a", "b"),
    equal_nan: bool = False,
    mismatches: tuple[int, int] = (10, 10),
) -> None:
    """Call :func:`assert_almost_equal`, but allow a share ``etol`` of the elements to differ more."""
    left, right = np.broadcast_arrays(host(a), host(b))
    wrong = int((~np.isclose(left, right, get_rtol(rtol), get_atol(atol), equal_nan)).sum())
    if wrong > (etol or 0) * left.size:
        assert_almost_equal(left, right, rtol, atol, names, equal_nan, mismatches=mismatches)


def compare_ndarray_tuple(t1: Any, t2: Any, rtol: float | None = None, atol: float | None = None) -> None:
    """Call :func:`assert_almost_equal` for each pair of arrays in nested tuples; skip None."""
    if t1 is None or t2 is None:
        return
    if not isinstance(t1, tuple):
        assert_almost_equal(t1, t2, rtol, atol)
        return
    for array, second in zip(t1, t2, strict=True):
        compare_ndarray_tuple(array, second, rtol, atol)
