"""BilinearResize2D and AdaptiveAvgPooling2D: images resized by weighted sums of pixels.

Both are separable: output = R · image · Cᵀ for each plane. A row of R has the weights of one output row, a row of C
those of one output column. The gradient is Rᵀ · output gradient · C. Thus no two threads add to the same element, and
sums have a fixed order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from weftplan.errors import ParameterError
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import accumulator, rows_per_block
from weftplan.ops.core.params import p_bool, p_enum, p_float, p_int, p_optional, p_shape
from weftplan.ops.core.products import multiply
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import DTypes, Shapes, backward, floats_only, merge_dtype, merge_shape, take_bytes
from weftplan.ops.core.schema import (
    DType,
    EntryRef,
    GradientBuilder,
    Kernel,
    Op,
    Param,
    Params,
    Shape,
    TensorSpec,
    Workspace,
)
from weftplan.support.array_types import RawArray

Weights = Callable[[Params, int, int], Any]
"""``weights(params, old, new)`` returns the matrix (new, old) of one axis, as a float64 NumPy array."""


@functools.lru_cache(maxsize=64)
def _bilinear(old: int, new: int, align_corners: bool) -> RawArray:
    matrix = np.zeros((new, old))
    for position in range(new):
        if new == 1:
            coordinate = 0.0  # with and without align_corners, as in MXNet 1.9.1
        elif align_corners:
            coordinate = position * (old - 1) / (new - 1)
        else:
            coordinate = max((position + 0.5) * old / new - 0.5, 0.0)
        low = min(int(coordinate), old - 1)
        high = min(low + 1, old - 1)
        share = coordinate - low
        matrix[position, low] += 1.0 - share
        matrix[position, high] += share
    return matrix


@functools.lru_cache(maxsize=64)
def _averages(old: int, new: int) -> RawArray:
    matrix = np.zeros((new, old))
    for position in range(new):
        start, stop = position * old // new, -(-(position + 1) * old // new)
        matrix[position, start:stop] = 1.0 / (stop - start)
    return matrix


# ------------------------------------------------------------------------------------------------------------- kernels


def _scratch(old: Shape, new: Shape, dtype: DType) -> list[tuple[Shape, DType]]:
    """Return the scratch specs: both matrices, and a block of planes between the two products.

    For float16, also return widened blocks of planes of ``old`` and of ``new``.
    """
    wide = accumulator(dtype)
    count = _planes(old, new)
    buffers: list[tuple[Shape, DType]] = [
        ((new[2], old[2]), wide),
        ((new[3], old[3]), wide),
        ((count, old[2], new[3]), wide),
    ]
    if wide != dtype:
        buffers += [((count, *old[2:]), wide), ((count, *new[2:]), wide)]
    return buffers


def _planes(old: Shape, new: Shape) -> int:
    """Return the number of planes per block."""
    widest = max(old[2] * old[3], new[2] * new[3], old[2] * new[3])
    return rows_per_block((old[0] * old[1], widest))


def _matrices(ctx: Workspace, weights: Weights, params: Params, old: Shape, new: Shape, dtype: DType) -> list[RawArray]:
    buffers = [ctx.take(*spec) for spec in _scratch(old, new, dtype)]
    for matrix, axis in zip(buffers, (2, 3), strict=False):
        matrix[...] = ctx.xp.asarray(weights(params, old[axis], new[axis]))
    return buffers


def _product(weights: Weights, *, backward: bool) -> Kernel:
    """Return a kernel that computes rows · image · columnsᵀ of each plane; ``backward``: rowsᵀ · image · columns."""

    @workspace_kernel
    def compute(ctx: Workspace, p: Params, *arrays: Any) -> None:
        *inputs, target = arrays
        xp, source = ctx.xp, inputs[0]
        old, new = (target, source) if backward else (source, target)
        rows, columns, between, *wide = _matrices(ctx, weights, p, old.shape, new.shape, target.dtype)
        read, written = (1, 0) if backward else (0, 1)
        x, y = source.reshape(-1, *source.shape[2:]), target.reshape(-1, *target.shape[2:])
        for start in range(0, x.shape[0], between.shape[0]):
            image, out = x[start : start + between.shape[0]], y[start : start + between.shape[0]]
            count = image.shape[0]
            middle, result = between[:count], out
            if wide:
                xp.copyto(wide[read][:count], image)
                image, result = wide[read][:count], wide[written][:count]
            if backward:
                multiply(xp, rows.T, image, middle)
                multiply(xp, middle.reshape(-1, middle.shape[2]), columns, result.reshape(-1, result.shape[2]))
            else:
                multiply(xp, image.reshape(-1, image.shape[2]), columns.T, middle.reshape(-1, middle.shape[2]))
                multiply(xp, rows, middle, result)
            if wide:
                xp.copyto(out, result, casting="same_kind")

    return compute


def _forward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return take_bytes(*_scratch(inputs[0].shape, outputs[0].shape, outputs[0].dtype))


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    return take_bytes(*_scratch(outputs[0].shape, inputs[0].shape, outputs[0].dtype))


# ----------------------------------------------------------------------------------------------------------- inference


def _resized_shape(name: str, data: Shape | None, out: Shape | None, size: tuple[int, int]) -> tuple[Shape, Shape]:
    """Return the completed shapes of data and output, both (batch, channels, height, width).

    ``size`` is the output's (height, width); 0 is unknown.
    """
    image = merge_shape((0, 0, 0, 0), data, f"{name}: data (batch, channels, height, width)")
    resized = merge_shape((0, 0, *size), out, f"{name}: output of this size, and given")
    assert image is not None
    assert resized is not None
    lead = merge_shape(image[:2], resized[:2], f"{name}: batch and channels of data and output")
    assert lead is not None
    return (*lead, *image[2:]), (*lead, *resized[2:])


_MODES = ("size", "odd_scale", "like", "to_even_down", "to_even_up", "to_odd_down", "to_odd_up")
_RESIZE = (
    Param("height", p_int, 1, "height of the output (mode size)"),
    Param("width", p_int, 1, "width of the output (mode size)"),
    Param("scale_height", p_optional(p_float), None, "output height / data height (modes size and odd_scale)"),
    Param("scale_width", p_optional(p_float), None, "output width / data width (modes size and odd_scale)"),
    Param("mode", p_enum(*_MODES), "size", "how the size of the output is computed"),
    Param("align_corners", p_bool, True, "True: the corner pixels of data and output coincide"),
)


def _side(params: Params, old: int, side: str) -> int:
    """Return the output's height or width (``side``) for the data's, ``old``; 0 if it needs an unknown ``old`` (0)."""
    mode, scale = params["mode"], params[f"scale_{side}"]
    if scale is not None and not 0 < scale < math.inf:
        raise ParameterError(f"BilinearResize2D: scale_{side}={scale}: expected a positive number")
    if mode == "size" and scale is None:
        new: int = params[side]
    elif old == 0:
        return 0
    elif mode == "size":
        new = int(scale * old)
    elif mode == "odd_scale":
        if scale is None:
            raise ParameterError(f"BilinearResize2D: mode odd_scale needs scale_{side}")
        new = int(old * scale) if old % 2 == 0 else int((old - 1) * scale) + 1
    else:
        odd = "odd" in mode
        new = old if old % 2 == odd else old + (1 if mode.endswith("up") else -1)
    if new < 1:
        raise ParameterError(f"BilinearResize2D: the {side} of the output would be {new}, expected at least 1")
    return new


def _resize_inputs(params: Params) -> tuple[str, ...]:
    return ("data", "like") if params["mode"] == "like" else ("data",)


def _resize_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data = ins[0] or (0, 0, 0, 0)
    if params["mode"] == "like":
        like = merge_shape((0, 0, 0, 0), ins[1], "BilinearResize2D: like (batch, channels, height, width)")
        assert like is not None
        data, out = _resized_shape("BilinearResize2D", ins[0], outs[0], (like[2], like[3]))
        return [data, (*like[:2], *out[2:])], [out]
    size = (_side(params, data[2], "height"), _side(params, data[3], "width")) if len(data) == 4 else (0, 0)
    data, out = _resized_shape("BilinearResize2D", ins[0], outs[0], size)
    return [data], [out]


def _resize_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = merge_dtype(ins[0], outs[0], "BilinearResize2D: data and output")
    return [data, *ins[1:]], [data]


def _resize_gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    gradient = builder.node("_backward_contrib_BilinearResize2D", [builder.ograd()])
    return [*gradient, *[None] * (builder.num_inputs - 1)]


def _resize_weights(params: Params, old: int, new: int) -> RawArray:
    return _bilinear(old, new, params["align_corners"])


register(
    Op(
        name="_contrib_BilinearResize2D",
        forward=_product(_resize_weights, backward=False),
        infer_shape=_resize_shape,
        infer_dtype=floats_only("BilinearResize2D", _resize_dtype),
        params=_RESIZE,
        inputs=_resize_inputs,
        positions=("data", "like"),
        gradient=_resize_gradient,
        ignored_inputs=lambda params: (1,) if params["mode"] == "like" else (),
        workspace=_forward_workspace,
        doc="Images (batch, channels, height, width) resized to (batch, channels, *size) by bilinear interpolation.",
    )
)
backward(
    "_contrib_BilinearResize2D",
    _product(_resize_weights, backward=True),
    ("ograd",),
    params=_RESIZE,
    workspace=_backward_workspace,
)

_ADAPTIVE = (Param("output_size", p_shape, (), "height and width of the output, or one number for both (default 1)"),)


def _adaptive_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    size: Shape = params["output_size"] or (1,)
    if len(size) > 2 or min(size) < 1:
        raise ParameterError(f"AdaptiveAvgPooling2D: output_size={size}: expected one or two positive numbers")
    data, out = _resized_shape("AdaptiveAvgPooling2D", ins[0], outs[0], (size[0], size[-1]))
    return [data], [out]


def _adaptive_weights(params: Params, old: int, new: int) -> RawArray:
    return _averages(old, new)


register(
    Op(
        name="_contrib_AdaptiveAvgPooling2D",
        forward=_product(_adaptive_weights, backward=False),
        infer_shape=_adaptive_shape,
        infer_dtype=floats_only("AdaptiveAvgPooling2D"),
        params=_ADAPTIVE,
        gradient=lambda builder: builder.node("_backward_contrib_AdaptiveAvgPooling2D", [builder.ograd()]),
        workspace=_forward_workspace,
        doc="Averages over windows that cover images (batch, channels, height, width) evenly: "
        "(batch, channels, *output_size).",
    )
)
backward(
    "_contrib_AdaptiveAvgPooling2D",
    _product(_adaptive_weights, backward=True),
    ("ograd",),
    params=_ADAPTIVE,
    workspace=_backward_workspace,
)
