"""Convolution over one, two or three spatial axes, channels first.

This module owns the parameters, which Deconvolution shares, and the shape rule. ``conv_gemm.py`` computes with NumPy.

``planner/symbolic/node_scratch.py`` chooses the algorithm of a node among the registered implementations
(``ops/core/implementations.py``, ``kernels/compiled/convolution``, ``kernels/cuda``), and measures them if the user
enables that (``ops/autotune.py``). The parameter ``workspace`` limits NumPy's tiles (``conv_geometry.py``), cuDNN's
algorithms (``kernels/cuda/cudnn_algorithms.py``) and measured choices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from operator import itemgetter

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.params import p_bool, p_enum, p_int, p_optional, p_shape
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, grad, merge_shape, same_dtype
from weftplan.ops.core.schema import Op, Param, Params, Shape, TensorSpec, Workspace
from weftplan.ops.nn.conv_gemm import adjoint, correlate
from weftplan.ops.nn.conv_geometry import Geometry, geometry, output_extent
from weftplan.support.array_types import RawArray

_TUNE = "How to choose the implementation on a CPU, cuDNN's algorithm on a GPU; overrides MXNET_CUDNN_AUTOTUNE_DEFAULT."
LAYOUTS = ("NCW", "NCHW", "NCDHW")


def convolution_params(
    workspace: int, *, no_bias: bool, after_pad: tuple[Param, ...] = (), after_group: tuple[Param, ...] = ()
) -> tuple[Param, ...]:
    """Return the parameters of the convolutions: different defaults, and further parameters between the common ones."""
    return (
        Param("kernel", p_shape, doc="Extents of the kernel; their number is the number of spatial axes."),
        Param("stride", p_shape, (), "Steps between windows (default 1)."),
        Param("dilate", p_shape, (), "Steps between kernel positions (default 1)."),
        Param("pad", p_shape, (), "Zeros on either side of each axis (default 0)."),
        *after_pad,
        Param("num_filter", p_int, doc="Number of channels of the output."),
        Param("num_group", p_int, 1, "Number of groups of channels; each group is convolved separately."),
        *after_group,
        Param("workspace", p_int, workspace, "Limit in MiB of a tile's column matrix, or of an algorithm's scratch."),
        Param("no_bias", p_bool, no_bias, "True: no bias input."),
        Param("cudnn_tune", p_optional(p_enum("fastest", "limited_workspace", "off")), None, _TUNE),
        Param("cudnn_off", p_bool, False, "True: a GPU computes by cuBLAS instead of cuDNN."),
        Param("layout", p_optional(p_enum(*LAYOUTS, "NHWC", "NDHWC")), None, "Channels first only."),
    )


_PARAMS = convolution_params(1024, no_bias=False)


def window(params: Params, what: str) -> tuple[Shape, Shape, Shape, Shape]:
    """Return the checked kernel, stride, dilate and pad, defaults filled in; ``what`` is the operator for messages.

    Raises:
        ParameterError: a value is out of range or has the wrong length, or the layout has channels last.
    """
    return _window(what, *_WINDOW(params))


_WINDOW = itemgetter("kernel", "stride", "dilate", "pad", "layout", "num_filter", "num_group", "workspace")


@functools.lru_cache(maxsize=1024)
def _window(
    what: str, kernel: Shape, stride: Shape, dilate: Shape, pad: Shape, layout: str | None, filters: int, groups: int,
    workspace: int,
) -> tuple[Shape, Shape, Shape, Shape]:  # fmt: skip
    """Return the result of :func:`window`, cached because a bind needs it about ten times per layer."""
    rank = len(kernel)
    if not 1 <= rank <= 3 or min(kernel) < 1:
        raise ParameterError(f"{what}: kernel={kernel}: expected one to three positive extents")
    filled = []
    for name, values, default, least in (("stride", stride, 1, 1), ("dilate", dilate, 1, 1), ("pad", pad, 0, 0)):
        value = values or (default,) * rank
        if len(value) != rank or min(value) < least:
            raise ParameterError(f"{what}: {name}={value}: expected {rank} numbers of at least {least}, as {kernel=}")
        filled.append(value)
    if layout is not None and layout != LAYOUTS[rank - 1]:
        raise ParameterError(f"{what}: layout={layout}: expected {LAYOUTS[rank - 1]} for {kernel=}")
    if filters < 1 or groups < 1 or filters % groups:
        raise ParameterError(f"{what}: num_filter={filters} is not a positive multiple of num_group={groups}")
    if workspace < 0:
        raise ParameterError(f"{what}: workspace={workspace}: expected MiB of at least 0")
    return kernel, filled[0], filled[1], filled[2]


def check_channels(channels: int, groups: int, data: Shape, what: str) -> None:
    """Raise ShapeError unless ``channels`` of ``data`` (0: unknown) is a multiple of ``groups``."""
    if channels % groups:
        raise ShapeError(f"{what}: data {data} has {channels} channels, not a multiple of num_group={groups}")


def _inputs(params: Params) -> tuple[str, ...]:
    return ("data", "weight") if params["no_bias"] else ("data", "weight", "bias")


def convolution_shape(params: Params, ins: Shapes, outs: Shapes, what: str = "Convolution") -> tuple[Shapes, Shapes]:
    """Infer the shapes of data, weight, bias (unless ``no_bias``) and output from each other."""
    kernel, stride, dilate, pad = window(params, what)
    filters, groups = params["num_filter"], params["num_group"]
    rank = len(kernel)
    data = merge_shape((0,) * (rank + 2), ins[0], f"{what}: data with {rank} spatial axes (kernel={kernel})")
    out = merge_shape((0, filters, *(0,) * rank), outs[0], f"{what}: output with num_filter={filters}")
    weight = merge_shape((filters, 0, *kernel), ins[1], f"{what}: weight (num_filter, channels / group, *kernel)")
    assert data is not None
    assert out is not None
    assert weight is not None
    check_channels(data[1], groups, data, what)
    weight = merge_shape(
        (filters, data[1] // groups, *kernel), weight, f"{what}: weight needed for data {data}, and given"
    )
    assert weight is not None
    extents, grid = [], []
    for axis in range(rank):
        extent, size = data[axis + 2], out[axis + 2]
        span = dilate[axis] * (kernel[axis] - 1) + 1
        if extent == 0 and size and stride[axis] == 1:
            extent = max(0, size + span - 1 - 2 * pad[axis])
        if extent:
            if extent + 2 * pad[axis] < span:
                raise ShapeError(
                    f"{what}: kernel {kernel} dilated by {dilate} spans {span} on spatial axis {axis}, "
                    f"more than data {data} with padding {pad}"
                )
            size = output_extent(extent, kernel[axis], stride[axis], pad[axis], dilate[axis])
        extents.append(extent)
        grid.append(size)
    batch = data[0] or out[0]
    new_out = merge_shape((batch, filters, *grid), out, f"{what}: output for data {data}, and given")
    new: Shapes = [(batch, data[1] or weight[1] * groups, *extents), weight]
    if not params["no_bias"]:
        new.append(merge_shape((filters,), ins[2], f"{what}: bias (num_filter,), and given"))
    has_shape = ins[0] is not None or outs[0] is not None
    return ([new[0] if has_shape else None, *new[1:]], [new_out if has_shape else outs[0]])


def sizes(params: Params, data: TensorSpec, out: Shape) -> Geometry:
    """Return the geometry of one call; ``out`` is the shape of the output, or of its gradient."""
    kernel, stride, dilate, pad = window(params, "Convolution")
    return geometry(
        data.shape,
        params["num_filter"],
        kernel,
        stride,
        dilate,
        pad,
        out[2:],
        params["num_group"],
        data.dtype,
        params["workspace"],
    )


@workspace_kernel
def _forward(ctx: Workspace, p: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    data, weight = inputs[:2]
    geo = sizes(p, TensorSpec(data.shape, data.dtype), out.shape)
    correlate(ctx, geo, data, weight, None if p["no_bias"] else inputs[2], out)


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return sizes(params, inputs[0], outputs[0].shape).forward_nbytes()


@workspace_kernel
def _backward(
    ctx: Workspace, p: Params, ograd: RawArray, data: RawArray, weight: RawArray, *outputs: RawArray | None
) -> None:
    if not p["no_bias"] and outputs[2] is not None:
        ctx.xp.sum(
            ograd, axis=(0, *range(2, ograd.ndim)), dtype=accumulator(ograd.dtype), out=outputs[2], keepdims=False
        )
    geo = sizes(p, TensorSpec(data.shape, data.dtype), ograd.shape)
    adjoint(ctx, geo, data, ograd, weight, outputs[0], outputs[1])


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return sizes(params, inputs[1], inputs[0].shape).backward_nbytes()


register(
    Op(
        name="Convolution",
        forward=_forward,
        infer_shape=convolution_shape,
        infer_dtype=same_dtype,
        params=_PARAMS,
        inputs=_inputs,
        positions=("data", "weight", "bias"),
        gradient=grad("_backward_Convolution", "g0", "x0", "x1"),
        workspace=_workspace,
        aliases=("Convolution_v1",),
        doc="Cross-correlation of data (batch, channels, *spatial) with weight (num_filter, channels / num_group, "
        "*kernel), plus bias (num_filter,): (batch, num_filter, *windows).",
    )
)
backward(
    "Convolution",
    _backward,
    ("ograd", "data", "weight"),
    grad_inputs=lambda params: tuple(range(len(_inputs(params)))),
    params=_PARAMS,
    workspace=_backward_workspace,
)
