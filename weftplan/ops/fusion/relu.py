"""Operators of a layer fused with a relu, forward and backward, and of a convolution fused with a batch norm.

A relu may follow the batch norm of a fused convolution.

Only the planner adds nodes of these operators (``planner/symbolic/passes/fuse_relu.py``), after gradients exist. So the
operators have no gradient, and users cannot find them by name. Results have the bits of the unfused nodes. Compiled
implementations are registered under the operators' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from weftplan.ops.core import registry
from weftplan.ops.core.kernels import blocks
from weftplan.ops.core.rules import DTypes, Shapes
from weftplan.ops.core.schema import Arrays, Kernel, Op, OpContext, Params, TensorSpec
from weftplan.ops.elementwise.unary import relu_into
from weftplan.ops.nn import batch_norm, convolution  # noqa: F401 - they register what is joined here

_T = TypeVar("_T")
RELU = "+relu"
"""Suffix of a fused operator's name."""


def layer_of(name: str) -> str:
    """Return the name of the layer with which a fused operator begins; return any other operator's name unchanged.

    >>> layer_of("Convolution+BatchNorm+relu"), layer_of("Pooling")
    ('Convolution', 'Pooling')
    """
    return name.partition("+")[0]


def _with_relu(layer: Kernel) -> Kernel:
    def forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        layer(ctx, params, inputs, outputs)
        if outputs[0] is not None:
            for (block,) in blocks(ctx, [outputs[0]]):
                relu_into(ctx.xp, block, block)

    return forward


def _layer(name: str) -> Op:
    op = registry.get(name)
    return replace(op, name=name + RELU, forward=_with_relu(op.forward), gradient=None, aliases=())


def _backward_batch_norm() -> Op:
    op = registry.get("_backward_BatchNorm")
    return replace(
        op,
        name=op.name + RELU,
        forward=batch_norm.backward_behind_relu,
        inputs=("ograd", "data", "gamma", "beta", "mean", "var"),
        ignored_inputs=lambda params: (2,) if params["fix_gamma"] else (),
        workspace=batch_norm.workspace_behind_relu,
    )


def _split_inputs(inputs: Sequence[_T]) -> tuple[list[_T], list[_T]]:
    """Split the inputs of a fused node into (inputs of the convolution, inputs of the batch norm except its data)."""
    return [*inputs[:2], *inputs[6:]], list(inputs[2:6])


def norm_of(relu: str) -> Op:
    """Return the operator of a batch norm, or of a batch norm fused with a relu if ``relu`` is :data:`RELU`."""
    return LAYERS["BatchNorm"] if relu else registry.get("BatchNorm")


def _normalized(relu: str) -> Op:
    conv, norm, behind = registry.get("Convolution"), registry.get("BatchNorm"), norm_of(relu)

    def forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        conv_inputs, norm_inputs = _split_inputs(inputs)
        outputs = [ctx.memory_of(outputs, 0, inputs[0].dtype)]
        # Convolution and batch norm use the same scratch, one after the other.
        normalize = ctx.repeated(
            partial(behind.forward, ctx, params[batch_norm.NORM], [outputs[0], *norm_inputs], [outputs[0], None, None])
        )
        conv.forward(ctx, params, conv_inputs, outputs)
        normalize()

    def workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        conv_inputs, norm_inputs = _split_inputs(inputs)
        vectors = [norm_inputs[0], norm_inputs[0]]
        return max(
            conv.workspace_bytes(params, conv_inputs, outputs),
            behind.workspace_bytes(params[batch_norm.NORM], [outputs[0], *norm_inputs], [outputs[0], *vectors]),
        )

    def shapes(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        conv_inputs, norm_inputs = _split_inputs(ins)
        conv_ins, conv_outs = conv.infer_shape(params, conv_inputs, outs)
        vectors, results = norm.infer_shape(
            params[batch_norm.NORM], [conv_outs[0], *norm_inputs], [conv_outs[0], None, None]
        )
        return [*conv_ins[:2], *vectors[1:], *conv_ins[2:]], [results[0]]

    def dtypes(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
        conv_inputs, norm_inputs = _split_inputs(ins)
        conv_ins, conv_outs = conv.infer_dtype(params, conv_inputs, outs)
        vectors, results = norm.infer_dtype(
            params[batch_norm.NORM], [conv_outs[0], *norm_inputs], [conv_outs[0], None, None]
        )
        return [*conv_ins[:2], *vectors[1:], *conv_ins[2:]], [results[0]]

    def names(params: Params) -> tuple[str, ...]:
        conv_names = conv.input_names(params)
        return (*conv_names[:2], *norm.input_names(params[batch_norm.NORM])[1:], *conv_names[2:])

    return Op(
        name=f"{conv.name}+{norm.name}{relu}",
        forward=forward,
        infer_shape=shapes,
        infer_dtype=dtypes,
        params=conv.params,
        inputs=names,
        aux=(4, 5),
        ignored_inputs=lambda params: (2,) if params[batch_norm.NORM]["fix_gamma"] else (),
        workspace=workspace,
        needs_training=lambda params: not params[batch_norm.NORM]["use_global_stats"],
    )


LAYERS = {name: _layer(name) for name in ("BatchNorm", "Convolution")}
"""Operators of a layer fused with a relu, by the name of the layer's operator."""
NORMALIZED = {relu: _normalized(relu) for relu in ("", RELU)}
"""Operators of a convolution fused with a batch norm, by the suffix "" or :data:`RELU`. The inputs are the
convolution's data and weight, the batch norm's four vectors, and the convolution's bias if there is one."""
GRADIENTS = {"_backward_BatchNorm": _backward_batch_norm()}
"""Operators of the gradient of a layer and its relu, by the name of the layer's gradient. They do not read the relu's
output; their inputs are those of the layer's gradient, with beta after gamma."""
for _op in (*LAYERS.values(), *NORMALIZED.values(), *GRADIENTS.values()):
    registry.register_planner_op(_op)


def is_relu(op: Op, params: Params) -> bool:
    """Return whether a node of ``op`` with these parameters computes max(x, 0)."""
    return op.name == "relu" or (op.name == "Activation" and params["act_type"] == "relu")


def is_gradient_of_relu(op: Op, params: Params) -> bool:
    """Return whether a node is the gradient of a relu Activation; its inputs are (incoming gradient, output)."""
    return op.name == "_backward_Activation" and params["act_type"] == "relu"
