"""_sample_unique_zipfian: classes drawn without replacement from a Zipfian distribution.

One draw is the integer part of exp(u · log(range_max + 1)) - 1, with u uniform on [0, 1); duplicates are rejected. The
host computes a few thousand draws at a time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import context_kernel
from weftplan.ops.core.kernels import INDEX
from weftplan.ops.core.params import p_int, p_optional, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, merge_dtype, merge_shape, zero_gradient
from weftplan.ops.core.schema import Op, OpContext, Param, Params
from weftplan.support.array_types import Generator, RawArray

_AT_ONCE = 4096
"""Number of draws made at a time."""


def _shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    samples = merge_shape(outs[0], params["shape"] or None, "samples and the parameter shape")
    if samples is None:
        return ins, outs
    if len(samples) != 2:
        raise ShapeError(f"sample_unique_zipfian expects a shape of two dimensions, got {samples}")
    if samples[1] > params["range_max"]:
        raise ShapeError(f"sample_unique_zipfian: there are no {samples[1]} different classes below range_max="
                         f"{params['range_max']}")  # fmt: skip
    return [], [samples, merge_shape(outs[1], samples[:1], "numbers of tries of sample_unique_zipfian")]


def _dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    return [], [merge_dtype(INDEX, dtype, "output of sample_unique_zipfian") for dtype in outs]


def _draw(generator: Generator, count: int, range_max: int) -> tuple[RawArray, int]:
    """Return ``count`` distinct classes in the order of their draws, and the number of draws that this took."""
    distinct, tries = np.empty(0, np.int64), 0
    while True:
        u = generator.random(_AT_ONCE)
        u = u.get() if hasattr(u, "get") else u
        drawn = np.minimum(np.exp(u * math.log(range_max + 1)).astype(np.int64) - 1, range_max - 1)
        classes, positions = np.unique(drawn, return_index=True)
        new = np.sort(positions[~np.isin(classes, distinct)])[: count - len(distinct)]
        distinct = np.concatenate([distinct, drawn[new]])
        if len(distinct) == count:
            return distinct, tries + int(new[-1]) + 1
        tries += _AT_ONCE


@context_kernel
def _unique(ctx: OpContext, p: Params, out: Any, num_tries: RawArray | None) -> None:
    generator = ctx.generator()
    rows, count = (ctx.output_shapes or [out.shape])[0]
    for row in range(rows):
        samples, tries = _draw(generator, count, p["range_max"])
        if out is not None:
            out[row] = ctx.xp.asarray(samples)
        if num_tries is not None:
            num_tries[row] = tries


register(
    Op(
        name="_sample_unique_zipfian",
        forward=_unique,
        infer_shape=_shape,
        infer_dtype=_dtype,
        params=(
            Param("range_max", p_int, doc="number of classes"),
            Param("shape", p_optional(p_shape), None, "number of rows, and of different classes in each"),
        ),
        inputs=(),
        outputs=("output0", "output1"),
        gradient=zero_gradient,
        random=True,
        doc="Rows of different classes, where small ones come early (class k with about log((k + 2) / (k + 1))), and "
        "the number of draws that each row took.",
    )
)
