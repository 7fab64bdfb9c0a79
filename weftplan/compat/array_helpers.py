"""Helpers of ``mx.test_utils`` for arrays and symbols. Any thread may call them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from weftplan import ndarray as nd
from weftplan.compat.array_comparisons import Host
from weftplan.ndarray import NDArray
from weftplan.support.array_types import DType, DTypeLike, RawArray
from weftplan.symbol import Symbol


def assign_each(the_input: Any, function: Callable[[Any], Any] | None) -> Host:
    """Return ``function`` of each element; without a function, a copy.

    >>> assign_each(np.array([1.0, 4.0]), lambda x: x + 1)
    array([2., 5.])
    """
    values = np.array(the_input)
    return values if function is None else np.vectorize(function, otypes=[values.dtype])(values)


def assign_each2(input1: Any, input2: Any, function: Callable[[Any, Any], Any] | None) -> Host:
    """Return ``function`` of each pair of elements; without a function, a copy of the first array."""
    values = np.array(input1)
    return values if function is None else np.vectorize(function, otypes=[values.dtype])(values, np.asarray(input2))


def create_2d_tensor(rows: int, columns: int, dtype: DTypeLike = np.int64) -> NDArray:
    """Return a matrix whose elements are their row's number."""
    return nd.array(np.repeat(np.arange(rows)[:, None], columns, axis=1), dtype=dtype)


def effective_dtype(dat: NDArray | RawArray) -> DType:
    """Return the dtype that determines the precision of an array's values: its own dtype."""
    return np.dtype(dat.dtype)


A = TypeVar("A", NDArray, np.ndarray)


def collapse_sum_like(a: A, shape: Sequence[int]) -> A:
    """Return the sum of ``a`` over the axes along which an array of ``shape`` was broadcast to it.

    >>> collapse_sum_like(np.ones((2, 3, 4)), (3, 1)).tolist()
    [[8.0], [8.0], [8.0]]
    """
    wanted = (1,) * (a.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, (have, want) in enumerate(zip(a.shape, wanted, strict=True)) if have != want == 1)
    return a.sum(axis=axes, keepdims=True).reshape(tuple(shape)) if axes or a.ndim != len(shape) else a


def same_symbol_structure(sym1: Symbol, sym2: Symbol) -> bool:
    """Return whether two symbols have the same operators in the same order with the same inputs, ignoring names."""

    def structure(symbol: Symbol) -> tuple[object, object]:
        graph = json.loads(symbol.tojson())
        return [(node["op"], node["inputs"]) for node in graph["nodes"]], graph["heads"]

    return structure(sym1) == structure(sym2)
