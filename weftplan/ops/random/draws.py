"""Uniform and normal random tensors, which depend on the call's random key alone.

As in MXNet, the kernel checks the parameters when it runs, so a wait for the output raises the error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from weftplan.errors import ParameterError
from weftplan.ops.core.floats import is_float, is_half
from weftplan.ops.core.forms import context_kernel
from weftplan.ops.core.kernels import block_bytes, blocks
from weftplan.ops.core.params import p_dtype, p_float, p_optional, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, merge_dtype, zero_gradient
from weftplan.ops.core.schema import Kernel, Op, OpContext, Param, Params, TensorSpec
from weftplan.ops.creation.filling import FLOAT32, declared_shape, placed
from weftplan.support.array_types import DType, RawArray


def _float_dtype(value: object) -> DType:
    dtype = p_optional(p_dtype)(value)
    if dtype is not None and not is_float(dtype):
        raise ValueError("expected float16, bfloat16, float32, float64 or None")
    return FLOAT32 if dtype is None else dtype


def _drawn_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    return [], [merge_dtype(outs[0], params["dtype"], "output and the parameter dtype")]


def _scratch(dtype: DType) -> list[DType]:
    """Return the scratch dtypes: half-precision numbers are drawn in float32, because generators cannot draw them."""
    return [FLOAT32] if is_half(dtype) else []


def _check_uniform(params: Params) -> None:
    low, high = params["low"], params["high"]
    if not low <= high:
        raise ParameterError(f"_random_uniform: expected low <= high, got low={low} and high={high}")


def _check_normal(params: Params) -> None:
    if not params["scale"] >= 0:
        raise ParameterError(
            f"_random_normal: scale is the standard deviation, expected at least 0, got {params['scale']}"
        )


def _drawing(method: str, shift: str, scale: Callable[[Params], float], check: Callable[[Params], None]) -> Kernel:
    """Return a kernel that draws ``generator.<method>() * scale(params) + params[shift]``, after ``check(params)``."""

    @context_kernel
    def compute(ctx: OpContext, p: Params, out: RawArray) -> None:
        check(p)
        if out.size == 0:
            return
        xp = ctx.xp
        draw = getattr(ctx.generator(), method)
        for target, *converted in blocks(ctx, (out,), _scratch(out.dtype)):
            drawn = converted[0] if converted else target
            draw(drawn.shape, dtype=drawn.dtype, out=drawn)
            xp.multiply(drawn, scale(p), out=drawn)
            xp.add(drawn, p[shift], out=drawn)
            if converted:
                xp.copyto(target, drawn, casting="unsafe")

    return compute


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    shape, dtype = outputs[0]
    return block_bytes(math.prod(shape), _scratch(dtype))


def _random(name: str, kernel: Kernel, params: tuple[Param, ...], aliases: tuple[str, ...], doc: str) -> None:
    register(
        Op(
            name=name,
            forward=kernel,
            infer_shape=declared_shape,
            infer_dtype=_drawn_dtype,
            params=(
                *params,
                Param("shape", p_optional(p_shape), None, "shape; None: as the users of the output need"),
                *placed(Param("dtype", _float_dtype, FLOAT32, "dtype; None: float32")),
            ),
            inputs=(),
            gradient=zero_gradient,
            workspace=_workspace,
            random=True,
            aliases=aliases,
            doc=doc,
        )
    )


_random(
    "_random_uniform",
    _drawing("random", "low", lambda params: params["high"] - params["low"], _check_uniform),
    (Param("low", p_float, 0.0, "least value"), Param("high", p_float, 1.0, "end, not included")),
    ("random_uniform", "uniform"),
    "Uniform random numbers in [low, high).",
)
_random(
    "_random_normal",
    _drawing("standard_normal", "loc", lambda params: params["scale"], _check_normal),
    (Param("loc", p_float, 0.0, "mean"), Param("scale", p_float, 1.0, "standard deviation")),
    ("random_normal", "normal"),
    "Normal random numbers with mean loc and standard deviation scale.",
)
