"""IdentityAttachKLSparseReg: the identity, whose gradient draws the mean activation of each unit towards a target.

The gradient is that of an added loss: ``penalty`` times the Kullback-Leibler divergence between the target and the
moving average of the activations. Activations must lie in (0, 1), as a sigmoid's do. Output 1 is the moving average
after the batch, so the backward pass does not read the auxiliary state. Intended difference from MXNet 1.9.1: the
training forward pass updates the moving average (MXNet: the backward pass), as in BatchNorm.
"""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import context_kernel, kernel
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.params import p_float
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, floats_only, merge_dtype, merge_shape, take_bytes
from weftplan.ops.core.schema import (
    DType,
    EntryRef,
    GradientBuilder,
    InplacePair,
    Op,
    OpContext,
    Param,
    Params,
    Shape,
    SpecLike,
    TensorSpec,
)
from weftplan.support.array_types import ArrayModule, RawArray

_NAME = "IdentityAttachKLSparseReg"
_PARAMS = (
    Param("sparseness_target", p_float, 0.1, "The mean activation that each unit should have."),
    Param("penalty", p_float, 0.001, "Weight of the added loss."),
    Param("momentum", p_float, 0.9, "Share of the old value in the new moving average."),
)


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = merge_shape(ins[0], outs[0], f"{_NAME}: data and output")
    units: Shape | None = merge_shape(ins[1], outs[1], f"{_NAME}: moving_avg and average")
    if data is not None:
        if len(data) != 2:
            raise ShapeError(f"{_NAME}: data must be (samples, units), got {data}; flatten it first")
        units = merge_shape((data[1],), units, f"{_NAME}: units of data {data} and moving_avg")
    return [data, units], [data, units]


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(ins[0], outs[0], f"{_NAME}: data and output")
    average: DType | None = None if data is None else accumulator(data)
    for dtype in (ins[1], outs[1]):
        average = merge_dtype(average, dtype, f"{_NAME}: moving_avg (float32 for float16 data)")
    return [data, average], [data, average]


@context_kernel
def _forward(
    ctx: OpContext, p: Params, data: RawArray, moving: RawArray, out: RawArray | None, average: RawArray | None
) -> None:
    xp = ctx.xp
    mean = ctx.take(moving.shape, moving.dtype)
    if ctx.is_train and not ctx.recompute:
        xp.mean(data, axis=0, dtype=moving.dtype, out=mean)
        xp.multiply(moving, p["momentum"], out=moving)
        xp.multiply(mean, 1.0 - p["momentum"], out=mean)
        xp.add(moving, mean, out=moving)
    if average is not None:
        average[...] = moving
    if out is not None and out is not data:
        out[...] = data


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return take_bytes((inputs[1].shape, inputs[1].dtype))


def _scratch(p: Params, ograd: SpecLike, average: SpecLike, grad: SpecLike) -> list[tuple[Shape, DType]]:
    return [(average.shape, average.dtype)] * 2


@kernel(scratch=_scratch)
def _backward(
    xp: ArrayModule, p: Params, ograd: RawArray, average: RawArray, grad: RawArray, slope: RawArray, other: RawArray
) -> None:
    """Compute ``grad`` = ograd + penalty · (-target / average + (1 - target) / (1 - average))."""
    xp.divide(-p["sparseness_target"], average, out=slope)
    xp.subtract(1.0, average, out=other)
    xp.divide(1.0 - p["sparseness_target"], other, out=other)
    xp.add(slope, other, out=slope)
    xp.multiply(slope, p["penalty"], out=slope)
    xp.add(ograd, slope.astype(grad.dtype, copy=False), out=grad)


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    return [*builder.node(f"_backward_{_NAME}", [builder.ograd(), builder.output(1)]), None]


register(
    Op(
        name=_NAME,
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=floats_only(_NAME, _infer_dtype),
        params=_PARAMS,
        inputs=("data", "moving_avg"),
        positions=("data",),
        aux=(1,),
        outputs=("output", "average"),
        visible_outputs=1,
        gradient=_gradient,
        needs_training=lambda params: True,
        inplace=(InplacePair(0, 0),),
        workspace=_workspace,
        input_init={1: '["zero", {}]'},
        doc="data (samples, units), unchanged; its gradient draws the mean activation of each unit, which lies in "
        "(0, 1), towards sparseness_target.",
    )
)
backward(
    _NAME,
    _backward,
    ("ograd", "average"),
    params=_PARAMS,
    inplace=(InplacePair(0, 0),),
)
