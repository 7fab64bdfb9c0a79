"""Arithmetic and comparison of arrays and numbers, pushed straight to NumPy or CuPy functions.

The results equal those of the registered operators (``elemwise_add``, ``_plus_scalar``, ``broadcast_add``, …) without
parsing and inference, which would cost more than the arithmetic on small arrays. As in MXNet 1.9.1: both arrays must
have the same dtype; a number is converted to the array's dtype first; integers divide towards zero; a remainder by zero
is 0; comparisons give 0 and 1 in the dtype of the operands; and a division by zero gives no warning.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from weftplan import device, engine
from weftplan.engine.var import Var
from weftplan.errors import DeviceError, DTypeError, ShapeError
from weftplan.ndarray.base import Array, pending
from weftplan.ndarray.copying import from_host
from weftplan.ndarray.errstate import quietly
from weftplan.ndarray.inline_calls import MOST_BYTES, SmallWork, run_inline, write_inline
from weftplan.ndarray.memory.chunk import Chunk
from weftplan.ndarray.memory.release import dead, sweep
from weftplan.ndarray.pushing import Operand, Value, keep_failures, push_kernel, work
from weftplan.ops.core.floats import is_float, is_number
from weftplan.support.array_types import ArrayModule, DType, RawArray, Scalar
from weftplan.support.slots import ARRAY_CHUNK, MAKE_ROOM

Kernel = Callable[..., object]
"""``kernel(a, b, out)``."""


@dataclass(frozen=True, slots=True)
class Binary:
    """An arithmetic operator: the array module's function, and special functions for integers or floats if needed.

    Attributes:
        arrays, scalar, swapped: the equivalent registered operators, which name the operations: for two arrays, for an
            array and a number, for a number and an array.
    """

    name: str
    ufunc: str
    arrays: str
    scalar: str
    swapped: str
    integer: Callable[[Any, Any, Any, Any], object] | None = None
    floating: Callable[[Any, Any, Any, Any], object] | None = None


def _int_divide(xp: ArrayModule, a: Scalar | RawArray, b: Scalar | RawArray, out: RawArray) -> None:
    """Divide towards zero, unlike ``//``; a division by 0 gives 0."""
    quotient = xp.floor_divide(a, b)
    negative = (xp.less(a, 0) != xp.less(b, 0)) & (quotient * b != a) & xp.not_equal(b, 0)
    out[...] = quotient + negative


def _int_power(xp: ArrayModule, a: Scalar | RawArray, b: Scalar | RawArray, out: RawArray) -> None:
    """Compute the power through float64, because the exponent may be negative; truncate towards zero."""
    out[...] = xp.power(xp.asarray(a, np.float64), b)


def _float_mod(xp: ArrayModule, a: Scalar | RawArray, b: Scalar | RawArray, out: RawArray) -> None:
    """Compute the remainder with the sign of ``b``; a remainder by 0 is 0, as for integers."""
    zero = xp.equal(b, 0)  # before the result, which may overwrite b
    xp.remainder(a, b, out=out)
    xp.copyto(out, 0, where=zero)


