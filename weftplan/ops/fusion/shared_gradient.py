"""Gradients of several FullyConnected layers that share a weight, with one product for the weight.

With small batches, the weight's gradient is the sum of many small products. If the rows of the layers are concatenated,
one product computes the sum, and is large enough for two cores. Only
:mod:`weftplan.planner.symbolic.passes.batch_weight_gradients` adds nodes of this operator, and users cannot find it by
name.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.params import p_bool
from weftplan.ops.core.products import FEW, MOST, STEP, multiply
from weftplan.ops.core.registry import register_planner_op
from weftplan.ops.core.rules import DTypes, Shapes, is_known
from weftplan.ops.core.schema import Op, Param, Params, SpecLike
from weftplan.ops.elementwise.add_n import numbered, p_count
from weftplan.support.array_types import ArrayModule, RawArray
from weftplan.support.core_sharing import split


@lru_cache(maxsize=64)
def _inputs(count: int, has_data: bool) -> tuple[str, ...]:
    return (*numbered("ograd", count), *numbered("data", count), *(("weight",) if has_data else ()))


@lru_cache(maxsize=64)
def _outputs(count: int, has_data: bool, biased: bool) -> tuple[str, ...]:
    return ("weight_grad", *(("bias_grad",) if biased else ()), *(numbered("data_grad", count) if has_data else ()))


def _shapes(p: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    """Infer the shapes of the gradients of weight, bias and data from the first layer's output gradient and data."""
    count, hidden, ograd, data = p["count"], p["num_hidden"], ins[0], ins[p["count"]]
    if ograd is None or data is None or not is_known(ograd) or not is_known(data):
        return ins, outs
    weight = hidden, math.prod(data) * hidden // math.prod(ograd)
    return ins, [weight, *([] if p["no_bias"] else [(hidden,)]), *(ins[count : 2 * count] if p["whole"] else [])]


def _dtypes(p: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    """Infer the dtype of the first input for all outputs."""
    return ins, [ins[0]] * len(outs)


def gathered_rows(p: Params, *arrays: SpecLike) -> ScratchSpecs:
    """Return the (shape, dtype) of all output gradients' rows concatenated, and of all data's rows concatenated."""
    count, hidden = p["count"], p["num_hidden"]
    dtype = arrays[0].dtype
    rows = count * (math.prod(arrays[0].shape) // hidden)
    return [((rows, hidden), dtype), ((rows, count * math.prod(arrays[count].shape) // rows), dtype)]


@kernel(scratch=gathered_rows)
def _gathered(xp: ArrayModule, p: Params, *arrays: RawArray) -> None:
    count, has_data, hidden = p["count"], p["whole"], p["num_hidden"]
    *weights, ograds, datas = arrays
    rows = [array.reshape(-1, hidden) for array in weights[:count]]
    columns = [array.reshape(len(rows[0]), -1) for array in weights[count : 2 * count]]
    weight_grad, *data_grads = weights[2 * count + has_data :]
    bias_grad = None if p["no_bias"] else data_grads.pop(0)
    height = len(rows[0])
    for number, array in enumerate(columns):
        datas[number * height : (number + 1) * height] = array
    parts = max(1, min(ograds.size * datas.shape[1] // FEW, MOST) // 2 * 2)
    step = -(-hidden // (parts * STEP)) * STEP
    parts = -(-hidden // step)

    def part(turn: int) -> None:
        units = slice(turn * step, (turn + 1) * step)
        for number, array in enumerate(rows):
            ograds[number * height : (number + 1) * height, units] = array[:, units]
        if weight_grad is not None:
            multiply(np, ograds[:, units].T, datas, weight_grad[units])
        if bias_grad is not None:
            np.add.reduce(ograds[:, units], axis=0, out=bias_grad[units])
        for number in range(turn, len(data_grads), parts):
            if data_grads[number] is not None:
                multiply(np, rows[number], weights[2 * count], data_grads[number].reshape(columns[number].shape))

    split(part, parts)


SHARED_GRADIENT = register_planner_op(
    Op(
        name="_backward_FullyConnected_shared",
        forward=_gathered,
        infer_shape=_shapes,
        infer_dtype=_dtypes,
        params=(
            Param("num_hidden", p_count, doc="Columns of the outputs of the layers."),
            Param("no_bias", p_bool, False, "True: the layers have no bias."),
            Param("count", p_count, doc="Layers."),
            Param("whole", p_bool, False, "True: the gradients of the data, too."),
        ),
        inputs=lambda params: _inputs(params["count"], params["whole"]),
        outputs=lambda params: _outputs(params["count"], params["whole"], not params["no_bias"]),
        doc="Gradients of FullyConnected layers that share a weight, those of weight and bias summed.",
    )
)
