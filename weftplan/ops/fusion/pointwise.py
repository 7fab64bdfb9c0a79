"""Fused pointwise operator: one kernel computes a tree of elementwise nodes, element by element.

Only the planner adds nodes of this operator (``planner/symbolic/passes/fuse_pointwise.py``), for GPUs, for which
``kernels/cuda/pointwise.py`` generates the kernel. The kernel of this module runs the member nodes one after another,
with scratch for every result; it is used if no kernel can be generated. Both kernels have the bits of the unfused
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from weftplan.ops.core.registry import register_planner_op
from weftplan.ops.core.rules import DTypes, Shapes
from weftplan.ops.core.schema import Arrays, DType, InplacePair, Op, OpContext, Params, Shape, TensorSpec, aligned

NAME = "pointwise"
GROUP = "group"
"""The parameter of a fused node: its :class:`Group`."""


class Member(NamedTuple):
    """One elementwise node of a group, on numbered values."""

    op: Op
    params: Params
    reads: tuple[int | None, ...]
    """Numbers of the values that the node reads; None for an ignored input."""
    writes: tuple[int | None, ...]
    """Numbers of the values that the node computes; None for an output that no node reads."""


@dataclass(frozen=True, eq=False)
class Group:
    """The members of a fused node, and its values: first the node's inputs, then the results of members in order."""

    members: tuple[Member, ...]
    inputs: tuple[Shape, ...]
    """The shape of each input, with as many axes as :attr:`shape`; an axis of 1 is broadcast."""
    results: tuple[int, ...]
    """Numbers of the values that are the outputs."""
    shape: Shape
    """The shape of all values that are not inputs."""
    dtype: DType

    @property
    def num_values(self) -> int:
        """Number of values: inputs, and values that members write."""
        return len(self.inputs) + sum(number is not None for member in self.members for number in member.writes)

    def broadcasts(self, number: int) -> bool:
        """Return whether input ``number`` is broadcast to the shape of the results."""
        return self.inputs[number] != self.shape

    def spec(self, value: int) -> TensorSpec:
        """Return the shape and dtype of value number ``value``."""
        return TensorSpec(self.inputs[value] if value < len(self.inputs) else self.shape, self.dtype)

    def specs(self, values: Sequence[int | None]) -> list[TensorSpec]:
        """Return the specs of a member's values; a None (an ignored or unwanted value) gets the spec of a result."""
        return [TensorSpec(self.shape, self.dtype) if value is None else self.spec(value) for value in values]


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    group: Group = params[GROUP]
    values: list[Any] = [array.reshape(shape) for array, shape in zip(inputs, group.inputs, strict=True)]
    # An output may be the memory of an input that a later member reads, so results are copied last.
    values += [ctx.take(group.shape, group.dtype) for _ in range(group.num_values - len(values))]
    nbytes = _scratch(group)
    scratch = ctx.take((nbytes,), "uint8") if nbytes else None
    for op, member_params, reads, writes in group.members:
        ins, outs = ([None if number is None else values[number] for number in numbers] for numbers in (reads, writes))
        op.forward(OpContext(ctx.xp, is_train=ctx.is_train, workspace=scratch), member_params, ins, outs)
    for value, out in zip(group.results, outputs, strict=True):
        if out is not None:
            ctx.xp.copyto(out, values[value])


def _scratch(group: Group) -> int:
    """Return the scratch bytes of the group's most demanding member."""
    return max(op.workspace_bytes(member_params, group.specs(reads), group.specs(writes))
               for op, member_params, reads, writes in group.members)  # fmt: skip


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    group: Group = params[GROUP]
    values = group.num_values - len(group.inputs)
    return values * aligned(TensorSpec(group.shape, group.dtype).nbytes) + aligned(_scratch(group))


def _shapes(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    group: Group = params[GROUP]
    return ins, [group.shape] * len(group.results)


def _dtypes(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    group: Group = params[GROUP]
    return [group.dtype] * len(group.inputs), [group.dtype] * len(group.results)


def _inplace(params: Params) -> tuple[InplacePair, ...]:
    """Return all pairs of an unbroadcast input and an output: a thread reads its elements before it writes any."""
    group: Group = params[GROUP]
    unbroadcast = [number for number in range(len(group.inputs)) if not group.broadcasts(number)]
    return tuple(InplacePair(number, out) for out in range(len(group.results)) for number in unbroadcast)


POINTWISE = register_planner_op(
    Op(
        name=NAME,
        forward=_forward,
        infer_shape=_shapes,
        infer_dtype=_dtypes,
        inputs=lambda params: tuple(f"arg{k}" for k in range(len(params[GROUP].inputs))),
        outputs=lambda params: tuple(f"output{k}" for k in range(len(params[GROUP].results))),
        inplace=_inplace,
        workspace=_workspace,
        doc="Elementwise nodes that one kernel computes.",
    )
)