ADD = Binary("add", "add", "broadcast_add", "_plus_scalar", "_plus_scalar")
SUB = Binary("subtract", "subtract", "broadcast_sub", "_minus_scalar", "_rminus_scalar")
MUL = Binary("multiply", "multiply", "broadcast_mul", "_mul_scalar", "_mul_scalar")
DIV = Binary("divide", "true_divide", "broadcast_div", "_div_scalar", "_rdiv_scalar", _int_divide)
FLOORDIV = Binary("floor_divide", "floor_divide", "floor_divide", "floor_divide", "floor_divide")
MOD = Binary("mod", "remainder", "broadcast_mod", "_mod_scalar", "_rmod_scalar", floating=_float_mod)
POW = Binary("power", "power", "broadcast_power", "_power_scalar", "_rpower_scalar", _int_power)
MAX = Binary("maximum", "maximum", "broadcast_maximum", "_maximum_scalar", "_maximum_scalar")
MIN = Binary("minimum", "minimum", "broadcast_minimum", "_minimum_scalar", "_minimum_scalar")
EQ = Binary("equal", "equal", "broadcast_equal", "_equal_scalar", "_equal_scalar")
NE = Binary("not_equal", "not_equal", "broadcast_not_equal", "_not_equal_scalar", "_not_equal_scalar")
LT = Binary("lesser", "less", "broadcast_lesser", "_lesser_scalar", "_greater_scalar")
LE = Binary("lesser_equal", "less_equal", "broadcast_lesser_equal", "_lesser_equal_scalar", "_greater_equal_scalar")
GT = Binary("greater", "greater", "broadcast_greater", "_greater_scalar", "_lesser_scalar")
GE = Binary(
    "greater_equal", "greater_equal", "broadcast_greater_equal", "_greater_equal_scalar", "_lesser_equal_scalar"
)
AND = Binary("logical_and", "logical_and", "broadcast_logical_and", "_logical_and_scalar", "_logical_and_scalar")
OR = Binary("logical_or", "logical_or", "broadcast_logical_or", "_logical_or_scalar", "_logical_or_scalar")
XOR = Binary("logical_xor", "logical_xor", "broadcast_logical_xor", "_logical_xor_scalar", "_logical_xor_scalar")

_COMPARISONS = frozenset(op.name for op in (EQ, NE, LT, LE, GT, GE, AND, OR, XOR))
NUMBERS = (int, float, bool, np.number, np.bool_)
_EXACT = 1 << 53
"""The bound below which integers convert to floats exactly."""
_MOST_KEPT = 1024
_small: dict[Any, SmallWork | None] = {}
"""Inline operations by (operator, name, dtype kind of operands, shape and dtype of the result); None: the result is
too large."""
_kernels: dict[tuple[str, str, str], Kernel] = {}
"""(operator, dtype kind, "numpy" or another module) -> function of two operands and the output."""


def kernel_for(op: Binary, kind: str, xp: ArrayModule) -> Kernel:
    """Return the function for operands of a dtype kind on an array module."""
    kernel = _kernels.get((op.name, kind, xp.__name__))
    if kernel is None:
        kernel = _make_kernel(op, kind, xp)
        _kernels[op.name, kind, xp.__name__] = kernel
    return kernel


def _make_kernel(op: Binary, kind: str, xp: ArrayModule) -> Kernel:
    run = _bare(op, kind, xp)
    if xp is not np:
        return partial(_named, run)
    return partial(quietly, _named, run)


def _bare(op: Binary, kind: str, xp: ArrayModule) -> Kernel:
    """Return the array module's function, or a function of this file."""
    special = op.floating if kind == "f" else op.integer
    return getattr(xp, op.ufunc) if special is None else partial(special, xp)


def _named(run: Callable[..., object], a: object, b: object, out: object) -> None:
    run(a, b, out=out)  # not every NumPy function accepts it as the third argument


def inplace(op: Binary, lhs: Array, rhs: Any) -> Array:
    """Push ``lhs op= rhs`` as one operation that writes ``lhs``; return ``lhs``.

    Raises:
        ShapeError: ``rhs`` does not broadcast to the shape of ``lhs``.
        DTypeError: the dtypes differ, or ``rhs`` is neither an array nor a number.
        DeviceError: the arrays are on different contexts.
    """
    chunk = lhs.chunk
    kind = lhs.np_dtype.kind
    if kind == "V":  # bfloat16
        kind = "f"
    reads: tuple[Any, ...] = ()
    rhs_class = rhs.__class__
    operand: Any
    if kind == "f" and (rhs_class is float or (rhs_class is int and -_EXACT < rhs < _EXACT)):
        operand = Value(rhs)
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
            operand = Value(converted)
    if not write_inline(_bare(op, kind, np), (lhs, operand), (lhs,)):
        _push(op, op.scalar if operand.__class__ is Value else op.arrays, kind, [lhs, operand, lhs], reads, chunk)
    return lhs


