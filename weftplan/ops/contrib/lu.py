"""Inverses and determinants by LU with pivoting: linalg_inverse, linalg_det, linalg_slogdet.

If a determinant is 0, its gradient is 0, as in MXNet 1.9.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weftplan.errors import MXNetError
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.kernels import INDEX
from weftplan.ops.core.params import p_bool
from weftplan.ops.core.products import multiply
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, backward, grad, merge_dtype
from weftplan.ops.core.schema import DTypeRule, EntryRef, GradientBuilder, Op, Param, Params, Shape, SpecLike
from weftplan.ops.linalg.core import (
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
from weftplan.support.array_types import ArrayModule, RawArray

Spec = tuple[Shape, Any]


def _factor_scratch(a: SpecLike) -> list[Spec]:
    """Return the scratch for the factors, for the pivots, and for :func:`lu`."""
    shape, dtype = a.shape, a.dtype
    batch, n = batch_of(shape), shape[-1]
    return [((batch, n, n), dtype), ((batch, n), INDEX), ((lu_scratch(batch, n),), dtype)]


def _solve_scratch(a: SpecLike) -> Spec:
    n = a.shape[-1]
    return (solve_scratch(batch_of(a.shape), n, n),), a.dtype


def _invert(xp: ArrayModule, factors: RawArray, pivots: RawArray, out: RawArray, scratch: RawArray) -> None:
    """Write U⁻¹ L⁻¹ P, the inverse of the factored matrix, into ``out``."""
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


@kernel(scratch=lambda p, A, out: [*_factor_scratch(A), _solve_scratch(A)])
def _inverse(
    xp: ArrayModule,
    p: Params,
    A: RawArray,
    out: RawArray,
    factors: RawArray,
    pivots: RawArray,
    spare: RawArray,
    scratch: RawArray,
) -> None:
    xp.copyto(factors, batched(A))
    lu(xp, factors, pivots, spare)
    if not bool(xp.all(diagonal(factors))):
        raise MXNetError("linalg_inverse expects invertible matrices, but one is singular")
    _invert(xp, factors, pivots, batched(out), scratch)


@kernel(scratch=lambda p, ograd, output, out: [(ograd.shape, ograd.dtype)])
def _backward_inverse(
    xp: ArrayModule, p: Params, ograd: RawArray, output: RawArray, out: RawArray, product: RawArray
) -> None:
    """Compute -Yᵀ G Yᵀ, where Y is the inverse and G its gradient."""
    g, y, product = (batched(x) for x in (ograd, output, product))
    multiply(xp, flip(y), g, product)
    xp.negative(product, out=product)
    multiply(xp, product, flip(y), batched(out))


register(
    Op(
        name="_linalg_inverse",
        forward=_inverse,
        infer_shape=square_shape("linalg_inverse"),
        infer_dtype=wide_floats("linalg_inverse"),
        inputs=("A",),
        gradient=grad("_backward_linalg_inverse", "g0", "y0"),
        aliases=("linalg_inverse",),
        doc="The inverse of each matrix.",
    )
)
backward("_linalg_inverse", _backward_inverse, ("ograd", "output"))

# --------------------------------------------------------------------------------------------------------- determinants


def _with_pivots(name: str, position: int) -> DTypeRule:
    """Return a dtype rule: all arrays have the input's dtype, except for output ``position``, the int64 pivots."""
    common = wide_floats(name)

    def rule(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
        new_ins, new_outs = common(params, ins, outs[:position])
        return list(new_ins), [*new_outs, merge_dtype(INDEX, outs[position], f"{name}: pivots")]

    return rule


def _factors(
    xp: ArrayModule,
    a: RawArray,
    outputs: Sequence[RawArray | None],
    factor_buffer: RawArray,
    pivot_buffer: RawArray,
    spare: RawArray,
) -> tuple[RawArray, RawArray]:
    """Return (factors, pivots) of ``a``, in ``outputs``; the two buffers replace outputs that are None."""
    factors = factor_buffer if outputs[0] is None else batched(outputs[0])
    pivots = pivot_buffer if outputs[1] is None else outputs[1].reshape(pivot_buffer.shape)
    xp.copyto(factors, batched(a))
    lu(xp, factors, pivots, spare)
    return factors, pivots


def _apply_parity(xp: ArrayModule, pivots: RawArray, out: RawArray) -> None:
    """Negate the elements of ``out`` (batch,) whose matrices had an odd number of row exchanges."""
    for item in range(pivots.shape[0]):
        if sum(int(pivots[item, k]) != k for k in range(pivots.shape[1])) % 2:
            xp.negative(out[item : item + 1], out=out[item : item + 1])


@kernel(scratch=lambda p, A, *outputs: _factor_scratch(A))
def _det(
    xp: ArrayModule,
    p: Params,
    A: RawArray,
    output0: RawArray | None,
    output1: RawArray | None,
    output2: RawArray | None,
    factor_buffer: RawArray,
    pivot_buffer: RawArray,
    spare: RawArray,
) -> None:
    factors, pivots = _factors(xp, A, (output1, output2), factor_buffer, pivot_buffer, spare)
    if output0 is not None:
        xp.prod(diagonal(factors), axis=1, out=output0.reshape(-1))
        _apply_parity(xp, pivots, output0.reshape(-1))


@kernel(scratch=lambda p, A, *outputs: [*_factor_scratch(A), ((batch_of(A.shape), A.shape[-1]), A.dtype)])
def _slogdet(
    xp: ArrayModule,
    p: Params,
    A: RawArray,
    output0: RawArray | None,
    output1: RawArray | None,
    output2: RawArray | None,
    output3: RawArray | None,
    *buffers: RawArray,
) -> None:
    factor_buffer, pivot_buffer, spare, terms = buffers
    factors, pivots = _factors(xp, A, (output2, output3), factor_buffer, pivot_buffer, spare)
    if output0 is not None:
        xp.sign(diagonal(factors), out=terms)
        xp.prod(terms, axis=1, out=output0.reshape(-1))
        _apply_parity(xp, pivots, output0.reshape(-1))
    if output1 is not None:
        xp.absolute(diagonal(factors), out=terms)
        xp.log(terms, out=terms)
        xp.sum(terms, axis=1, out=output1.reshape(-1))


@kernel(scratch=lambda p, ograd, value, factors, pivots, out: [_solve_scratch(factors)])
def _backward_determinant(
    xp: ArrayModule,
    p: Params,
    ograd: RawArray,
    value: RawArray,
    factors: RawArray,
    pivots: RawArray,
    out: RawArray,
    scratch: RawArray,
) -> None:
    """Compute ograd · A⁻ᵀ, times the determinant for det; 0 if the determinant, or its sign, is 0."""
    g, value = ograd.reshape(-1, 1, 1), value.reshape(-1, 1, 1)
    factors, out = batched(factors), batched(out)
    _invert(xp, factors, pivots.reshape(out.shape[:-1]), flip(out), scratch)
    xp.multiply(out, g, out=out)
    if p["scaled"]:
        xp.multiply(out, value, out=out)
    xp.copyto(out, 0, where=value == 0)


def _det_gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    reads = [builder.ograd(0), *(builder.output(k) for k in range(3))]
    return builder.node("_backward_linalg_det", reads, {"scaled": True})


def _slogdet_gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    reads = [builder.ograd(1), *(builder.output(k) for k in (0, 2, 3))]
    return builder.node("_backward_linalg_slogdet", reads, {"scaled": False})


_SCALED = (Param("scaled", p_bool, doc="multiply by the determinant"),)
for _name, _kernel, _rule, _kinds, _doc in (
    (
        "linalg_det",
        _det,
        _det_gradient,
        ("one", "same", "row"),
        "The determinant of each matrix.",
    ),
    (
        "linalg_slogdet",
        _slogdet,
        _slogdet_gradient,
        ("one", "one", "same", "row"),
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
            aliases=(_name,),
            doc=_doc,
        )
    )
    backward(f"_{_name}", _backward_determinant, ("ograd", "value", "factors", "pivots"), params=_SCALED)
