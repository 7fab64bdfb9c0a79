"""Reading and writing parts of an array.

A key of integers, slices, ``...`` and None that selects contiguous bytes gives a view on the same chunk; other such
keys give a copy. A key with lists, NumPy arrays or NDArrays (integers, or booleans as masks) always gives a copy. As in
MXNet 1.9.1, a key that selects one element gives an array of shape ``(1,)``.

An NDArray of integers in a key is read when the operation runs, so nothing waits for it, and an index out of range is
reported at the next wait; a boolean NDArray must be waited for, because the shape of the result depends on it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from weftplan import device
from weftplan.errors import ParameterError, ShapeError
from weftplan.ndarray.arithmetic import scalar_as
from weftplan.ndarray.chunk import Chunk, push
from weftplan.ndarray.copying import copy_into, route

if TYPE_CHECKING:
    from weftplan.ndarray.array import NDArray

_NUMBERS = (bool, int, float, np.number, np.bool_)


def getitem(array: NDArray, key: Any) -> NDArray:
    """``array[key]``: a view where the bytes are contiguous, else a new array.

    Raises:
        IndexError: out of range, or too many indices.
        ParameterError: the key holds something that is no index.
    """
    cls = array.__class__
    if key.__class__ is int and array.shape:  # the commonest key: one row
        rows = array.shape[0]
        if not -rows <= key < rows:
            raise IndexError(f"index {key} is out of bounds for axis 0 with size {rows}")
        key %= rows
        row = array.slice_at(key, key + 1)
        return cls(array.chunk, array.shape[1:] or (1,), array.dtype, row.offset)
    parts, advanced = _parse(array, key)
    if not advanced:
        view = _basic(array, parts)
        shape = view.shape or (1,)
        if view.flags.c_contiguous:
            return cls(array.chunk, shape, array.dtype, _offset(array, view))
        out = cls(Chunk(array.context, view.size * array.dtype.itemsize, name="slice"), shape, array.dtype)
        push(partial(_assign, out.raw(), ..., view), (array.var,), (out.var,), array.context, name="slice")
        return out
    shape = _advanced_shape(array, parts)
    out = cls(Chunk(array.context, int(np.prod(shape)) * array.dtype.itemsize, name="gather"), shape, array.dtype)
    source, target = array.raw(), out.raw()
    indices, reads = _indices(array, parts)

    def gather() -> None:
        target[...] = source[indices()]

    push(gather, (array.var, *reads), (out.var,), array.context, name="gather")
    return out


def setitem(array: NDArray, key: Any, value: Any) -> None:
    """``array[key] = value``: one operation that writes the array; ``value`` is a number, an array or nested lists.

    Raises:
        IndexError, ParameterError: as :func:`getitem`.
        ShapeError: ``value`` does not broadcast to the selected shape.
    """
    parts, advanced = _parse(array, key)
    target = array.raw()
    reads: list[Any] = []
    if advanced:
        shape = _advanced_shape(array, parts)
        indices, reads = _indices(array, parts)
    else:
        target = _basic(array, parts)
        shape = target.shape
    operand: Any
    if isinstance(value, _NUMBERS):
        operand = scalar_as(array.dtype, value)
    elif isinstance(value, array.__class__):
        _check_fits(array, shape, value.shape)
        if not advanced and value.shape == array.shape == target.shape and target.flags.c_contiguous:
            copy_into(value, array)
            return
        value = value.as_in_context(array.context)
        operand = _trimmed(value.raw(), len(shape))
        reads.append(value.var)
    else:
        try:
            given = np.asarray(value)
            if given.dtype.kind not in "biuf":
                raise TypeError(f"expected numbers, got elements of dtype {given.dtype}")
            # A copy, because the caller may change the values before the operation runs.
            operand = np.array(given, dtype=array.dtype)
        except (TypeError, ValueError) as error:
            raise ParameterError(f"cannot assign {type(value).__name__} to an NDArray: {error}") from error
        _check_fits(array, shape, operand.shape)
        operand = _trimmed(operand, len(shape))
    if advanced:

        def scatter() -> None:
            target[indices()] = _on(target, operand)

        push(scatter, reads, (array.var,), array.context, name="scatter")
        return
    if array.context.device_type == "gpu" and isinstance(operand, np.ndarray):
        where, place = route_from_host(array)
        push(lambda: _assign(target, ..., _on(target, operand)), reads, (array.var,), place, prop=where, name="assign")
        return
    push(partial(_assign, target, ..., operand), reads, (array.var,), array.context, name="assign")


def route_from_host(array: NDArray) -> tuple[Any, Any]:
    """Queue and context of an operation that brings host values to ``array``."""
    from weftplan.device.context import cpu

    return route(cpu(), array.context)


def _assign(target: Any, key: Any, value: Any) -> None:
    with np.errstate(all="ignore"):
        target[key] = value


def _on(target: Any, value: Any) -> Any:
    """``value`` in the array module of ``target``."""
    if isinstance(value, np.ndarray) and not isinstance(target, np.ndarray):
        import cupy

        return cupy.asarray(value)
    return value


def _trimmed(value: Any, ndim: int) -> Any:
    """Without the leading dimensions of size 1 that exceed ``ndim``."""
    return value.reshape(value.shape[value.ndim - ndim :]) if value.ndim > ndim else value


def _check_fits(array: NDArray, shape: tuple[int, ...], given: tuple[int, ...]) -> None:
    extra = len(given) - len(shape)
    core = given[extra:] if extra > 0 and all(dim == 1 for dim in given[:extra]) else given
    try:
        fits = np.broadcast_shapes(shape, core) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(f"cannot assign values of shape {given} to a part of shape {shape} of an array {array.shape}")


def _parse(array: NDArray, key: Any) -> tuple[tuple[Any, ...], bool]:
    """The key as a tuple that NumPy understands, NDArrays of integers left in it; and whether it has arrays."""
    advanced = False
    parts: list[Any] = []
    for part in key if isinstance(key, tuple) else (key,):
        if part is None or part is Ellipsis or isinstance(part, slice):
            parts.append(part)
        elif isinstance(part, array.__class__):
            advanced = True
            parts.append(part.asnumpy() if part.dtype.kind == "b" else part)
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


def _host_index(array: NDArray, part: Any) -> np.ndarray[Any, Any]:
    """A list or array in a key as integers or booleans."""
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


def _basic(array: NDArray, parts: tuple[Any, ...]) -> Any:
    """The selected part of the raw array: touches no values."""
    if Ellipsis not in parts:
        parts = (*parts, Ellipsis)  # so that NumPy gives an array even for one element
    return array.raw()[parts]


def _offset(array: NDArray, view: Any) -> int:
    """Bytes from the start of the chunk to the start of ``view``."""
    if view.size == 0:
        return array.offset
    if isinstance(view, np.ndarray):
        begin = array.raw().__array_interface__["data"][0]
        return array.offset + int(view.__array_interface__["data"][0] - begin)
    return array.offset + int(view.data.ptr - array.raw().data.ptr)


def _advanced_shape(array: NDArray, parts: tuple[Any, ...]) -> tuple[int, ...]:
    """Shape of the selected part; raises IndexError for what can be known now."""
    known = tuple(np.zeros(part.shape, np.int64) if isinstance(part, array.__class__) else part for part in parts)
    shape = np.broadcast_to(np.int8(0), array.shape)[known].shape
    return tuple(shape) or (1,)


def _indices(array: NDArray, parts: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """(function that gives the key when the operation runs, vars that it reads)."""
    xp = device.get(array.context).xp
    moved = [part.as_in_context(array.context) if isinstance(part, array.__class__) else part for part in parts]
    reads = [part.var for part in moved if isinstance(part, array.__class__)]
    raws = [part.raw() if isinstance(part, array.__class__) else part for part in moved]
    live = [isinstance(part, array.__class__) for part in moved]

    def key() -> tuple[Any, ...]:
        with np.errstate(invalid="ignore"):  # NaN becomes a number that is out of range
            return tuple(
                raw.astype(np.int64) if late else xp.asarray(raw) if isinstance(raw, np.ndarray) else raw
                for raw, late in zip(raws, live, strict=True)
            )

    return key, reads
