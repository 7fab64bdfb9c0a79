"""Inverses and determinants by LU factors with partial pivoting: linalg_inverse, linalg_det, linalg_slogdet.

Where a determinant is 0, its gradients are 0, as MXNet 1.9.1 defines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weftplan.errors import MXNetError
from weftplan.ops.forms import workspace_kernel
from weftplan.ops.kernels import INDEX
from weftplan.ops.linalg_core import (
    batch_of,
    batched,
    diagonal,
    flip,
    lu,
    lu_scratch,
    solve,
    solve_scratch,
    square_shape,
    wide_floats,
)
from weftplan.ops.params import p_bool
from weftplan.ops.registry import register
from weftplan.ops.rules import DTypes, backward, grad, merge_dtype, take_bytes
from weftplan.ops.schema import EntryRef, GradientBuilder, Op, Param, Params, Shape, TensorSpec, Workspace

Spec = tuple[Shape, Any]


def _pivots(spec: TensorSpec) -> Spec:
    return (batch_of(spec.shape), spec.shape[-1]), INDEX


def _lu_room(spec: TensorSpec) -> Spec:
    return (lu_scratch(batch_of(spec.shape), spec.shape[-1]),), spec.dtype


def _solve_room(spec: TensorSpec) -> Spec:
    n = spec.shape[-1]
    return (solve_scratch(batch_of(spec.shape), n, n),), spec.dtype


def _invert(xp: Any, factors: Any, pivots: Any, out: Any, scratch: Any) -> None:
    """``out`` = the inverse of what has these factors: U⁻¹ L⁻¹ P."""
    out.fill(0)
    rows = list(range(out.shape[-1]))
    for item in range(out.shape[0]):
        order = rows.copy()
        for k in rows:
            chosen = int(pivots[item, k])
            order[k], order[chosen] = order[chosen], order[k]
        out[item, rows, order] = 1
    solve(xp, factors, out, scratch, lower=True, unit=True)
    solve(xp, factors, out, scratch, lower=False)


@workspace_kernel
def _inverse(ctx: Workspace, p: Params, A: Any, out: Any) -> None:
    xp = ctx.xp
    a, out = batched(A), batched(out)
    spec = TensorSpec(a.shape, a.dtype)
    factors, pivots = ctx.take(a.shape, a.dtype), ctx.take(*_pivots(spec))
    xp.copyto(factors, a)
    lu(xp, factors, pivots, ctx.take(*_lu_room(spec)))
    if not bool(xp.all(diagonal(factors))):
        raise MXNetError("linalg_inverse expects invertible matrices, but one is singular")
    _invert(xp, factors, pivots, out, ctx.take(*_solve_room(spec)))


@workspace_kernel
def _backward_inverse(ctx: Workspace, p: Params, ograd: Any, output: Any, out: Any) -> None:
    """-Y^T G Y^T, where Y is the inverse."""
    g, y = (batched(x) for x in (ograd, output))
    product = ctx.take(g.shape, g.dtype)
    ctx.xp.matmul(flip(y), g, out=product)
    ctx.xp.negative(product, out=product)
    ctx.xp.matmul(product, flip(y), out=batched(out))


register(
    Op(
        name="_linalg_inverse",
        forward=_inverse,
        infer_shape=square_shape("linalg_inverse"),
        infer_dtype=wide_floats("linalg_inverse"),
        inputs=("A",),
        gradient=grad("_backward_linalg_inverse", "g0", "y0"),
        workspace=lambda params, inputs, outputs: take_bytes(
            inputs[0], _pivots(inputs[0]), _lu_room(inputs[0]), _solve_room(inputs[0])
        ),
        aliases=("linalg_inverse",),
        doc="The inverse of each matrix.",
    )
)
backward(
    "_linalg_inverse",
    _backward_inverse,
    ("ograd", "output"),
    workspace=lambda params, inputs, outputs: take_bytes(inputs[0]),
)

# --------------------------------------------------------------------------------------------------------- determinants


def _with_pivots(name: str, kept: int) -> Any:
    """Everything has the input's dtype but the last output, the pivots."""
    common = wide_floats(name)

    def rule(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
        new_ins, new_outs = common(params, ins, outs[:kept])
        return list(new_ins), [*new_outs, merge_dtype(INDEX, outs[kept], f"{name}: pivots")]

    return rule


def _factors(ctx: Workspace, a: Any, kept: Sequence[Any]) -> tuple[Any, Any]:
    """(factors, pivots), in the outputs ``kept`` where those are wanted."""
    a = batched(a)
    spec = TensorSpec(a.shape, a.dtype)
    room, places = ctx.take(a.shape, a.dtype), ctx.take(*_pivots(spec))
    factors = room if kept[0] is None else batched(kept[0])
    pivots = places if kept[1] is None else kept[1].reshape(places.shape)
    ctx.xp.copyto(factors, a)
    lu(ctx.xp, factors, pivots, ctx.take(*_lu_room(spec)))
    return factors, pivots


def _apply_parity(xp: Any, pivots: Any, out: Any) -> None:
    """Changes the sign of ``out`` (batch,) where the rows were swapped an odd number of times."""
    for item in range(pivots.shape[0]):
        if sum(int(pivots[item, k]) != k for k in range(pivots.shape[1])) % 2:
            xp.negative(out[item : item + 1], out=out[item : item + 1])


def _factor_bytes(a: TensorSpec) -> int:
    return take_bytes(a, _pivots(a), _lu_room(a))


@workspace_kernel
def _det(ctx: Workspace, p: Params, A: Any, output0: Any, output1: Any, output2: Any) -> None:
    factors, pivots = _factors(ctx, A, (output1, output2))
    if output0 is not None:
        ctx.xp.prod(diagonal(factors), axis=1, out=output0.reshape(-1))
        _apply_parity(ctx.xp, pivots, output0.reshape(-1))


@workspace_kernel
def _slogdet(ctx: Workspace, p: Params, A: Any, output0: Any, output1: Any, output2: Any, output3: Any) -> None:
    xp = ctx.xp
    factors, pivots = _factors(ctx, A, (output2, output3))
    spare = ctx.take(pivots.shape, factors.dtype)
    if output0 is not None:
        xp.sign(diagonal(factors), out=spare)
        xp.prod(spare, axis=1, out=output0.reshape(-1))
        _apply_parity(xp, pivots, output0.reshape(-1))
    if output1 is not None:
        xp.absolute(diagonal(factors), out=spare)
        xp.log(spare, out=spare)
        xp.sum(spare, axis=1, out=output1.reshape(-1))


@workspace_kernel
def _backward_determinant(
    ctx: Workspace, p: Params, ograd: Any, value: Any, factors: Any, pivots: Any, out: Any
) -> None:
    """ograd · A⁻ᵀ, times the determinant for det; 0 where the determinant, or its sign, is 0."""
    xp = ctx.xp
    g, value = ograd.reshape(-1, 1, 1), value.reshape(-1, 1, 1)
    factors, out = batched(factors), batched(out)
    spec = TensorSpec(out.shape, out.dtype)
    _invert(xp, factors, pivots.reshape(_pivots(spec)[0]), flip(out), ctx.take(*_solve_room(spec)))
    xp.multiply(out, g, out=out)
    if p["scaled"]:
        xp.multiply(out, value, out=out)
    xp.copyto(out, 0, where=value == 0)


def _det_gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    kept = [builder.ograd(0), *(builder.output(k) for k in range(3))]
    return builder.node("_backward_linalg_det", kept, {"scaled": True})


def _slogdet_gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    kept = [builder.ograd(1), *(builder.output(k) for k in (0, 2, 3))]
    return builder.node("_backward_linalg_slogdet", kept, {"scaled": False})


_SCALED = (Param("scaled", p_bool, doc="multiply by the determinant"),)
for _name, _kernel, _rule, _kinds, _bytes, _doc in (
    (
        "linalg_det",
        _det,
        _det_gradient,
        ("one", "same", "row"),
        lambda params, inputs, outputs: _factor_bytes(inputs[0]),
        "The determinant of each matrix.",
    ),
    (
        "linalg_slogdet",
        _slogdet,
        _slogdet_gradient,
        ("one", "one", "same", "row"),
        lambda params, inputs, outputs: _factor_bytes(inputs[0]) + take_bytes((_pivots(inputs[0])[0], inputs[0].dtype)),
        "The sign of each matrix's determinant, and the logarithm of its absolute value.",
    ),
):
    register(
        Op(
            name=f"_{_name}",
            forward=_kernel,
            infer_shape=square_shape(_name, _kinds),
            infer_dtype=_with_pivots(_name, len(_kinds) - 1),
            inputs=("A",),
            outputs=tuple(f"output{k}" for k in range(len(_kinds))),
            visible_outputs=len(_kinds) - 2,
            gradient=_rule,
            workspace=_bytes,
            aliases=(_name,),
            doc=_doc,
        )
    )
    backward(
        f"_{_name}",
        _backward_determinant,
        ("ograd", "value", "factors", "pivots"),
        params=_SCALED,
        workspace=lambda params, inputs, outputs: take_bytes(_solve_room(inputs[2])),
    )
