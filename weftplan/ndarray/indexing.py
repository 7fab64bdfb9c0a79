"""Reading and writing parts of an array by integers, slices, masks and index arrays.

A key of integers, slices, ``...`` and None that selects contiguous bytes gives a view of the same chunk; other such
keys give a copy. A key with lists, NumPy arrays or NDArrays (integers, or booleans as masks) always gives a copy. As in
MXNet 1.9.1, a key that selects one element gives an array of shape ``(1,)``.

An integer NDArray in a key is read when the operation runs, so indexing does not wait for it, and an index out of range
is reported at the next wait. Indexing waits for a boolean NDArray, because the shape of the result depends on it. The
result of a comparison, of ``logical_and`` and of ``isnan`` is a mask, too, though its dtype is that of the operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from weftplan import device
from weftplan.device.context import Context, cpu
from weftplan.engine import FnProperty
from weftplan.errors import ParameterError, ShapeError
from weftplan.ndarray.arithmetic import MASK_MAKERS, NUMBERS, scalar_as
from weftplan.ndarray.base import Array, NDArrayBase, pending
from weftplan.ndarray.copying import copy_into, on_context, route
from weftplan.ndarray.pushing import KernelValue, computing, push, push_kernel
from weftplan.ndarray.small_calls import copy_inline
from weftplan.ops.core.floats import is_number
from weftplan.support.array_types import RawArray, Scalar


def getitem(array: Array, key: object) -> Array:
    """Return ``array[key]``: a view if the bytes are contiguous, else a new array.

    Raises:
        IndexError: an index is out of range, or there are too many indices.
        ParameterError: the key contains an object that is no index.
    """
    cls = array.__class__
    if key.__class__ is int and array.shape:  # the commonest key: one row
        rows = array.shape[0]
        if not -rows <= key < rows:
            raise IndexError(f"index {key} is out of bounds for axis 0 with size {rows}")
        key %= rows
        row = array.slice_at(key, key + 1)
        return cls(array.chunk, array.shape[1:] or (1,), array.np_dtype, row.offset)
    row_range = _rows(array, key)
    if row_range is not None:
        return array.slice_at(*row_range)
    parts, advanced = _parse(array, key)
    if not advanced:
        outline = _outline(array)
        key = _basic(parts)
        view = outline[key]
        shape = view.shape or (1,)
        if view.flags.c_contiguous:
            return cls(
                array.chunk,
                shape,
                array.np_dtype,
                array.offset + (_address(view) - _address(outline)) * bool(view.size),
            )
        out = _result(array, shape, "slice")
        push_kernel(partial(_slice, key), [array, out], (array.var,), (out.var,), array.context, name="slice")
        return out
    out = _result(array, _advanced_shape(array, parts), "gather")
    indices, moved = _indices(array, parts)

    def gather(source: RawArray, target: RawArray, *index_values: RawArray) -> None:
        target[...] = source[indices(index_values)]

    reads = (array.var, *(index.var for index in moved))
    push_kernel(gather, [array, out, *moved], reads, (out.var,), array.context, name="gather")
    return out


def _rows(array: NDArrayBase, key: object) -> tuple[int, int] | None:
    """Return the bounds of the consecutive rows that a slice selects, at least one; None for other keys."""
    if key.__class__ is slice and array.shape and (key.step is None or key.step.__class__ is int):
        begin, end, step = key.indices(array.shape[0])
        if step == 1 and begin < end:
            return begin, end
    return None


def _result(array: Array, shape: tuple[int, ...], name: str) -> Array:
    return pending(array.__class__, array.context, shape, array.np_dtype, name)


def setitem(array: NDArrayBase, key: object, value: object) -> None:
    """Push ``array[key] = value`` as one operation; ``value`` is a number, an array or nested lists.

    Raises:
        IndexError, ParameterError: as :func:`getitem`.
        ShapeError: ``value`` does not broadcast to the selected shape.
    """
    rows = _rows(array, key)
    parts, advanced = ((slice(*rows),), False) if rows is not None else _parse(array, key)
    indices: Callable[[Sequence[Any]], Any]
    moved: list[NDArrayBase] = []
    if advanced:
        shape = _advanced_shape(array, parts)
        indices, moved = _indices(array, parts)
    else:
        basic = _basic(parts)
        if rows is not None:
            shape, contiguous = (rows[1] - rows[0], *array.shape[1:]), True
        else:
            part = _outline(array)[basic]
            shape, contiguous = part.shape, part.flags.c_contiguous

        def indices(index_values: Sequence[RawArray]) -> Any:
            return basic

    ndim = len(shape)
    operand: Any
    reads = [index.var for index in moved]
    if isinstance(value, NUMBERS):
        operand = KernelValue(scalar_as(array.np_dtype, value))
    elif isinstance(value, array.__class__):
        _check_fits(array, shape, value.shape)
        if not advanced and contiguous and value.shape == array.shape == shape:
            copy_into(value, array)
            return
        operand = on_context(value, array.context)
        reads.append(operand.var)
    else:
        try:
            values = np.asarray(value)
            if not is_number(values.dtype):
                raise TypeError(f"expected numbers, got elements of dtype {values.dtype}")
            # A copy, because the caller may change the values before the operation runs.
            operand = KernelValue(np.array(values, dtype=array.np_dtype))
        except (TypeError, ValueError) as error:
            raise ParameterError(f"cannot assign {type(value).__name__} to an NDArray: {error}") from error
        _check_fits(array, shape, operand.ready.shape)

    if not advanced:
        no_overlap = operand.__class__ is KernelValue or operand.chunk is not array.chunk
        source = operand.ready if operand.__class__ is KernelValue else operand
        if no_overlap and len(getattr(source, "shape", ())) <= ndim and copy_inline(operand, array, basic):
            return

    def scatter(target: RawArray, source: RawArray | Scalar, *index_arrays: RawArray) -> None:
        _assign(target, indices(index_arrays), _trimmed(_on(target, source), ndim))

    if advanced or math.prod(shape) < array.size:
        reads.append(array.var)  # elements outside the key keep their values, so an earlier failure stays
    name = "scatter" if advanced else "assign"
    operands = [array, operand, *moved]
    if array.context.device_type == "gpu" and isinstance(operand, KernelValue) and not moved:
        queue, lane = route_from_host(array)
        fn = computing(scatter, operands)
        push(fn, reads, (array.var,), lane, prop=queue, name=name)
        return
    push_kernel(scatter, operands, reads, (array.var,), array.context, name=name)


def route_from_host(array: NDArrayBase) -> tuple[FnProperty, Context]:
    """Return queue and context of an operation that copies host values to ``array``."""
    return route(cpu(), array.context)


def _slice(key: Any, source: RawArray, target: RawArray) -> None:
    target[...] = source[key]


def _assign(target: RawArray, key: Any, value: RawArray | Scalar) -> None:
    with np.errstate(all="ignore"):
        target[key] = value


def _on(target: RawArray, value: RawArray | Scalar) -> RawArray | Scalar:
    """Convert ``value`` to the array module of ``target``."""
    if isinstance(value, np.ndarray) and not isinstance(target, np.ndarray):
        import cupy

        return cupy.asarray(value)
    return value


def _trimmed(value: Any, ndim: int) -> Any:
    """Drop leading dimensions of size 1 in excess of ``ndim``; return numbers unchanged."""
    extra = getattr(value, "ndim", 0) - ndim
    return value.reshape(value.shape[extra:]) if extra > 0 else value


def _check_fits(array: NDArrayBase, shape: tuple[int, ...], value_shape: tuple[int, ...]) -> None:
    extra = len(value_shape) - len(shape)
    core = value_shape[extra:] if extra > 0 and all(dim == 1 for dim in value_shape[:extra]) else value_shape
    try:
        fits = np.broadcast_shapes(shape, core) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(
            f"cannot assign values of shape {value_shape} to a part of shape {shape} of an array {array.shape}"
        )


def _parse(array: NDArrayBase, key: object) -> tuple[tuple[Any, ...], bool]:
    """Return the key as a tuple for NumPy, still with integer NDArrays, and whether it contains arrays."""
    advanced = False
    parts: list[Any] = []
    for part in key if isinstance(key, tuple) else (key,):
        if part is None or part is Ellipsis or isinstance(part, slice):
            parts.append(part)
        elif isinstance(part, array.__class__):
            advanced = True
            parts.append(part if (mask := _mask(part)) is None else mask)
        elif isinstance(part, bool | int | np.integer):
            parts.append(int(part))
        elif isinstance(part, list | tuple | range | np.ndarray):
            advanced = True
            parts.append(_host_index(array, part))
        else:
            raise ParameterError(
                f"{part!r} of type {type(part).__name__} is no index: use integers, slices, None, ..., lists or arrays"
            )
    return tuple(parts), advanced


def _mask(part: NDArrayBase) -> RawArray | None:
    """Return an array of booleans, or a result of a comparison, as a NumPy mask; None for positions."""
    if part.np_dtype.kind == "b":
        return part.asnumpy()
    if part.chunk.name not in MASK_MAKERS:
        return None
    values: RawArray = part.asnumpy()
    return values == 1 if np.isin(values, (0, 1)).all() else None  # None: positions were written over the mask


def _host_index(array: NDArrayBase, part: Sequence[object] | RawArray) -> RawArray:
    """Convert a list or array in a key to integers or booleans."""
    if not isinstance(part, np.ndarray | range) and any(isinstance(item, array.__class__) for item in part):
        part = [item.item() if isinstance(item, array.__class__) else item for item in part]
    index = np.asarray(part)
    if index.dtype.kind == "b":
        return index
    if index.dtype.kind not in "iuf" or (
        index.dtype.kind == "f" and index.size and not np.all(index == np.trunc(index))
    ):
        raise ParameterError(f"an index array must hold integers or booleans, got {index.dtype}: {part!r}")
    return index.astype(np.int64)


def _basic(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Append ``...`` to a key without arrays, so that NumPy returns an array even for one element."""
    return parts if Ellipsis in parts else (*parts, Ellipsis)


