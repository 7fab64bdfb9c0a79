"""Batch norm with given statistics and optional relu, which recomputes a forward result bit for bit.

Only the planner adds nodes of this operator. Under recomputation they compute the result of a batch norm from inputs
that its gradient needs anyway: the data, the mean, and 1 / sqrt(variance + eps). This takes one pass over the data;
repeating the batch norm would take two or three.
"""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.ops.core.expression import Expr, f
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.params import p_bool
from weftplan.ops.core.registry import register_planner_op
from weftplan.ops.core.rules import pass_dtype, pass_shape
from weftplan.ops.core.schema import InplacePair, Op, Param, Params, SpecLike
from weftplan.ops.elementwise.unary import relu_into
from weftplan.support.array_types import ArrayModule, RawArray


def normalized(
    xp: ArrayModule,
    data: RawArray,
    vectors: Sequence[object],
    out: RawArray,
    scale: RawArray,
    shift: RawArray,
    *,
    fixed: bool,
    relu: bool,
) -> None:
    """Write ``data`` (channels on axis 1), normalised by given statistics, to ``out``, which may be ``data``.

    Args:
        vectors: gamma, beta, mean and 1 / sqrt(variance + eps).
        scale, shift: scratch of one element per channel.
        fixed: whether gamma counts as 1.
        relu: whether a relu follows.
    """
    gamma, beta, mean, inverse = vectors
    if fixed:
        scale[...] = inverse
    else:
        xp.multiply(inverse, gamma, out=scale)
    xp.multiply(mean, scale, out=shift)
    xp.subtract(beta, shift, out=shift)
    along = (-1, *[1] * (data.ndim - 2))
    xp.multiply(data, scale.reshape(along), out=out)
    xp.add(out, shift.reshape(along), out=out)
    if relu:
        relu_into(xp, out, out)


def _vectors(
    params: Params, data: SpecLike, gamma: SpecLike | None, beta: SpecLike, *statistics: SpecLike
) -> ScratchSpecs:
    return [(beta.shape, data.dtype)] * 2


def _formula(p: Params, data: Expr, gamma: Expr, beta: Expr, mean: Expr, inverse: Expr) -> tuple[Expr]:
    """Return the operations of :func:`normalized` on one element."""
    scale = inverse if p["fix_gamma"] else inverse * gamma
    result = data * scale + (beta - mean * scale)
    return (f.maximum(result, 0) if p["relu"] else result,)


@kernel(scratch=_vectors, formula=_formula)
def _forward(
    xp: ArrayModule,
    p: Params,
    data: RawArray,
    gamma: RawArray | None,
    beta: RawArray,
    mean: RawArray,
    inverse: RawArray,
    out: RawArray,
    scale: RawArray,
    shift: RawArray,
) -> None:
    vectors = (gamma, beta, mean, inverse)
    normalized(xp, data, vectors, out, scale, shift, fixed=p["fix_gamma"], relu=p["relu"])


NORMALIZE = register_planner_op(
    Op(
        name="normalize",
        forward=_forward,
        infer_shape=pass_shape,
        infer_dtype=pass_dtype,
        params=(
            Param("fix_gamma", p_bool, doc="True: gamma counts as 1."),
            Param("relu", p_bool, doc="Whether there is a relu after it."),
        ),
        inputs=("data", "gamma", "beta", "mean", "var"),
        inplace=(InplacePair(0, 0),),
        ignored_inputs=lambda params: (1,) if params["fix_gamma"] else (),
        doc="A batch norm whose statistics are known, and the relu after it.",
    )
)