def binary(op: Binary, lhs: Array, rhs: Any, *, swapped: bool = False) -> Array:
    """Return ``lhs op rhs`` (``rhs op lhs`` if swapped) as a new array; raises as :func:`inplace` does."""
    shape, dtype, chunk = lhs.dims, lhs.np_dtype, lhs.chunk
    context = chunk.context
    kind = dtype.kind
    if kind == "V":  # bfloat16
        kind = "f"
    rhs_class = rhs.__class__
    operand: Any
    if kind == "f" and (rhs_class is float or (rhs_class is int and -_EXACT < rhs < _EXACT)):
        operand, array = Value(float(rhs)), False
    elif rhs_class is lhs.__class__ and rhs.np_dtype is dtype and rhs.chunk.context is context and rhs.dims == shape:
        operand, array = rhs, True
    else:
        operand = _operand(op, lhs, rhs)
        array = operand.__class__ is lhs.__class__
        if not array:
            operand = Value(operand)
        elif operand.shape != shape:
            shape = _broadcast(op, shape, operand.shape)
    if kind == "b" and op.name not in _COMPARISONS:
        dtype = np.dtype(np.int64)
    reads: tuple[Any, ...] = (chunk.var,)
    if array and operand.chunk is not chunk:
        reads = (chunk.var, operand.chunk.var)
    operands = [operand, lhs] if swapped else [lhs, operand]
    name = op.arrays if array else op.swapped if swapped else op.scalar
    form = op.name, name, kind, shape, dtype
    small = _small[form] if form in _small else _small_work(op, form)
    if small is not None and context.device_type == "cpu":
        out = run_inline(small, operands, lhs.__class__, context, reads)
        if out is not None:
            return out
    result_chunk = ARRAY_CHUNK.get()(
        context, math.prod(shape) * dtype.itemsize, delay_alloc=True, name=name, prompt=False
    )
    out = lhs.__class__(result_chunk, shape, dtype)
    _push(op, name, kind, [*operands, out], reads, result_chunk)
    return out


def _small_work(op: Binary, form: tuple[str, str, str, tuple[int, ...], DType]) -> SmallWork | None:
    """Make the inline operation for a result of this shape and dtype, or None if it is too large."""
    _, name, kind, shape, dtype = form
    nbytes = math.prod(shape) * dtype.itemsize
    small = None
    if 0 < 3 * nbytes <= MOST_BYTES:
        run = _bare(op, kind, np)
        small = SmallWork(partial(_named, run) if op in (MAX, MIN) else run, name, shape, dtype, nbytes)
    if len(_small) >= _MOST_KEPT:
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


def _push(op: Binary, name: str, kind: str, operands: list[Operand], reads: tuple[Var, ...], chunk: Chunk) -> None:
    """Push one kernel that writes ``chunk``; ``reads`` are distinct and exclude its var."""
    if dead.due:
        sweep()
    context = chunk.context
    if (make_room := MAKE_ROOM.value) is not None:
        reads = (*reads, *make_room(context, operands))
    xp = np if context.device_type == "cpu" else device.get(context).xp
    fn: Callable[..., object] = work(context, kernel_for(op, kind, xp), operands)
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
        whole = int(value)
    except (ValueError, OverflowError) as error:  # not finite
        raise DTypeError(
            f"{value!r} cannot be used with an array of {dtype}; cast the array to a float dtype"
        ) from error
    bits = 8 * dtype.itemsize
    whole &= (1 << bits) - 1
    if dtype.kind == "i" and whole >> (bits - 1):
        whole -= 1 << bits
    return whole


def _broadcast(op: Binary, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise ShapeError(
            f"{op.name}: shapes {a} and {b} do not broadcast: from the right, dimensions must be equal or 1"
        ) from None
