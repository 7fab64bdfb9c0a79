"""Dense arrays with the storage type ``row_sparse``, for scripts that ask for that type.

Push, pull, optimizers and operators treat such an array as the dense array that it is; results are dense. Its indices
are those of the rows that are not all zero, computed on first use. Other sparse arrays, and mathematics on stored rows
only, are absent on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import NotImplementedForSymbol, ParameterError, ShapeError
from weftplan.ndarray import creation
from weftplan.ndarray.array import NDArray, fresh, from_host
from weftplan.ndarray.base import check_context, check_dtype
from weftplan.support import slots
from weftplan.support.array_types import Dims, DTypeLike, RawArray

__all__ = ["BaseSparseNDArray", "RowSparseNDArray", "array", "empty", "row_sparse_array", "zeros"]


class BaseSparseNDArray(NDArray):
    """A base class of arrays whose storage type is not ``default``."""

    __slots__ = ()


class RowSparseNDArray(BaseSparseNDArray):
    """A dense array whose ``stype`` is ``row_sparse``; results of arithmetic with it are dense."""

    __slots__ = ()
    __hash__ = NDArray.__hash__

    @property
    def stype(self) -> str:
        """``"row_sparse"``."""
        return "row_sparse"

    @property
    def indices(self) -> NDArray:
        """Numbers of the rows that are not all zero, int64; waits for the values."""
        return from_host(self._rows(), self.context)

    @property
    def data(self) -> NDArray:
        """The rows that are not all zero; waits for the values."""
        return from_host(self.asnumpy()[self._rows()], self.context)

    def _rows(self) -> RawArray:
        values = self.asnumpy().reshape(self.shape[0], -1)
        return np.flatnonzero((values != 0).any(axis=1)).astype(np.int64)

    def tostype(self, stype: str) -> NDArray:
        """Return this array, or for ``"default"`` a dense array over the same memory."""
        return self if stype == self.stype else NDArray.tostype(self.detach(), stype)

    def copyto(self, other: NDArray | Context, *, priority: int = 0) -> NDArray:
        """Copy as :meth:`NDArray.copyto`; a copy on a context is also ``row_sparse``."""
        if isinstance(other, Context):
            return super().copyto(as_row_sparse(fresh(other, self.shape, self.np_dtype, "copy")), priority=priority)
        return super().copyto(other, priority=priority)


def _dense(name: str) -> Callable[..., object]:
    def operate(self: RowSparseNDArray, *operands: object) -> object:
        dense = self.tostype("default")
        result = getattr(dense, name)(
            *(operand.tostype("default") if isinstance(operand, RowSparseNDArray) else operand for operand in operands)
        )
        return self if result is dense else result

    operate.__name__ = name
    return operate


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OTHER = ("neg", "pos", "abs", "eq", "ne", "lt", "le", "gt", "ge")
for _name in (*(way + one for one in _BINARY for way in ("", "r", "i")), *_OTHER):
    if hasattr(NDArray, f"__{_name}__"):
        setattr(RowSparseNDArray, f"__{_name}__", _dense(f"__{_name}__"))


def as_row_sparse(array: NDArray) -> RowSparseNDArray:
    """Return an array over the memory of ``array`` with the storage type ``row_sparse``."""
    if not array.shape:
        raise ShapeError("a row_sparse array has at least one dimension, this one has none")
    return RowSparseNDArray(array.chunk, array.shape, array.np_dtype, array.offset)


slots.ARRAY_AS_ROW_SPARSE.fill(as_row_sparse)


def row_sparse_array(
    arg1: object, shape: Sequence[int] | None = None, ctx: Context | None = None, dtype: DTypeLike | None = None
) -> RowSparseNDArray:
    """Make a ``row_sparse`` array from ``(rows, their numbers)``, or from a dense array.

    Raises:
        ShapeError: rows and numbers do not fit each other, or ``shape``.
    """
    target_dtype = None if dtype is None else check_dtype(dtype)
    if not isinstance(arg1, tuple) or all(isinstance(dim, (int, np.integer)) for dim in arg1):
        values = np.zeros(arg1) if isinstance(arg1, tuple) else _host(arg1)
        if shape is not None and tuple(shape) != values.shape:
            raise ShapeError(f"row_sparse_array: values have shape {values.shape}, wanted was {tuple(shape)}")
    else:
        rows, numbers = _host(arg1[0]), _host(arg1[1]).astype(np.int64).reshape(-1)
        if len(rows) != len(numbers):
            raise ShapeError(f"row_sparse_array: {len(rows)} rows for {len(numbers)} numbers of rows")
        dense = (int(numbers.max(initial=-1)) + 1, *rows.shape[1:]) if shape is None else tuple(shape)
        if (numbers.size and not 0 <= numbers.min() <= numbers.max() < dense[0]) or dense[1:] != rows.shape[1:]:
            raise ShapeError(
                f"row_sparse_array: rows {rows.shape} with numbers up to {numbers.max(initial=-1)} for {dense}"
            )
        values = np.zeros(dense, rows.dtype)
        values[numbers] = rows
    default_dtype = values.dtype if isinstance(arg1, (NDArray, np.ndarray)) else np.dtype(np.float32)
    return as_row_sparse(from_host(values.astype(target_dtype or default_dtype), check_context(ctx)))


def _host(value: object) -> RawArray:
    return value.asnumpy() if isinstance(value, NDArray) else np.asarray(value)


def zeros(stype: str, shape: Dims, ctx: Context | None = None, dtype: DTypeLike | None = None) -> NDArray:
    """Return zeros with a storage type, ``default`` or ``row_sparse``."""
    return creation.zeros(shape, ctx, dtype).tostype(stype)


empty = zeros


def cast_storage(data: NDArray, stype: str, out: NDArray | None = None, name: str | None = None) -> NDArray:
    """Return a copy with another storage type.

    Args:
        data: the array.
        stype: ``default`` or ``row_sparse``.
        out: array that takes the values instead.
        name: ignored.
    """
    if out is not None:
        return data.copyto(out)
    return data.tostype("default").copy().tostype(stype)


def array(source_array: object, ctx: Context | None = None, dtype: DTypeLike | None = None) -> RowSparseNDArray:
    """Return a copy of a ``row_sparse`` array."""
    if not isinstance(source_array, RowSparseNDArray):
        raise ParameterError(f"mx.nd.sparse.array copies row_sparse arrays, got {type(source_array).__name__}")
    return row_sparse_array(source_array.tostype("default"), ctx=ctx, dtype=dtype)


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in ("csr_matrix", "CSRNDArray"):
        raise NotImplementedForSymbol(
            f"mx.nd.sparse.{name} is absent on purpose: every array is dense; use mx.nd.array"
        )
    raise AttributeError(f"mx.nd.sparse.{name} is absent on purpose: every array is dense; use the operators of mx.nd")
