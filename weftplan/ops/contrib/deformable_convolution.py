"""DeformableConvolution and ModulatedDeformableConvolution: convolutions with learned sample offsets.

``offset`` (batch, groups · elements · 2, height, width) has, for each window, the pixels by which each element moves
down and to the right. Bilinear interpolation gives the element's value. Channels are split among the groups. The plain
operator is that of Dai et al., "Deformable Convolutional Networks" (2017). In the modulated operator, of Zhu et al.
(2018), ``mask`` (batch, groups · elements, height, width) multiplies the elements.

The operators differ at the border, as in MXNet 1.9.1. The plain operator reads the last pixel between extent - 1 and
extent, and 0 outside of [0, extent). The modulated operator interpolates to 0 over one pixel around the image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.contrib.deformable_columns import Columns, DeformableSizes, cut, masked
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.params import p_int
from weftplan.ops.core.products import multiply
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, floats_only, grad, merge_shape
from weftplan.ops.core.schema import (
    DType,
    Kernel,
    Op,
    Param,
    Params,
    Shape,
    ShapeRule,
    TensorSpec,
    Workspace,
    WorkspaceRule,
)
from weftplan.ops.nn.convolution import convolution_params, convolution_shape, window
from weftplan.support.array_types import ArrayModule, RawArray

PLAIN, MODULATED = "DeformableConvolution", "ModulatedDeformableConvolution"

_GROUPS = Param("num_deformable_group", p_int, 1, "Number of groups of channels; each group has its own offsets.")
_PARAMS = tuple(
    p for p in convolution_params(1024, no_bias=False, after_group=(_GROUPS,)) if not p.name.startswith("cudnn")
)


def _sizes(name: str, params: Params, data: Shape, dtype: DType, out: Shape) -> DeformableSizes:
    return DeformableSizes(
        data[0],
        data[1],
        data[2:],
        out[2:],
        *window(params, name),
        filters=params["num_filter"],
        groups=params["num_group"],
        moved=params["num_deformable_group"],
        dtype=dtype,
        modulated=name == MODULATED,
    )


# ------------------------------------------------------------------------------------------------------------- kernels


def _forward(name: str) -> Kernel:
    @workspace_kernel
    def compute(ctx: Workspace, p: Params, *arrays: RawArray) -> None:
        *inputs, out = arrays
        xp = ctx.xp
        data, offset, *masks = inputs[: 3 if name == MODULATED else 2]
        weight, *bias = inputs[2 + len(masks) :]
        sizes = _sizes(name, p, data.shape, data.dtype, out.shape)
        call = Columns(ctx, sizes, weight, backward=False)
        for n in range(sizes.batch):
            image = call.image(data[n])
            target = out[n].reshape(sizes.filters, -1)
            for windows, columns, grid in call.tiles():
                call.sample(image, offset[n], windows, columns)
                if masks:
                    masked(xp, sizes, masks[0][n], windows, columns)
                count = grid.shape[1]
                multiply(
                    xp, call.weight, columns.reshape(sizes.groups, -1, count), grid.reshape(sizes.groups, -1, count)
                )
                if bias:
                    xp.add(grid, bias[0][:, None], out=grid, casting="same_kind")
                xp.copyto(target[:, windows], grid, casting="same_kind")

    return compute


def _mask_gradient(
    xp: ArrayModule, call: Columns, columns: RawArray, of_columns: RawArray, target: RawArray, windows: slice
) -> None:
    """Write the mask's gradient at ``windows`` to ``target``.

    It is (groups, taps, windows): the sum over a group's channels of the samples ``columns`` times ``of_columns``.
    """
    sizes = call.sizes
    count = windows.stop - windows.start
    total, product = cut(call.more[-1], 2, sizes.taps, count)
    channels = sizes.channels // sizes.moved
    for group in range(sizes.moved):
        total.fill(0)
        for channel in range(group * channels, (group + 1) * channels):  # one fixed order of additions
            xp.multiply(columns[channel], of_columns[channel], out=product)
            xp.add(total, product, out=total)
        xp.copyto(target.reshape(sizes.moved, sizes.taps, -1)[group, :, windows], total, casting="same_kind")


def _backward(name: str) -> Kernel:
    @workspace_kernel
    def compute(ctx: Workspace, p: Params, *arrays: Any) -> None:
        xp = ctx.xp
        masks = arrays[3:4] if name == MODULATED else ()
        ograd, data, offset, weight = *arrays[:3], arrays[3 + len(masks)]
        outputs = arrays[4 + len(masks) :]
        of_data, of_offset, *of_masks = outputs[: 2 + len(masks)]
        of_weight, *of_bias = outputs[2 + len(masks) :]
        sizes = _sizes(name, p, data.shape, data.dtype, ograd.shape)
        if of_bias and of_bias[0] is not None:
            xp.sum(ograd, axis=(0, 2, 3), dtype=sizes.acc, out=of_bias[0])
        if all(array is None for array in (of_data, of_offset, of_weight, *of_masks)):
            return
        call = Columns(ctx, sizes, weight, backward=True)
        space, of_points_space, of_image, sums = call.more[:4]
        product = sums[: weight.size].reshape(call.weight.shape)
        total = sums[weight.size :].reshape(call.weight.shape) if sizes.acc != sizes.dtype else of_weight
        if of_weight is not None:
            total = total.reshape(call.weight.shape)
            total.fill(0)
        for n in range(sizes.batch):
            image = call.image(data[n])
            if of_data is not None:
                of_image = of_data[n] if sizes.acc == sizes.dtype else of_image.reshape(image.shape)
                of_image.fill(0)
            for windows, columns, grid in call.tiles():
                count = grid.shape[1]
                of_columns = cut(space, *columns.shape)
                xp.copyto(grid, ograd[n].reshape(sizes.filters, -1)[:, windows])
                by_group = grid.reshape(sizes.groups, -1, count)
                multiply(xp, call.weight.swapaxes(1, 2), by_group, of_columns.reshape(sizes.groups, -1, count))
                call.sample(image, offset[n], windows, columns)
                if masks:
                    if of_masks[0] is not None:
                        _mask_gradient(xp, call, columns, of_columns, of_masks[0][n], windows)
                    for array in (columns, of_columns):
                        masked(xp, sizes, masks[0][n], windows, array)
                if of_weight is not None:
                    multiply(xp, by_group, columns.reshape(sizes.groups, -1, count).swapaxes(1, 2), product)
                    xp.add(total, product, out=total)
                if of_data is None and of_offset is None:
                    continue
                of_points = None if of_offset is None else cut(of_points_space, 2, sizes.taps, count)
                for group, channels, points in call.moved(offset[n], windows):
                    call.sampler.backward(
                        of_columns[channels].reshape(sizes.channels // sizes.moved, -1),
                        image[channels],
                        points.reshape(2, -1),
                        None if of_data is None else of_image[channels],
                        None if of_points is None else of_points.reshape(2, -1),
                        add=True,
                    )
                    if of_points is not None:
                        call.still(points, of_points)
                        target = of_offset[n].reshape(sizes.moved, sizes.taps, 2, -1)[group, ..., windows]
                        for axis in (0, 1):
                            xp.copyto(target[:, 1 - axis], of_points[axis], casting="same_kind")
            if of_data is not None and sizes.acc != sizes.dtype:
                xp.copyto(of_data[n], of_image, casting="same_kind")
        if of_weight is not None and sizes.acc != sizes.dtype:
            xp.copyto(of_weight.reshape(total.shape), total, casting="same_kind")

    return compute


# -------------------------------------------------------------------------------------------------------- declarations


def _shape_rule(name: str) -> ShapeRule:
    def infer(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
        if len(params["kernel"]) != 2:
            raise ParameterError(f"{name}: kernel={params['kernel']}: expected a height and a width")
        moved, taps = params["num_deformable_group"], math.prod(params["kernel"])
        if moved < 1:
            raise ParameterError(f"{name}: num_deformable_group={moved}: expected at least 1")
        plane_counts = [2 * taps * moved, taps * moved][: 1 + (name == MODULATED)]
        behind = 1 + len(plane_counts)
        grid: Shape | None = None
        for position, planes in enumerate(plane_counts, start=1):
            what = f"{name}: {('offset', 'mask')[position - 1]} (batch, {planes}, *output)"
            shape = merge_shape((0, planes, 0, 0), ins[position], what)
            assert shape is not None
            grid = merge_shape(grid, (shape[0], 0, *shape[2:]), f"{name}: offset and mask")
        offset_grid = None if ins[1:behind] == [None] * len(plane_counts) else grid
        out = outs[0] if offset_grid is None else merge_shape(offset_grid, outs[0], f"{name}: offset and output")
        new, inferred = convolution_shape(params, [ins[0], *ins[behind:]], [out], name)
        data = new[0]
        if data is not None and data[1] % moved:
            raise ShapeError(f"{name}: data {data}: expected a multiple of num_deformable_group={moved} channels")
        out_shape = inferred[0]
        moves: Shapes = [
            None if out_shape is None else (out_shape[0], planes, *out_shape[2:]) for planes in plane_counts
        ]
        return [data, *moves, *new[1:]], inferred

    return infer


def _tensors(name: str) -> tuple[str, ...]:
    return ("data", "offset", "mask", "weight") if name == MODULATED else ("data", "offset", "weight")


def _inputs(name: str) -> Callable[[Params], tuple[str, ...]]:
    return lambda params: _tensors(name) if params["no_bias"] else (*_tensors(name), "bias")


def _workspace(name: str, *, backward: bool) -> WorkspaceRule:
    def workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        data, out = inputs[backward], inputs[0] if backward else outputs[0]
        return _sizes(name, params, data.shape, data.dtype, out.shape).nbytes(backward=backward)

    return workspace


def _declare(name: str, params: tuple[Param, ...], doc: str) -> None:
    uses = [f"x{k}" for k in range(len(_tensors(name)))]
    register(
        Op(
            name=f"_contrib_{name}",
            forward=_forward(name),
            infer_shape=_shape_rule(name),
            infer_dtype=floats_only(name),
            params=params,
            inputs=_inputs(name),
            gradient=grad(f"_backward_contrib_{name}", "g0", *uses),
            workspace=_workspace(name, backward=False),
            doc=doc,
        )
    )
    backward(
        f"_contrib_{name}",
        _backward(name),
        ("ograd", *_tensors(name)),
        grad_inputs=lambda values: tuple(range(len(_inputs(name)(values)))),
        params=params,
        workspace=_workspace(name, backward=True),
    )


_declare(
    PLAIN,
    _PARAMS,
    "Convolution of data (batch, channels, height, width) whose window elements are moved by offset "
    "(batch, groups * elements * 2, *output).",
)
_declare(
    MODULATED,
    (*_PARAMS[:-1], Param("im2col_step", p_int, 64, "Accepted, no effect."), _PARAMS[-1]),
    "Convolution of data (batch, channels, height, width) whose window elements are moved by offset "
    "(batch, groups * elements * 2, *output) and multiplied by mask (batch, groups * elements, *output).",
)
