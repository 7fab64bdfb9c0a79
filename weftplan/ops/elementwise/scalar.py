"""Operators of a tensor and a number: ``x + 2``, ``1 / x``, ``x > 0``, …

The number is converted to the tensor's dtype first, so integers stay integers: ``int32 array + 1.5`` adds 1, as in
MXNet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from weftplan.ops.core.floats import is_float
from weftplan.ops.core.forms import Call, ChosenKernel, kernel
from weftplan.ops.core.kernels import (
    BOOL,
    COMPARISONS,
    BlockKernel,
    Kind,
    block_bytes,
    block_workspace,
    blocks,
    divide_integers,
)
from weftplan.ops.core.params import p_bool, p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import UNARY_INPLACE, backward, floats_only, grad, same_dtype, same_shape, zero_gradient
from weftplan.ops.core.schema import (
    Arrays,
    DType,
    DTypeRule,
    GradientRule,
    InplacePair,
    Kernel,
    Op,
    Param,
    Params,
    TensorSpec,
    Workspace,
    WorkspaceRule,
)
from weftplan.ops.elementwise.integer_gradients import Integers, apply_slope, slope_scratch
from weftplan.support.array_types import ArrayModule, RawArray

SCALAR = (
    Param("scalar", p_float, 1.0, "the number"),
    Param("is_int", p_bool, True, "accepted for MXNet's sake; the tensor's dtype alone decides"),
)

Derivative = Callable[..., None]
"""``derivative(xp, scalar, ograd, x_or_y, out, *scratch)`` computes a block's gradient; ``out`` may be either input."""


def converted(value: float, dtype: DType) -> Any:
    """Return ``value`` as a number of ``dtype``: unchanged for floats, else truncated and wrapped like a C cast.

    >>> int(converted(2.9, np.dtype("int32"))), int(converted(-1.0, np.dtype("uint8")))
    (2, 255)
    """
    if is_float(dtype):
        return value
    return np.array(int(value) if math.isfinite(value) else 0, np.int64).astype(dtype)[()]


