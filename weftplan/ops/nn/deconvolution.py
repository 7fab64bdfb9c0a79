"""Deconvolution: the transpose of Convolution, as a layer.

The forward pass is the data gradient of Convolution, and the data gradient is Convolution's forward pass. Both
operators therefore share the kernels of ``conv_gemm.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.params import p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, grad, merge_shape, same_dtype
from weftplan.ops.core.schema import DType, Op, Param, Params, Shape, TensorSpec, Workspace
from weftplan.ops.nn.conv_gemm import adjoint, correlate
from weftplan.ops.nn.conv_geometry import Geometry, geometry
from weftplan.ops.nn.convolution import check_channels, convolution_params, window
from weftplan.support.array_types import RawArray

_PARAMS = convolution_params(
    512,
    no_bias=True,
    after_pad=(
        Param("adj", p_shape, (), "Elements added at the far end of each axis; smaller than stride."),
        Param("target_shape", p_shape, (), "Spatial extents of the output; replaces pad and adj."),
    ),
)


def _inputs(params: Params) -> tuple[str, ...]:
    return ("data", "weight") if params["no_bias"] else ("data", "weight", "bias")


def _padding(params: Params, extents: Shape) -> tuple[Shape, Shape]:
    """Return (pad, adj), with a number per spatial axis, for data of these spatial ``extents`` (0: unknown)."""
    kernel, stride, dilate, pad = window(params, "Deconvolution")
    rank = len(kernel)
    target, adj = params["target_shape"], params["adj"] or (0,) * rank
    if not any(target):
        if len(adj) != rank or any(not 0 <= a < s for a, s in zip(adj, stride, strict=True)):
            raise ParameterError(f"Deconvolution: adj={adj}: expected {rank} numbers below stride {stride}")
        return pad, adj
    if len(target) != rank:
        raise ParameterError(f"Deconvolution: target_shape={target}: expected {rank} extents, as {kernel=}")
    pads, adjs = [], []
    for k, s, d, extent, size in zip(kernel, stride, dilate, extents, target, strict=True):
        surplus = s * (extent - 1) + d * (k - 1) + 1 - size if extent and size else 0
        if surplus < 0:
            raise ShapeError(f"Deconvolution: target_shape={target} is too large for data of extents {extents}")
        adjs.append(surplus % 2)
        pads.append((surplus + 1) // 2)
    return tuple(pads), tuple(adjs)


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    kernel, stride, dilate, _ = window(params, "Deconvolution")
    filters, groups = params["num_filter"], params["num_group"]
    rank = len(kernel)
    if ins[0] is None and outs[0] is None:
        return ins, outs
    data = merge_shape((0,) * (rank + 2), ins[0], f"Deconvolution: data with {rank} spatial axes (kernel={kernel})")
    out = merge_shape((0, filters, *(0,) * rank), outs[0], f"Deconvolution: output with num_filter={filters}")
    assert data is not None
    assert out is not None
    check_channels(data[1], groups, data, "Deconvolution")
    weight = merge_shape(
        (data[1], filters // groups, *kernel), ins[1], f"Deconvolution: weight needed for data {data}, and given"
    )
    assert weight is not None
    pad, adj = _padding(params, data[2:])
    grid = []
    for axis, extent in enumerate(data[2:]):
        size = 0
        if extent:
            size = stride[axis] * (extent - 1) + dilate[axis] * (kernel[axis] - 1) + 1 - 2 * pad[axis] + adj[axis]
            if size <= 0:
                raise ShapeError(f"Deconvolution: pad={pad} leaves nothing of data {data} on spatial axis {axis}")
        grid.append(size)
    batch = data[0] or out[0]
    new_out = merge_shape((batch, filters, *grid), out, f"Deconvolution: output for data {data}, and given")
    new: Shapes = [(batch, data[1] or weight[0], *data[2:]), weight]
    if not params["no_bias"]:
        new.append(merge_shape((filters,), ins[2], "Deconvolution: bias (num_filter,), and given"))
    return new, [new_out]


def sizes(params: Params, data: Shape, out: Shape, dtype: DType) -> Geometry:
    """Return the geometry of the convolution from the output (``image``) to the data (``grid``)."""
    kernel, stride, dilate, _ = window(params, "Deconvolution")
    pad, _ = _padding(params, data[2:])
    return geometry(
        out, data[1], kernel, stride, dilate, pad, data[2:], params["num_group"], dtype, params["workspace"]
    )


@workspace_kernel
def _forward(ctx: Workspace, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    data, weight = inputs[:2]
    geo = sizes(p, data.shape, out.shape, data.dtype)
    adjoint(ctx, geo, None, data, weight, out, None)
    if not p["no_bias"]:
        ctx.xp.add(out, inputs[2].reshape(1, -1, *[1] * (out.ndim - 2)), out=out)


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    geo = sizes(params, inputs[0].shape, outputs[0].shape, inputs[0].dtype)
    return geo.backward_nbytes(weight=False)


@workspace_kernel
def _backward(
    ctx: Workspace, p: Params, ograd: RawArray, data: RawArray, weight: RawArray, *outputs: RawArray | None
) -> None:
    if not p["no_bias"] and outputs[2] is not None:
        axes = (0, *range(2, ograd.ndim))
        ctx.xp.sum(ograd, axis=axes, dtype=accumulator(ograd.dtype), out=outputs[2])
    geo = sizes(p, data.shape, ograd.shape, data.dtype)
    if outputs[1] is not None:
        adjoint(ctx, geo, ograd, data, None, None, outputs[1])
    if outputs[0] is not None:
        correlate(ctx, geo, ograd, weight, None, outputs[0])


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    geo = sizes(params, inputs[1].shape, inputs[0].shape, inputs[1].dtype)
    return geo.backward_nbytes(data=False) + geo.forward_nbytes()


register(
    Op(
        name="Deconvolution",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=same_dtype,
        params=_PARAMS,
        inputs=_inputs,
        positions=("data", "weight", "bias"),
        gradient=grad("_backward_Deconvolution", "g0", "x0", "x1"),
        workspace=_workspace,
        doc="Transposed convolution of data (batch, channels, *spatial) with weight (channels, num_filter / num_group, "
        "*kernel), plus bias (num_filter,): (batch, num_filter, *enlarged).",
    )
)
backward(
    "Deconvolution",
    _backward,
    ("ograd", "data", "weight"),
    grad_inputs=lambda params: tuple(range(len(_inputs(params)))),
    params=_PARAMS,
    workspace=_backward_workspace,
)
