"""The operator ``_histogram``: counts of values between uniform or explicit bin edges.

NumPy or CuPy counts, so their rule for a number on an edge applies. The kernel has no state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weftplan.errors import ParameterError
from weftplan.ops.core.forms import kernel
from weftplan.ops.core.params import p_float, p_optional, p_range, p_tuple
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, merge_dtype, merge_shape
from weftplan.ops.core.schema import Op, Param, Params
from weftplan.support.array_types import ArrayModule, RawArray

_COUNT = np.dtype(np.int64)


def _inputs(params: Params) -> tuple[str, ...]:
    return ("data", "bins") if params["bin_cnt"] is None else ("data",)


def _shapes(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    count = params["bin_cnt"]
    if count is not None:
        if params["range"] is None or len(params["range"]) != 2 or not params["range"][0] <= params["range"][1]:
            raise ParameterError(f"_histogram: bin_cnt needs a range of two numbers in order, got {params['range']}")
        edges: Any = (count + 1,)
    else:
        edges = merge_shape(ins[1], outs[1], "edges of _histogram")
        if edges is not None and (len(edges) != 1 or edges[0] == 1):
            raise ParameterError(f"_histogram: bins must be a vector of two edges or more, got shape {edges}")
    counts = None if edges is None or edges[0] == 0 else (edges[0] - 1,)
    shapes: Shapes = [merge_shape(outs[0], counts, "counts of _histogram"), merge_shape(outs[1], edges, "edges")]
    return [ins[0], edges][: len(ins)], shapes


def _dtypes(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    common = outs[1]
    for position, dtype in enumerate(ins):
        common = merge_dtype(common, dtype, f"input {position} of _histogram")
    return [common] * len(ins), [merge_dtype(outs[0], _COUNT, "counts of _histogram"), common]


@kernel
def _histogram(xp: ArrayModule, p: Params, *arrays: RawArray | None) -> None:
    *inputs, output, bin_edges = arrays
    if p["bin_cnt"] is None:
        counts, edges = xp.histogram(inputs[0], bins=inputs[1])
    else:
        counts, edges = xp.histogram(inputs[0], bins=p["bin_cnt"], range=p["range"])
    for out, value in zip((output, bin_edges), (counts, edges), strict=True):
        if out is not None:
            xp.copyto(out, value, casting="unsafe")


register(
    Op(
        name="_histogram",
        forward=_histogram,
        infer_shape=_shapes,
        infer_dtype=_dtypes,
        params=(
            Param(
                "bin_cnt",
                p_optional(p_range(1, 1 << 24)),
                None,
                "How many equidistant bins; None: an input has the edges.",
            ),
            Param("range", p_optional(p_tuple(p_float)), None, "Least and largest edge, with bin_cnt."),
        ),
        inputs=_inputs,
        outputs=("output0", "output1"),
        doc="How many numbers fall into each bin, as int64, and the edges of bins; the last bin has both its edges.",
    )
)
