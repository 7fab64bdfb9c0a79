"""GroupNorm: normalisation of groups of channels of each sample, over channels and space.

As in MXNet 1.9.1, gamma and beta have one number for each group, not for each channel.
"""

from __future__ import annotations

import math

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core.params import p_bool, p_float, p_int
from weftplan.ops.core.rules import Shapes, merge_shape
from weftplan.ops.core.schema import Param, Params, Shape
from weftplan.ops.nn.layer_norm import register_norm

_PARAMS = (
    Param("num_groups", p_int, 1, "Number of groups; it divides the number of channels."),
    Param("eps", p_float, 1e-5, "Added to the variance."),
    Param("output_mean_var", p_bool, False, "True: mean and standard deviation are visible outputs."),
)


def _view(params: Params, shape: Shape) -> tuple[Shape, Shape]:
    groups = params["num_groups"]
    return (shape[0], groups, math.prod(shape[1:]) // groups, 1), (1, groups, 1, 1)


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    groups = params["num_groups"]
    if groups < 1:
        raise ParameterError(f"GroupNorm: num_groups={groups}: expected at least 1")
    data = merge_shape(ins[0], outs[0], "GroupNorm: data and output")
    vectors = [
        merge_shape((groups,), shape, f"GroupNorm: {name} with num_groups={groups}, and given")
        for name, shape in zip(("gamma", "beta"), ins[1:], strict=True)
    ]
    if data is None:
        return [None, *vectors], outs
    if len(data) < 3:
        raise ShapeError(f"GroupNorm: data has shape {data}, expected batch, channels and space")
    if data[1] % groups:
        raise ShapeError(f"GroupNorm: {groups} groups do not divide the {data[1]} channels of data {data}")
    statistics = [merge_shape((data[0], groups), shape, "GroupNorm: statistics") for shape in outs[1:]]
    return [data, *vectors], [data, *statistics]


register_norm(
    "GroupNorm",
    _view,
    _PARAMS,
    _infer_shape,
    lambda params: 3 if params["output_mean_var"] else 1,
    "(data - mean) / sqrt(var + eps) · gamma + beta over each group of channels of each sample, in the shape of data; "
    "gamma and beta are (num_groups,).",
)
