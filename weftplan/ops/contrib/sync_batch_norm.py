"""Batch norms whose output ``var`` is the variance: SyncBatchNorm, across devices, and that of MXNet's first releases.

The kernels and the gradient are BatchNorm's, whose output ``var`` is 1 / sqrt(variance + eps), as in MXNet 1.9.1.

An executor sees only its own part of a batch, so the statistics are exact only if one context trains. A Module refuses
to train SyncBatchNorm on several contexts; inference needs no batch statistics. MXNet sets ``mean`` and ``var`` of
SyncBatchNorm in training only, and BatchNorm_v1 takes two and four dimensions there, here any number from two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from weftplan.ops.core.implementations import Implementation, Specs, provide, provided
from weftplan.ops.core.params import p_int, p_str
from weftplan.ops.core.registry import get, register
from weftplan.ops.core.rules import DTypes, Shapes, merge_dtype, merge_shape, take_bytes
from weftplan.ops.core.schema import Arrays, EntryRef, GradientBuilder, Kernel, Op, OpContext, Param, Params

NAME = "_contrib_SyncBatchNorm"
_BASE = get("BatchNorm")
_SHARED = ("eps", "momentum", "fix_gamma", "use_global_stats", "output_mean_var")


def _of_base(params: Params) -> Params:
    """Return the parameters for BatchNorm, with axis 1 as the channels."""
    defaults = {param.name: param.default for param in _BASE.params}
    return {**defaults, **{name: params[name] for name in _SHARED}, "axis": 1}


Output = TypeVar("Output")


def _without_var(outputs: Sequence[Output]) -> list[Output]:
    """Return (output, mean, inverse), the outputs of BatchNorm, from (output, mean, var, inverse)."""
    return [*outputs[:2], *outputs[3:]]


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    vector = merge_shape(outs[2], outs[3], "Batch norm: the variance and 1 / sqrt(variance + eps)")
    new_ins, (data, mean, inverse) = _BASE.infer_shape(_of_base(params), ins, [*outs[:2], vector])
    return list(new_ins), [data, mean, inverse, inverse]


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    vector = merge_dtype(outs[2], outs[3], "Batch norm: the variance and 1 / sqrt(variance + eps)")
    new_ins, (data, mean, inverse) = _BASE.infer_dtype(_of_base(params), ins, [*outs[:2], vector])
    return list(new_ins), [data, mean, inverse, inverse]


def _kernel(base: Kernel) -> Kernel:
    """Return a kernel that runs ``base``, a kernel of BatchNorm, and computes the variance if the node needs it."""

    def forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        values = _of_base(params)
        var, inverse = outputs[2:]
        spare = ctx.take(inputs[3].shape, inputs[3].dtype)  # always taken: the workspace counts it
        if var is not None and inverse is None:
            inverse = spare
        base(ctx, values, inputs, [*outputs[:2], inverse])
        if var is not None:
            ctx.xp.multiply(inverse, inverse, out=var)
            ctx.xp.divide(1.0, var, out=var)
            ctx.xp.subtract(var, params["eps"], out=var)
            ctx.xp.maximum(var, 0.0, out=var)  # rounding can make a variance of 0 negative

    return forward


def _offered(base: Implementation) -> Implementation:
    """Return an implementation of BatchNorm adapted to this operator."""

    def workspace(params: Params, inputs: Specs, outputs: Specs) -> int:
        return take_bytes(outputs[3]) + base.workspace(_of_base(params), inputs, _without_var(outputs))

    return replace(
        base,
        kernel=_kernel(base.kernel),
        workspace=workspace,
        refusal=lambda params, ins, outs: base.refusal(_of_base(params), ins, _without_var(outs)),
        slower=lambda params, ins, outs: base.slower(_of_base(params), ins, _without_var(outs)),
    )


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    reads = [builder.ograd(), builder.input(0), builder.input(1), builder.output(1), builder.output(3)]
    return [*builder.node("_backward_BatchNorm", reads, _of_base(builder.params)), None, None]


assert _BASE.workspace is not None
_numpy = _offered(Implementation(name="numpy", kernel=_BASE.forward, workspace=_BASE.workspace))
_BATCH_NORM_V1 = register(
    Op(
        name="BatchNorm_v1",
        positions=("data", "gamma", "beta"),
        forward=_numpy.kernel,
        infer_shape=_infer_shape,
        infer_dtype=_infer_dtype,
        params=(
            *(param for param in _BASE.params if param.name in _SHARED[:-1]),
            Param("output_mean_var", _BASE.params[4].parse, False, "True: the mean and the variance are visible."),
        ),
        inputs=("data", "gamma", "beta", "moving_mean", "moving_var"),
        aux=_BASE.aux,
        outputs=("output", "mean", "var", "inverse"),
        visible_outputs=lambda params: 3 if params["output_mean_var"] else 1,
        gradient=_gradient,
        needs_training=lambda params: not params["use_global_stats"],
        inplace=_BASE.inplace,
        ignored_inputs=_BASE.ignored_inputs,
        workspace=_numpy.workspace,
        input_init=_BASE.input_init,
        doc="BatchNorm on axis 1, for networks that name this operator.",
    )
)
register(
    replace(
        _BATCH_NORM_V1,
        name=NAME,
        positions=None,
        params=(
            *_BATCH_NORM_V1.params,
            Param("ndev", p_int, 1, "Number of contexts that train together; more than 1: see a Module's refusal."),
            Param("key", p_str, doc="Which layers of several contexts belong together."),
        ),
        doc="BatchNorm on axis 1 with the statistics of the whole batch, where one context trains.",
    )
)
for _side in ("host", "gpu"):
    for _name in (NAME, _BATCH_NORM_V1.name):
        provide(_name, _offered(provided(_side)["BatchNorm"]), on=_side)