class _ScalarKernel:
    """The kernel of ``ufunc(x, scalar)``, or of ``ufunc(scalar, x)`` if ``reverse``.

    ``as_float``: integers are computed as float64 and truncated. Like
    :class:`~weftplan.ops.core.kernels.UfuncKernel`, it can be prepared for repeated calls.
    """

    __slots__ = ("as_float", "reverse", "ufunc")
    elementwise = True

    def __init__(self, ufunc: str, *, reverse: bool = False, as_float: bool = False) -> None:
        self.ufunc = ufunc
        self.reverse = reverse
        self.as_float = as_float

    def __call__(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        out = outputs[0]
        x, value = inputs[0], params["scalar"]
        function = getattr(ctx.xp, self.ufunc)
        if is_float(out.dtype):
            function(value, x, out=out) if self.reverse else function(x, value, out=out)
            return
        value = converted(value, out.dtype)
        pair = (value, x) if self.reverse else (x, value)
        if self.as_float:
            function(*pair, out=out, dtype=float, casting="unsafe")
        else:
            function(*pair, out=out, casting="unsafe")

    def prepare(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return a call of the bare ufunc; for integers or unequal dtypes, of the whole kernel."""
        out, xp = outputs[0], ctx.xp
        if not is_float(out.dtype) or inputs[0].dtype != out.dtype:
            return ctx.repeated(partial(self, ctx, params, inputs, outputs))
        value: Any = np.asarray(params["scalar"], dtype=out.dtype)
        if xp is not np:  # an array would belong to the device and stream that are current now
            value = value[()]
        pair = (value, inputs[0]) if self.reverse else (inputs[0], value)
        return partial(getattr(xp, self.ufunc), *pair, out=out)


class _DivisionKernel(_ScalarKernel):
    """The kernel of ``x / scalar`` or ``scalar / x``; integer quotients are exact and rounded towards zero, as in C."""

    __slots__ = ()

    def __init__(self, *, reverse: bool = False) -> None:
        super().__init__("divide", reverse=reverse)

    def __call__(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        out = outputs[0]
        if out.dtype.kind not in "iu":
            super().__call__(ctx, params, inputs, outputs)
            return
        value = converted(params["scalar"], out.dtype)
        for x, y, scratch in blocks(ctx, (inputs[0], out), (out.dtype,)):
            pair: tuple[Any, Any] = (value, x) if self.reverse else (x, value)
            divide_integers(ctx.xp, *pair, y, scratch)


def _division_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, dtype = outputs[0]
    return block_bytes(math.prod(shape), [dtype]) if dtype.kind in "iu" else 0


_any_power = _ScalarKernel("power", as_float=True)


@kernel
def _square(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
    xp.multiply(data, data, out=out)


def _square_or_power(params: Params) -> tuple[Kernel, Params]:
    """Return the kernel for the exponent: for 2, the most common one, a product, which is twenty times cheaper."""
    return _square if params["scalar"] == 2.0 else _any_power, params


@kernel
def _mod(xp: ArrayModule, p: Params, data: RawArray, out: RawArray) -> None:
    value = converted(p["scalar"], out.dtype)
    if value == 0:
        out.fill(0)
    else:
        xp.remainder(data, value, out=out)


def _rmod_step(xp: ArrayModule, params: Params, x: RawArray, out: RawArray, zero: RawArray) -> None:
    xp.equal(x, 0, out=zero)
    xp.remainder(converted(params["scalar"], out.dtype), x, out=out)
    xp.copyto(out, 0, where=zero)


_rmod = BlockKernel(_rmod_step, lambda params, dtype: [BOOL])


def _backward_kernel(derivative: Derivative, scratch: tuple[Kind, ...], integers: Integers) -> BlockKernel:
    def on_slopes(xp: ArrayModule, params: Params, g: RawArray, x: RawArray, out: RawArray, *room: RawArray) -> None:
        value = params["scalar"] if is_float(out.dtype) else float(converted(params["scalar"], out.dtype))
        apply_slope(xp, partial(derivative, xp, value), g, (x,), out, room, integers)

    return BlockKernel(on_slopes, lambda params, dtype: slope_scratch(scratch, dtype, 1, integers))


@kernel
def _backward_mod(xp: ArrayModule, p: Params, ograd: RawArray, out: RawArray) -> None:
    """Copy the output gradient; the gradient of integers is 0, as for every remainder of integers."""
    if not is_float(out.dtype):
        out.fill(0)
    elif out is not ograd:
        xp.copyto(out, ograd)


def _scalar_op(
    name: str,
    alias: str,
    forward: Kernel,
    doc: str,
    *,
    derivative: Derivative | None = None,
    uses: str = "x0",
    scratch: tuple[Kind, ...] = (),
    integers: Integers = "slope",
    gradient: GradientRule | None = None,
    forward_scratch: tuple[Kind, ...] = (),
    workspace: WorkspaceRule | None = None,
    infer_dtype: DTypeRule = same_dtype,
    params: tuple[Param, ...] = SCALAR,
) -> None:
    if derivative is not None:
        gradient = grad(f"_backward_{name.lstrip('_')}", "g0", uses)
        kernel = _backward_kernel(derivative, scratch, integers)
        backward(
            name,
            kernel,
            ("ograd", "data" if uses == "x0" else "output"),
            params=params,
            inplace=(InplacePair(0, 0), InplacePair(1, 0)),
            workspace=kernel.workspace,
        )
    register(
        Op(
            name=name,
            forward=forward,
            infer_shape=same_shape,
            infer_dtype=infer_dtype,
            params=params,
            gradient=gradient,
            inplace=UNARY_INPLACE,
            workspace=block_workspace(*forward_scratch) if forward_scratch else workspace,
            aliases=(alias,) if alias else (),
            doc=doc,
        )
    )


# ---------------------------------------------------------------------- gradients: (xp, scalar, ograd, x or y, out, t…)


def _rdiv(xp: ArrayModule, s: float, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.multiply(x, x, out=t)
    xp.divide(-s, t, out=t)
    xp.multiply(t, g, out=out)


def _power(xp: ArrayModule, s: float, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    if s == 2.0:
        xp.multiply(x, s, out=t)
    else:
        xp.power(x, s - 1.0, out=t)
        xp.multiply(t, s, out=t)
    xp.multiply(t, g, out=out)


def _rpower(xp: ArrayModule, s: float, g: RawArray, y: RawArray, out: RawArray) -> None:
    xp.multiply(g, y, out=out)
    xp.multiply(out, math.log(s) if s > 0 else (-math.inf if s == 0 else math.nan), out=out)


def _rmod_gradient(xp: ArrayModule, s: float, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.divide(s, x, out=t)
    xp.floor(t, out=t)
    xp.negative(t, out=t)
    xp.multiply(t, g, out=out)


def _hypot(xp: ArrayModule, s: float, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.hypot(x, s, out=t)
    xp.divide(x, t, out=t)
    xp.multiply(t, g, out=out)


def _masked(compare: str) -> Derivative:
    def derivative(xp: ArrayModule, s: float, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
        getattr(xp, compare)(x, s, out=t)
        xp.multiply(g, t, out=out)

    return derivative


def _smooth_l1_step(xp: ArrayModule, params: Params, x: RawArray, out: RawArray, t: RawArray, near: RawArray) -> None:
    square = params["scalar"] ** 2
    xp.absolute(x, out=t)
    xp.multiply(t, square, out=out)
    xp.less(out, 1.0, out=near)
    xp.multiply(out, t, out=out)
    xp.multiply(out, 0.5, out=out)
    xp.subtract(t, 0.5 / square, out=t)
    xp.logical_not(near, out=near)
    xp.copyto(out, t, where=near)


_smooth_l1_forward = BlockKernel(_smooth_l1_step, lambda params, dtype: [dtype, BOOL])


def _smooth_l1(xp: ArrayModule, s: float, g: RawArray, x: RawArray, out: RawArray, t: RawArray) -> None:
    xp.multiply(x, s * s, out=t)
    xp.clip(t, -1.0, 1.0, out=t)
    xp.multiply(t, g, out=out)


# -------------------------------------------------------------------------------------------------------- the operators

_V: tuple[Kind, ...] = (None,)
_COPY = grad("_copy", "g0", params={})

_scalar_op("_plus_scalar", "_PlusScalar", _ScalarKernel("add"), "data + scalar.", gradient=_COPY)
_scalar_op("_minus_scalar", "_MinusScalar", _ScalarKernel("subtract"), "data - scalar.", gradient=_COPY)
_scalar_op(
    "_rminus_scalar",
    "_RMinusScalar",
    _ScalarKernel("subtract", reverse=True),
    "scalar - data.",
    gradient=grad("negative", "g0", params={}),
)
_scalar_op("_mul_scalar", "_MulScalar", _ScalarKernel("multiply"), "data * scalar.", gradient=grad("_mul_scalar", "g0"))
_scalar_op(
    "_div_scalar",
    "_DivScalar",
    _DivisionKernel(),
    "data / scalar; integers drop the fraction.",
    gradient=grad("_div_scalar", "g0"),
    workspace=_division_workspace,
)
_scalar_op(
    "_rdiv_scalar",
    "_RDivScalar",
    _DivisionKernel(reverse=True),
    "scalar / data; integers drop the fraction.",
    derivative=_rdiv,
    scratch=_V,
    workspace=_division_workspace,
)
_scalar_op(
    "_mod_scalar",
    "_ModScalar",
    _mod,
    "Remainder of data / scalar with the scalar's sign.",
    gradient=grad("_backward_mod_scalar", "g0"),
)
backward("_mod_scalar", _backward_mod, ("ograd",), params=SCALAR, inplace=UNARY_INPLACE)
_scalar_op(
    "_rmod_scalar",
    "_RModScalar",
    _rmod,
    "Remainder of scalar / data with the sign of data, 0 where data is 0.",
    derivative=_rmod_gradient,
    scratch=_V,
    integers="zero",
    forward_scratch=(BOOL,),
)
_scalar_op(
    "_power_scalar",
    "_PowerScalar",
    ChosenKernel(_square_or_power),
    "data to the power of scalar.",
    derivative=_power,
    scratch=_V,
)
_scalar_op(
    "_rpower_scalar",
    "_RPowerScalar",
    _ScalarKernel("power", reverse=True, as_float=True),
    "scalar to the power of data.",
    derivative=_rpower,
    uses="y0",
)
_scalar_op(
    "_maximum_scalar",
    "_MaximumScalar",
    _ScalarKernel("maximum"),
    "The greater of data and scalar.",
    derivative=_masked("greater_equal"),
    scratch=(BOOL,),
    integers="whole",
)
_scalar_op(
    "_minimum_scalar",
    "_MinimumScalar",
    _ScalarKernel("minimum"),
    "The smaller of data and scalar.",
    derivative=_masked("less_equal"),
    scratch=(BOOL,),
    integers="whole",
)
_scalar_op(
    "_hypot_scalar",
    "_HypotScalar",
    _ScalarKernel("hypot", as_float=True),
    "sqrt(data² + scalar²).",
    derivative=_hypot,
    scratch=_V,
)
_scalar_op(
    "smooth_l1",
    "",
    _smooth_l1_forward,
    "0.5 (scalar·x)² where |x| < 1/scalar², else |x| - 0.5/scalar².",
    derivative=_smooth_l1,
    scratch=_V,
    forward_scratch=(None, BOOL),
    infer_dtype=floats_only("smooth_l1"),
    params=SCALAR[:1],
)
for _short, _ufunc, _what in COMPARISONS:
    _scalar_op(
        f"_{_short}_scalar",
        f"_{_short.title().replace('_', '')}Scalar",
        _ScalarKernel(_ufunc),
        f"1 where {_what.format('data', 'scalar')}, else 0, in the dtype of data.",
        gradient=zero_gradient,
    )
