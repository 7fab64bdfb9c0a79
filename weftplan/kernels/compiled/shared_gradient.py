"""Compiled implementation of the gradients of several FullyConnected layers that share a weight.

The rows of all layers are concatenated, and the gradients computed as those of a single layer in
``fully_connected.py``. Any worker may call the kernel: it writes only to its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from weftplan.kernels.compiled.fully_connected import Matrices, data_gradient, refusal, slower
from weftplan.kernels.compiled.pointwise import implementation as pointwise
from weftplan.kernels.compiled.replay import Call, RepeatedKernel, in_sequence
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.schema import Arrays, OpContext, Params, SpecLike, TensorSpec, aligned
from weftplan.ops.fusion.shared_gradient import SHARED_GRADIENT, gathered_rows


def _sizes(params: Params, inputs: Sequence[SpecLike]) -> Matrices:
    """Return the sizes of the single layer that has the rows of all layers."""
    count, hidden = params["count"], params["num_hidden"]
    result, data = inputs[0], inputs[count]
    columns = math.prod(data.shape) * hidden // math.prod(result.shape)
    return Matrices(TensorSpec((hidden, columns), data.dtype), TensorSpec(result.shape, result.dtype), count)


def _gradients(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
    count, hidden = params["count"], params["num_hidden"]
    m = _sizes(params, inputs)
    layer_rows = m.rows // count
    ograds, datas = (ctx.take(*spec) for spec in gathered_rows(params, *inputs))
    scratch = ctx.take((m.back_bytes,), np.uint8)
    wgrad, *dgrads = outputs
    bgrad = None if params["no_bias"] else dgrads.pop(0)
    calls: list[Call] = [
        partial(np.concatenate, [array.reshape(layer_rows, hidden) for array in inputs[:count]], 0, ograds),
        partial(
            np.concatenate, [array.reshape(layer_rows, m.columns) for array in inputs[count : 2 * count]], 0, datas
        ),
    ]
    if wgrad is not None:
        calls.append(pointwise.call(m.to_weight, datas, ograds, None, wgrad, scratch))
    if bgrad is not None:
        calls.append(partial(np.add.reduce, ograds, axis=0, out=bgrad))
    requested = [(k, array) for k, array in enumerate(dgrads) if array is not None]
    if requested:  # the data has been read, so the data gradients may take its memory
        calls.append(data_gradient(m, ograds, inputs[2 * count], datas, scratch))
    for k, array in requested:
        calls.append(
            partial(np.copyto, array.reshape(layer_rows, m.columns), datas[k * layer_rows : (k + 1) * layer_rows])
        )
    return in_sequence(*calls)


def _workspace(params: Params, inputs: Specs, outputs: Specs) -> int:
    rows = sum(aligned(TensorSpec(*spec).nbytes) for spec in gathered_rows(params, *inputs))
    return rows + aligned(_sizes(params, inputs).back_bytes)


provide(
    SHARED_GRADIENT.name,
    Implementation(
        name="native",
        kernel=RepeatedKernel(_gradients),
        workspace=_workspace,
        refusal=lambda params, inputs, outputs: refusal(inputs),
        slower=lambda params, inputs, outputs: slower(_sizes(params, inputs)),
    ),
)