def _outline(array: NDArrayBase) -> RawArray:
    """Return a NumPy array with the shape and strides of ``array``, to compute the part that a key selects.

    Its values must not be read: it has no memory of its own, and the memory of ``array`` may not be allocated until the
    operation that writes it runs.
    """
    return np.lib.stride_tricks.as_strided(np.empty(1, array.np_dtype), array.shape, _strides(array))


def _strides(array: NDArrayBase) -> tuple[int, ...]:
    strides, step = [], array.np_dtype.itemsize
    for dim in reversed(array.shape):
        strides.append(step)
        step *= dim
    return tuple(reversed(strides))


def _address(view: RawArray) -> int:
    return int(view.__array_interface__["data"][0])


def _advanced_shape(array: NDArrayBase, parts: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the shape of the selected part; raise IndexError for errors that can be detected now."""
    selectors = tuple(np.zeros(part.shape, np.int64) if isinstance(part, array.__class__) else part for part in parts)
    shape = np.broadcast_to(np.int8(0), array.shape)[selectors].shape
    return tuple(shape) or (1,)


def _indices(array: NDArrayBase, parts: tuple[Any, ...]) -> tuple[Callable[[Sequence[Any]], Any], list[NDArrayBase]]:
    """Return (a function from raw arrays to the key, the arrays that it reads)."""
    xp = device.get(array.context).xp
    cls = array.__class__
    moved = [on_context(part, array.context) for part in parts if isinstance(part, cls)]
    selectors = [None if isinstance(part, cls) else part for part in parts]
    live = [isinstance(part, cls) for part in parts]

    def key(index_values: Sequence[RawArray]) -> tuple[Any, ...]:
        following = iter(index_values)
        with np.errstate(invalid="ignore"):  # NaN becomes a number that is out of range
            return tuple(
                next(following).astype(np.int64) if late else xp.asarray(part) if isinstance(part, np.ndarray) else part
                for part, late in zip(selectors, live, strict=True)
            )

    return key, moved
