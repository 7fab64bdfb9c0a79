"""Array creation and functions without an operator: ``nd.array``, ``nd.zeros``, ``nd.arange``, …"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from weftplan import device, engine
from weftplan.device.context import Context
from weftplan.errors import DTypeError, KeywordError, ParameterError, ShapeError, did_you_mean
from weftplan.ndarray import arithmetic
from weftplan.ndarray.array import NDArray, fresh, from_host
from weftplan.ndarray.base import check_context, check_dtype
from weftplan.ndarray.calls.invoke import invoke
from weftplan.ndarray.memory.release import drain
from weftplan.ndarray.pushing import KernelValue, push_kernel
from weftplan.ndarray.small_calls import MAX_BYTES, SmallWork, run_inline
from weftplan.ops.core.floats import is_float, is_number
from weftplan.ops.core.params import from_text
from weftplan.support import slots
from weftplan.support.array_types import ArrayModule, Dims, DType, DTypeLike, RawArray, Scalar
from weftplan.support.keyword_errors import known_keywords
from weftplan.support.slots import ARRAY_CHUNK


@known_keywords()
def array(source_array: object, ctx: Context | None = None, dtype: DTypeLike | None = None) -> NDArray:
    """Return an array with a copy of ``source_array``: numbers, nested lists, NumPy arrays or NDArrays.

    Text of numbers and arrays of objects, such as columns of a file or of a table, are converted as NumPy does.

    ``dtype`` defaults to that of an NDArray, else to float32, also for NumPy arrays of other dtypes (as in MXNet
    1.9.1).

    Args:
        source_array: the values.
        ctx: the device of the result; None: the current context.
        dtype: dtype of the result; see above.

    Raises:
        DTypeError: ``source_array`` is no array of numbers, or the dtype is not supported.
    """
    context = check_context(ctx)
    if isinstance(source_array, NDArray):
        target_dtype = source_array.np_dtype if dtype is None else check_dtype(dtype)
        return source_array.copyto(fresh(context, source_array.shape, target_dtype, "array"))
    target_dtype = check_dtype(dtype)
    try:
        values = np.asarray(source_array)
        if not is_number(values.dtype) and values.dtype.kind not in "SUO":
            raise TypeError(f"elements of dtype {values.dtype}")
        if values.dtype.kind == "O" and any(value is None for value in values.flat):
            raise TypeError("None is no number")
        with np.errstate(all="ignore"):
            values = values.astype(target_dtype, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        raise DTypeError(
            f"array: expected numbers of one shape, got {type(source_array).__name__}: {error}; make numbers of "
            f"it first, such as np.asarray(values, dtype=float)"
        ) from None
    return from_host(values, context)


def empty(shape: Dims, ctx: Context | None = None, dtype: DTypeLike | None = None, stype: str | None = None) -> NDArray:
    """Return an array of undefined values, float32 by default.

    Args:
        shape: dimensions; a number is one dimension.
        ctx: the device of the result; None: the current context.
        dtype: dtype of the result; None: float32.
        stype: ``default``, or None.

    Raises:
        ShapeError: a dimension is negative or not an integer.
        ParameterError: ``stype`` is not ``"default"``: only dense arrays exist here.
    """
    if stype not in (None, "default"):
        raise ParameterError("empty: only dense arrays (stype='default') are supported")
    dims = check_shape(shape)
    target_dtype = check_dtype(dtype)
    context = check_context(ctx)
    return NDArray(ARRAY_CHUNK.get()(context, math.prod(dims) * target_dtype.itemsize), dims, target_dtype)


@known_keywords()
def full(
    shape: Dims, val: object, ctx: Context | None = None, dtype: DTypeLike | None = None, out: NDArray | None = None
) -> NDArray:
    """Return an array filled with a number, or with values that broadcast to ``shape``.

    Args:
        shape: dimensions; a number is one dimension.
        val: a number, or values that broadcast to ``shape``.
        ctx: the device of the result; None: the current context.
        dtype: dtype of the result; None: float32.
        out: array that takes the values, instead of a new one.

    Raises:
        DTypeError: a number that is not finite for an integer dtype.
        ParameterError, ShapeError: ``val`` holds no numbers, or does not fit.
    """
    val = from_text(val)
    if out is None:
        context, dims, kind = check_context(ctx), check_shape(shape), check_dtype(dtype)
        if isinstance(val, arithmetic.NUMBERS) and context.device_type == "cpu":
            small = _small_fill(dims, kind)
            value = KernelValue(arithmetic.scalar_as(kind, val))
            filled = None if small is None else run_inline(small, [value], NDArray, context, ())
            if filled is not None:
                return filled
        target = fresh(context, dims, kind, None)
    else:
        target = out
    if not isinstance(val, arithmetic.NUMBERS):
        target[:] = val
        return target
    value = KernelValue(arithmetic.scalar_as(target.np_dtype, val))
    push_kernel(_fill, [target, value], (), (target.var,), target.context, name="full")
    return target


def _fill(target: RawArray, value: Scalar) -> None:
    target.fill(value)


@lru_cache(1024)
def _small_fill(shape: tuple[int, ...], dtype: DType) -> SmallWork | None:
    nbytes = math.prod(shape) * dtype.itemsize
    return (
        SmallWork(lambda value, out: out.fill(value), "full", shape, dtype, nbytes) if 0 < nbytes <= MAX_BYTES else None
    )


def zeros(
    shape: Dims, ctx: Context | None = None, dtype: DTypeLike | None = None, stype: str | None = None, **kwargs: Any
) -> NDArray:
    """Return an array of zeros.

    Args:
        shape: dimensions; a number is one dimension.
        ctx: the device of the result; None: the current context.
        dtype: dtype of the result; None: float32.
        stype: ``default`` or ``row_sparse``.
        **kwargs: ``out``: array that takes the result.
    """
    return full(shape, 0, ctx, dtype, _only_out("zeros", kwargs)).tostype(stype or "default")


def ones(shape: Dims, ctx: Context | None = None, dtype: DTypeLike | None = None, **kwargs: Any) -> NDArray:
    """Return an array filled with 1.

    Args:
        shape: dimensions; a number is one dimension.
        ctx: the device of the result; None: the current context.
        dtype: dtype of the result; None: float32.
        **kwargs: ``out``: array that takes the result.
    """
    return full(shape, 1, ctx, dtype, _only_out("ones", kwargs))


def zeros_like(data: NDArray, out: NDArray | None = None, name: str | None = None) -> NDArray:
    """Return zeros with the shape, dtype and context of ``data``.

    Args:
        data: the array that it is like.
        out: array that takes the result.
        name: ignored.
    """
    return full(data.shape, 0, data.context, data.np_dtype, out)


def ones_like(data: NDArray, out: NDArray | None = None, name: str | None = None) -> NDArray:
    """Return an array filled with 1, with the shape, dtype and context of ``data``.

    Args:
        data: the array that it is like.
        out: array that takes the result.
        name: ignored.
    """
    return full(data.shape, 1, data.context, data.np_dtype, out)


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1.0,
    repeat: int = 1,
    infer_range: bool | None = None,
    ctx: Context | None = None,
    dtype: DTypeLike | None = None,
) -> NDArray:
    """Return numbers from ``start`` (0 if only one bound is given) to below ``stop``, each ``repeat`` times.

    For an integer ``dtype``, ``start`` and ``step`` are truncated after the length has been computed, as in MXNet.

    Args:
        start: first number; the bound, if ``stop`` is None.
        stop: end, which is excluded.
        step: difference of neighbours.
        repeat: how often each number is repeated.
        infer_range: None or False, since the length is always known here; accepted for MXNet's sake.
        ctx: the device of the result; None: the current context.
        dtype: dtype of the result; None: float32.

    Raises:
        ParameterError: ``step`` is 0, ``repeat`` below 1, or ``infer_range`` is set.
    """
    start, stop, step, repeat = map(from_text, (start, stop, step, repeat))
    if infer_range:
        raise ParameterError("arange: infer_range belongs to symbols, whose length others may decide: give stop")
    if stop is None:
        start, stop = 0, start
    if step == 0 or repeat < 1:
        raise ParameterError(f"arange: step must not be 0 and repeat at least 1, got step={step}, repeat={repeat}")
    target_dtype = check_dtype(dtype)
    values = np.arange(start, stop, step, dtype=np.float64)
    if not is_float(target_dtype):
        values = (np.arange(len(values)) * math.trunc(step) + math.trunc(start)).astype(target_dtype)
    return array(np.repeat(values, repeat), ctx, target_dtype)


def linspace(
    start: float,
    stop: float,
    num: int,
    endpoint: bool = True,
    ctx: Context | None = None,
    dtype: DTypeLike | None = None,
) -> NDArray:
    """Return ``num`` evenly spaced numbers from ``start`` to ``stop``.

    Args:
        start: first number.
        stop: last number.
        num: how many numbers.
        endpoint: whether ``stop`` belongs to them.
        ctx: the device of the result; None: the current context.
        dtype: dtype of the result; None: float32.
    """
    start, stop, num = map(from_text, (start, stop, num))
    return array(np.linspace(start, stop, num, endpoint=endpoint), ctx, check_dtype(dtype))


def eye(N: int, M: int = 0, k: int = 0, ctx: Context | None = None, dtype: DTypeLike | None = None) -> NDArray:
    """Return an ``N`` by ``M`` (0: ``N``) matrix with 1 on diagonal ``k`` and 0 elsewhere.

    Args:
        N: rows.
        M: columns; 0: N.
        k: offset of the diagonal; above the main diagonal if positive.
        ctx: the device of the result; None: the current context.
        dtype: dtype of the result; None: float32.
    """
    N, M, k = map(from_text, (N, M, k))
    return array(np.eye(N, M or N, k), ctx, check_dtype(dtype))


def concatenate(arrays: Sequence[NDArray], axis: int = 0, always_copy: bool = True) -> NDArray:
    """Concatenate arrays along ``axis``; with ``always_copy=False`` a single array is returned itself.

    Args:
        arrays: arrays of one dtype.
        axis: axis along which they are joined.
        always_copy: copy a single array.

    Raises:
        ShapeError: shapes that differ in another axis.
        DTypeError: dtypes that differ, or nothing to join.
    """
    if isinstance(arrays, NDArray) or not arrays:
        raise DTypeError("concatenate needs a list of at least one array")
    _check_arrays("concatenate", arrays)
    head = arrays[0]
    if len(arrays) == 1 and not always_copy:
        return head
    axis = _axis(axis, head.ndim, "concatenate")
    for array in arrays:
        outer_shape = array.shape[:axis] + array.shape[axis + 1 :]
        if array.ndim != head.ndim or outer_shape != head.shape[:axis] + head.shape[axis + 1 :]:
            raise ShapeError(f"concatenate: shapes {head.shape} and {array.shape} differ outside axis {axis}")
        if array.np_dtype != head.np_dtype:
            raise DTypeError(f"concatenate: dtypes {head.np_dtype} and {array.np_dtype} differ; use astype")
    shape = list(head.shape)
    shape[axis] = sum(array.shape[axis] for array in arrays)
    parts = [array.as_in_context(head.context) for array in arrays]
    context = head.context
    out = fresh(context, tuple(shape), head.np_dtype, "concatenate")
    join = partial(_join, device.get(context).xp, axis)
    push_kernel(join, [out, *parts], [part.var for part in parts], (out.var,), context, name="concatenate")
    return out


def _join(xp: ArrayModule, axis: int, target: RawArray, *parts: RawArray) -> None:
    xp.concatenate(parts, axis=axis, out=target)


def stack(*arrays: Any, axis: int = 0, **kwargs: object) -> NDArray:
    """Stack arrays of equal shape along a new axis.

    Args:
        *arrays: arrays of one shape and dtype, or one list of them.
        axis: position of the new axis.
        **kwargs: ``out``: array that takes the result.

    Raises:
        ShapeError: shapes that differ.
    """
    parts = list(arrays[0]) if len(arrays) == 1 and isinstance(arrays[0], list | tuple) else list(arrays)
    _check_arrays("stack", parts)
    if any(part.shape != parts[0].shape for part in parts):
        raise ShapeError(f"stack: shapes must be equal, got {', '.join(str(part.shape) for part in parts)}")
    axis = _axis(from_text(axis), parts[0].ndim + 1, "stack")
    shape = (*parts[0].shape[:axis], 1, *parts[0].shape[axis:])
    return concatenate([part.reshape(shape) if part.shape else part.detach().reshape((1,)) for part in parts], axis)


def _check_arrays(name: str, arrays: Sequence[object]) -> None:
    for position, entry in enumerate(arrays):
        if not isinstance(entry, NDArray):
            raise DTypeError(f"{name}: number {position} must be an NDArray, got {type(entry).__name__}")
    if not arrays:
        raise DTypeError(f"{name} needs at least one array")


def reset_arrays(*data: NDArray, num_arrays: int, out: object = None) -> list[NDArray]:
    """Set all elements of ``num_arrays`` arrays to zero.

    Return an empty list, because MXNet's operator has no outputs.

    Args:
        *data: the arrays.
        num_arrays: their number.
        out: ignored.

    Raises:
        ParameterError: the number of arrays is not ``num_arrays``. Nothing is changed then.
    """
    _check_arrays("reset_arrays", data)
    if len(data) != num_arrays:
        raise ParameterError(f"reset_arrays: got {len(data)} arrays, expected num_arrays={num_arrays}")
    for array in data:
        array[:] = 0
    return []


def split_v2(
    ary: NDArray, indices_or_sections: int | Sequence[int], axis: int = 0, squeeze_axis: bool = False
) -> NDArray | list[NDArray]:
    """Split ``ary`` along ``axis`` into a number of equal sections, or at the given indices.

    A single section is returned as an array, several as a list; ``squeeze_axis`` drops the axis of sections of size 1.

    Args:
        ary: array to split.
        indices_or_sections: number of equal sections, or the indices at which sections begin.
        axis: axis to split.
        squeeze_axis: drop the axis, if each section has length 1.

    Raises:
        ParameterError: ``indices_or_sections`` is neither a number nor a list or tuple of indices.
        ShapeError: the sections are not equal, or the indices do not increase within the axis.
    """
    params: dict[str, Any] = {"axis": axis, "squeeze_axis": squeeze_axis}
    if isinstance(indices_or_sections, int | np.integer):
        params.update(indices=(), sections=int(indices_or_sections))
    elif isinstance(indices_or_sections, list | tuple):
        params.update(indices=(0, *indices_or_sections))
    else:
        raise ParameterError(
            f"split_v2: expected the number of sections or a tuple of places, got {type(indices_or_sections).__name__}"
        )
    results = invoke("_split_v2", [ary], params)
    return results[0] if len(results) == 1 else results


slots.ARRAY_SPLIT.fill(split_v2)


def histogram(a: NDArray, bins: int | NDArray = 10, range: Sequence[float] | None = None) -> list[NDArray]:
    """Return [counts, edges] of a histogram; ``bins`` is a number of equal bins over ``range``, or the edges.

    The default range is from the smallest to the largest number; the call waits for the numbers then.

    Args:
        a: numbers of any shape.
        bins: number of bins of equal width, or an array of the edges.
        range: (lowest, highest) edge.

    >>> counts, edges = histogram(array([0, 1, 1, 4]), bins=2)
    >>> counts.asnumpy().tolist(), edges.asnumpy().tolist()
    ([3, 1], [0.0, 2.0, 4.0])
    """
    if isinstance(bins, NDArray):
        return invoke("_histogram", [a, bins], {})
    if range is None:
        range = float(a.min().asscalar()), float(a.max().asscalar())
    return invoke("_histogram", [a], {"bin_cnt": bins, "range": tuple(range)})


def moveaxis(tensor: NDArray, source: int | Sequence[int], destination: int | Sequence[int]) -> NDArray:
    """Return a copy with axes moved to new positions; the other axes keep their order.

    Args:
        tensor: array of any shape.
        source: axis or axes to move.
        destination: their positions in the result.
    """
    order = np.moveaxis(np.empty((1,) * tensor.ndim), source, destination)  # checks the arguments
    del order
    sources = [source] if isinstance(source, int) else list(source)
    destinations = [destination] if isinstance(destination, int) else list(destination)
    axes = [axis for axis in range(tensor.ndim) if axis not in [s % tensor.ndim for s in sources]]
    for to, axis in sorted(zip([d % tensor.ndim for d in destinations], sources, strict=True)):
        axes.insert(to, axis % tensor.ndim)
    return tensor.transpose(axes)


def _operator_function(op: arithmetic.Binary, scalar: Callable[[Any, Any], Any]) -> Any:
    def function(lhs: object, rhs: object) -> Any:
        if isinstance(lhs, NDArray):
            return arithmetic.binary(op, lhs, rhs)
        if isinstance(rhs, NDArray):
            return arithmetic.binary(op, rhs, lhs, swapped=True)
        if isinstance(lhs, numbers.Number) and isinstance(rhs, numbers.Number):
            return scalar(lhs, rhs)
        raise DTypeError(
            f"{op.name}: expected NDArrays or numbers, got {type(lhs).__name__} and {type(rhs).__name__}; make arrays "
            f"with mx.nd.array"
        )

    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = f"``{op.name}`` of two operands, element by element, with broadcasting; of two numbers a number."
    return function


def _truth(compare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], int]:
    """Wrap a function to return 1 or 0, as array comparisons do, instead of a boolean."""
    return lambda lhs, rhs: int(bool(compare(lhs, rhs)))


add = _operator_function(arithmetic.ADD, operator.add)
subtract = _operator_function(arithmetic.SUB, operator.sub)
multiply = _operator_function(arithmetic.MUL, operator.mul)
divide = _operator_function(arithmetic.DIV, operator.truediv)
true_divide = divide
modulo = _operator_function(arithmetic.MOD, operator.mod)
_power = _operator_function(arithmetic.POW, operator.pow)


def power(base: NDArray | Scalar, exp: NDArray | Scalar) -> Any:
    """Return ``base`` to the power of ``exp``, elementwise with broadcasting; for two numbers, a number."""
    return _power(base, exp)


maximum = _operator_function(arithmetic.MAX, max)
minimum = _operator_function(arithmetic.MIN, min)
equal = _operator_function(arithmetic.EQ, _truth(operator.eq))
not_equal = _operator_function(arithmetic.NE, _truth(operator.ne))
greater = _operator_function(arithmetic.GT, _truth(operator.gt))
greater_equal = _operator_function(arithmetic.GE, _truth(operator.ge))
lesser = _operator_function(arithmetic.LT, _truth(operator.lt))
lesser_equal = _operator_function(arithmetic.LE, _truth(operator.le))
logical_and = _operator_function(arithmetic.AND, _truth(lambda lhs, rhs: lhs and rhs))
logical_or = _operator_function(arithmetic.OR, _truth(lambda lhs, rhs: lhs or rhs))
logical_xor = _operator_function(arithmetic.XOR, _truth(lambda lhs, rhs: bool(lhs) != bool(rhs)))


def waitall() -> None:
    """Block until all operations pushed so far have run; raise their errors that were not reported yet."""
    drain()
    engine.get().wait_for_all()
    drain()  # chunks that died meanwhile


def check_shape(shape: Dims) -> tuple[int, ...]:
    """Return ``shape`` (an integer or a sequence) as a tuple of ints >= 0; raise ShapeError otherwise."""
    if isinstance(shape, str):
        shape = from_text(shape)
    dims = (shape,) if isinstance(shape, int | np.integer) else shape
    try:
        checked = tuple(int(dim) if isinstance(dim, int | np.integer) else _refuse(dim) for dim in dims)
    except TypeError as error:
        raise ShapeError(f"a shape is an integer or a sequence of integers, got {shape!r}") from error
    if any(dim < 0 for dim in checked):
        raise ShapeError(f"a shape has no negative dimensions, got {shape!r}")
    return checked


def _refuse(dim: object) -> int:
    raise TypeError(f"{dim!r} is no dimension")


def _axis(axis: int, ndim: int, name: str) -> int:
    if not -ndim <= axis < ndim:
        raise ShapeError(f"{name}: axis {axis} is out of range for {ndim} dimensions")
    return axis % ndim


_KEYWORDS = ("shape", "ctx", "dtype", "out")


def _only_out(name: str, kwargs: dict[str, Any]) -> NDArray | None:
    """Return ``out`` from keyword arguments (``stype="default"`` is also accepted)."""
    out: NDArray | None = kwargs.pop("out", None)
    if kwargs.pop("stype", "default") not in (None, "default"):
        raise ParameterError(f"{name}: only dense arrays (stype='default') are supported")
    kwargs.pop("name", None)
    if kwargs:
        unknown = next(iter(kwargs))
        hint = did_you_mean(unknown, _KEYWORDS)
        raise KeywordError(f"{name} has no argument {unknown!r}: {hint}known: {', '.join(_KEYWORDS)}")
    return out


def onehot_encode(indices: NDArray, out: NDArray) -> NDArray:
    """Write rows into ``out`` that are 1 at ``indices`` and 0 elsewhere; newer scripts say ``one_hot``."""
    return invoke("one_hot", [indices], {"depth": out.shape[-1], "dtype": out.np_dtype}, out)[0]
