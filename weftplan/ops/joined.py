"""Operators that compute two nodes of a graph in one pass: a layer with the relu behind it, forward and backward.

Only the planner makes nodes of them (``symbol/joining.py``), after gradients are there, so they have no
gradient, no name that a user can call and no place in the table of operators. What they compute has the same bits as
the two nodes. Compiled forms are offered under their names, as for every operator.
"""

from __future__ import annotations

from dataclasses import replace

from weftplan.ops import registry
from weftplan.ops.kernels import blocks
from weftplan.ops.nn import batch_norm, convolution  # noqa: F401 - they register what is joined here
from weftplan.ops.schema import Arrays, InplacePair, Kernel, Op, OpContext, Params
from weftplan.ops.unary import relu_step

RELU = "+relu"
"""What the name of a joined operator adds to the layer's."""


def _with_relu(layer: Kernel) -> Kernel:
    def forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        layer(ctx, params, inputs, outputs)
        if outputs[0] is not None:
            for (block,) in blocks(ctx, [outputs[0]]):
                relu_step(ctx.xp, params, block, block)

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
        inputs=("ograd", "relu", "data", "gamma", "mean", "var"),
        inplace=(InplacePair(0, 0), InplacePair(1, 0), InplacePair(2, 0)),
        ignored_inputs=lambda params: (3,) if params["fix_gamma"] else (),
        workspace=batch_norm.workspace_behind_relu,
    )


LAYERS = {name: _layer(name) for name in ("BatchNorm", "Convolution")}
"""By the operator of the layer: the same with a relu behind it."""
GRADIENTS = {"_backward_BatchNorm": _backward_batch_norm()}
"""By the operator of a layer's gradient: the same behind the gradient of a relu; its inputs are the incoming gradient,
the relu's output, and the others."""


def is_relu(op: Op, params: Params) -> bool:
    """Whether a node computes max(x, 0)."""
    return op.name == "relu" or (op.name == "Activation" and params["act_type"] == "relu")


def is_gradient_of_relu(op: Op, params: Params) -> bool:
    """Whether a node is the gradient of such a one, of inputs (incoming gradient, output)."""
    return op.name == "_backward_Activation" and params["act_type"] == "relu"
