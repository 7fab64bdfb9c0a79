"""Arithmetic and comparison of arrays and numbers, pushed straight to NumPy or CuPy functions.

The functions follow from the formulas of the registered operators (``broadcast_add``, ``broadcast_div``, …), called
without parsing and inference, which would cost more than the arithmetic on small arrays. As in MXNet 1.9.1: both arrays
must have the same dtype; a number is converted to the array's dtype first; integers divide towards zero; a remainder by
zero is 0; comparisons give 0 and 1 in the dtype of the operands; and a division by zero gives no warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from weftplan import device, engine
from weftplan.engine.var import Var
from weftplan.errors import DeviceError, DTypeError, ShapeError
from weftplan.ndarray.base import Array, pending
from weftplan.ndarray.copying import from_host
from weftplan.ndarray.errstate import quietly
from weftplan.ndarray.memory.chunk import Chunk
from weftplan.ndarray.memory.release import dead, sweep
from weftplan.ndarray.pushing import KernelValue, Operand, keep_failures, push_kernel, work
from weftplan.ndarray.small_calls import MAX_BYTES, SmallWork, run_inline, write_inline
from weftplan.ops.core import registry
from weftplan.ops.core.floats import is_float, is_number
from weftplan.support.array_types import ArrayModule, DType, Scalar
from weftplan.support.slots import ARRAY_CHUNK, MAKE_ROOM

Kernel = Callable[..., object]
"""``kernel(a, b, out)``."""


class Binary(NamedTuple):
    """An arithmetic operator of arrays and numbers.

    Attributes:
        name: its name in errors.
        arrays: the operator of two arrays, whose formula computes all results.
    """

    name: str
    arrays: str

    def operation(self, is_array: bool, swapped: bool) -> str:
        """Return the name of an operation, in reports: of two arrays, or with a number on the right or left."""
        with_number = () if is_array or self is FLOORDIV else registry.get(self.arrays).with_number
        return with_number[swapped] if with_number else self.arrays


ADD, SUB = Binary("add", "broadcast_add"), Binary("subtract", "broadcast_sub")
MUL, DIV = Binary("multiply", "broadcast_mul"), Binary("divide", "broadcast_div")
FLOORDIV = Binary("floor_divide", "floor_divide")
MOD, POW, MAX, MIN = (Binary(word, f"broadcast_{word}") for word in ("mod", "power", "maximum", "minimum"))
_COMPARISONS = ("equal", "not_equal", "lesser", "lesser_equal", "greater", "greater_equal", "logical_and", "logical_or",
          "logical_xor")  # fmt: skip
EQ, NE, LT, LE, GT, GE, AND, OR, XOR = (Binary(word, f"broadcast_{word}") for word in _COMPARISONS)
MASK_MAKERS = frozenset(form.format(word) for word in _COMPARISONS for form in ("broadcast_{}", "_{}_scalar")) | {
    "logical_not", "_contrib_isnan", "_contrib_isinf", "_contrib_isfinite"
}  # fmt: skip
"""Names of the operators whose results are masks; memory has the name of the operator that it was made for."""
NUMBERS = (int, float, bool, np.number, np.bool_)
_EXACT = 1 << 53
"""The bound below which integers convert to floats exactly."""
BOOL, _INT64 = np.dtype(bool), np.dtype(np.int64)
_MAX_CACHED = 1024
_small: dict[Any, SmallWork | None] = {}
"""Inline operations by (operator, whether both operands are arrays, whether they are swapped, their dtype, shape of the
result); None: the result is too large."""
_functions: dict[tuple[str, DType, DType, str], Kernel] = {}
"""(operator, dtype of operands, dtype of the result, array module) -> function of two operands and the output."""


def _function(op: Binary, dtype: DType, result: DType, xp: ArrayModule) -> Kernel:
    """Return the function of two operands, of which one may be a number, and the output."""
    key = op.name, dtype, result, xp.__name__
    function = _functions.get(key)
    if function is None:
        kernel: Any = None if op is FLOORDIV else registry.get(op.arrays).forward  # MXNet has no operator for //
        function = _functions[key] = xp.floor_divide if kernel is None else kernel.function(xp, [dtype] * 2, result)
    return function


def inplace(op: Binary, lhs: Array, rhs: Any) -> Array:
    """Push ``lhs op= rhs`` as one operation that writes ``lhs``; return ``lhs``.

    Raises:
        ShapeError: ``rhs`` does not broadcast to the shape of ``lhs``.
        DTypeError: the dtypes differ, ``rhs`` is neither an array nor a number, or ``lhs`` has booleans.
        DeviceError: the arrays are on different contexts.
    """
    chunk, dtype = lhs.chunk, lhs.np_dtype
    if dtype is BOOL:
        raise DTypeError(
            f"{op.name}: arithmetic of bool arrays gives int64, which an array of bool cannot hold: cast it"
        )
    reads: tuple[Any, ...] = ()
    rhs_class = rhs.__class__
    operand: Any
    if dtype.kind in "fV" and (rhs_class is float or (rhs_class is int and -_EXACT < rhs < _EXACT)):
        operand = KernelValue(rhs)
    else:
        converted = _operand(op, lhs, rhs)
        if isinstance(converted, lhs.__class__):
            if converted.shape != lhs.shape and _broadcast(op, lhs.shape, converted.shape) != lhs.shape:
                raise ShapeError(
                    f"{op.name}: shape {converted.shape} does not broadcast to {lhs.shape}, which is written in place"
                )
            operand = converted
            if converted.chunk is not chunk:
                reads = (converted.chunk.var,)
        else:
            operand = KernelValue(converted)
    if not write_inline(_function(op, dtype, dtype, np), (lhs, operand), (lhs,)):
        name = op.operation(operand.__class__ is not KernelValue, swapped=False)
        _push(op, name, (dtype, dtype), [lhs, operand, lhs], reads, chunk)
    return lhs


def binary(op: Binary, lhs: Array, rhs: Any, *, swapped: bool = False) -> Array:
    """Return ``lhs op rhs`` (``rhs op lhs`` if swapped) as a new array; raises as :func:`inplace` does."""
    shape, dtype, chunk = lhs.dims, lhs.np_dtype, lhs.chunk
    context = chunk.context
    rhs_class = rhs.__class__
    operand: Any
    if dtype.kind in "fV" and (rhs_class is float or (rhs_class is int and -_EXACT < rhs < _EXACT)):
        operand, array = KernelValue(float(rhs)), False
    elif rhs_class is lhs.__class__ and rhs.np_dtype is dtype and rhs.chunk.context is context and rhs.dims == shape:
        operand, array = rhs, True
    else:
        operand = _operand(op, lhs, rhs)
        array = operand.__class__ is lhs.__class__
        if not array:
            operand = KernelValue(operand)
        elif operand.shape != shape:
            shape = _broadcast(op, shape, operand.shape)
    if dtype is BOOL and op.name not in _COMPARISONS:
        dtype = _INT64
    reads: tuple[Any, ...] = (chunk.var,)
    if array and operand.chunk is not chunk:
        reads = (chunk.var, operand.chunk.var)
    operands = [operand, lhs] if swapped else [lhs, operand]
    form = op.name, array, swapped, lhs.np_dtype, shape
    small = _small[form] if form in _small else _small_work(op, form, dtype)
    if small is not None and context.device_type == "cpu":
        out = run_inline(small, operands, lhs.__class__, context, reads)
        if out is not None:
            return out
    name = op.operation(array, swapped)
    result_chunk = ARRAY_CHUNK.get()(
        context, math.prod(shape) * dtype.itemsize, delay_alloc=True, name=name, prompt=False
    )
    out = lhs.__class__(result_chunk, shape, dtype)
    _push(op, name, (lhs.np_dtype, dtype), [*operands, out], reads, result_chunk)
    return out


def _small_work(op: Binary, form: tuple[str, bool, bool, DType, tuple[int, ...]], dtype: DType) -> SmallWork | None:
    """Make the inline operation for a result of ``dtype``, or None if it is too large."""
    _, is_array, swapped, operands, shape = form
    nbytes = math.prod(shape) * dtype.itemsize
    small = None
    if 0 < 3 * nbytes <= MAX_BYTES:
        small = SmallWork(_function(op, operands, dtype, np), op.operation(is_array, swapped), shape, dtype, nbytes)
    if len(_small) >= _MAX_CACHED:
        _small.clear()
    _small[form] = small
    return small


def unary(name: str, array: Array) -> Array:
    """Apply ``xp.<name>`` to every element; return a new array."""
    context = array.context
    out = pending(array.__class__, context, array.shape, array.np_dtype, name)
    run = getattr(device.get(context).xp, name)
    push_kernel(run, [array, out], (array.var,), (out.var,), context, name=name)
    return out


def _push(
    op: Binary, name: str, dtypes: tuple[DType, DType], operands: list[Operand], reads: tuple[Var, ...], chunk: Chunk
) -> None:
    """Push a kernel for ``dtypes`` (operands, result) that writes ``chunk``; ``reads`` are distinct, not its var."""
    if dead.pending:
        sweep()
    context = chunk.context
    if (make_room := MAKE_ROOM.value) is not None:
        reads = (*reads, *make_room(context, operands))
    xp = np if context.device_type == "cpu" else device.get(context).xp
    kernel = _function(op, *dtypes, xp)
    fn: Callable[..., object] = work(context, partial(quietly, kernel) if xp is np else kernel, operands)
    if engine.get().has_failed and any(getattr(operand, "chunk", None) is chunk for operand in operands[:-1]):
        fn = keep_failures(fn, (chunk.var,))
    engine.get().push(fn, reads, (chunk.var,), context, name=name)


def _operand(op: Binary, lhs: Array, rhs: object) -> Array | float:
    """Convert ``rhs`` to an array that fits ``lhs``, or to a number of its dtype."""
    cls = lhs.__class__
    if isinstance(rhs, cls) and rhs.__class__ is not cls:
        rhs = cls(rhs.chunk, rhs.shape, rhs.np_dtype, rhs.offset)
    if rhs.__class__ is not cls:
        if isinstance(rhs, NUMBERS):
            return scalar_as(lhs.np_dtype, rhs)
        if not isinstance(rhs, np.ndarray):
            raise DTypeError(
                f"{op.name}: type {type(rhs).__name__} is not supported beside an NDArray; give an NDArray or a number"
            )
        if not is_number(rhs.dtype):
            raise DTypeError(
                f"{op.name}: a NumPy array of {rhs.dtype} is not supported beside an NDArray of {lhs.np_dtype}"
            )
        rhs = from_host(cls, rhs.astype(lhs.np_dtype), lhs.context)
    if rhs.np_dtype != lhs.np_dtype:
        raise DTypeError(f"{op.name}: dtypes {lhs.np_dtype} and {rhs.np_dtype} differ; cast one of them with astype")
    if rhs.chunk.context != lhs.chunk.context:
        raise DeviceError(
            f"{op.name}: operands are on {lhs.context} and {rhs.context}; copy one with as_in_context({lhs.context})"
        )
    return rhs


def scalar_as(dtype: DType, value: Scalar) -> float:
    """Convert ``value`` to a Python number of ``dtype``: truncated towards zero and wrapped around, as a C cast does.

    >>> scalar_as(np.dtype("int32"), 1.5), scalar_as(np.dtype("uint8"), 300), scalar_as(np.dtype("float32"), 1)
    (1, 44, 1.0)
    """
    if is_float(dtype):
        try:
            return float(value)
        except OverflowError as error:
            raise DTypeError(
                f"an integer of {int(value).bit_length()} bits is too large for an array of {dtype}"
            ) from error
    if dtype.kind == "b":
        return int(value)
    try:
        integer = int(value)
    except (ValueError, OverflowError) as error:  # not finite
        raise DTypeError(
            f"{value!r} cannot be used with an array of {dtype}; cast the array to a float dtype"
        ) from error
    bits = 8 * dtype.itemsize
    integer &= (1 << bits) - 1
    if dtype.kind == "i" and integer >> (bits - 1):
        integer -= 1 << bits
    return integer


def _broadcast(op: Binary, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise ShapeError(
            f"{op.name}: shapes {a} and {b} do not broadcast: from the right, dimensions must be equal or 1"
        ) from None
