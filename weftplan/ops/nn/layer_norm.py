"""LayerNorm and InstanceNorm, and the kernels that they share with GroupNorm.

The kernels view the data as (batch, rows, features, inner) and normalise it over the features. LayerNorm's view is
(before axis, 1, axis, after axis), with a gamma per feature. InstanceNorm's view is (batch, channels, space, 1), with a
gamma per row. Outputs 1 and 2 are mean and standard deviation (float32 for float16 data), so that the backward pass
need not compute them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from weftplan.errors import ShapeError
from weftplan.ops.core.forms import ArrayKernel, ScratchSpecs, kernel
from weftplan.ops.core.kernels import accumulator, row_blocks, rows_per_block
from weftplan.ops.core.params import p_bool, p_float, p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import (
    DTypes,
    Shapes,
    backward,
    floats_only,
    merge_dtype,
    merge_shape,
    normalize_axis,
)
from weftplan.ops.core.schema import (
    EntryRef,
    GradientBuilder,
    InplacePair,
    Op,
    Param,
    Params,
    Shape,
    ShapeRule,
    SpecLike,
)
from weftplan.support.array_types import ArrayModule, RawArray

_LAYER = (
    Param("axis", p_int, -1, "The axis along which mean and deviation are taken."),
    Param("eps", p_float, 1e-5, "Added to the variance."),
    Param("output_mean_var", p_bool, False, "True: mean and standard deviation are visible outputs."),
)
_INSTANCE = (Param("eps", p_float, 1e-3, "Added to the variance."),)

View = Callable[[Params, Shape], tuple[Shape, Shape]]
"""``view(params, shape)`` returns (the data's shape in four dimensions, the shape of gamma that broadcasts to it)."""


def layer_view(params: Params, shape: Shape) -> tuple[Shape, Shape]:
    axis = params["axis"] % len(shape)
    size = shape[axis]
    return (math.prod(shape[:axis]), 1, size, math.prod(shape[axis + 1 :])), (1, 1, size, 1)


def instance_view(params: Params, shape: Shape) -> tuple[Shape, Shape]:
    return (shape[0], shape[1], math.prod(shape[2:]), 1), (1, shape[1], 1, 1)


def _infer(params: Params, ins: Shapes, outs: Shapes, axis: int, name: str, *, keep: bool) -> tuple[Shapes, Shapes]:
    """Infer the shapes of data, of gamma and beta (extent of ``axis``,), and of the statistics.

    With ``keep``, the statistics have the data's shape with extent 1 on ``axis``, else that of its first two axes.
    """
    data = merge_shape(ins[0], outs[0], f"{name}: data and output")
    vector = merge_shape(ins[1], ins[2], f"{name}: gamma and beta")
    if data is None:
        return [None, vector, vector], outs
    axis = normalize_axis(axis, len(data), f"{name}: axis")
    vector = merge_shape((data[axis],), vector, f"{name}: axis {axis} of data {data}, and gamma")
    assert vector is not None
    data = (*data[:axis], vector[0], *data[axis + 1 :])
    small = (*data[:axis], 1, *data[axis + 1 :]) if keep else data[:2]
    statistics = [merge_shape(small, shape, f"{name}: statistics of data {data}") for shape in outs[1:]]
    return [data, vector, vector], [data, *statistics]


def _layer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    return _infer(params, ins, outs, params["axis"], "LayerNorm", keep=True)


def _instance_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    if ins[0] is not None and len(ins[0]) < 3:
        raise ShapeError(f"InstanceNorm: data has shape {ins[0]}, expected batch, channels and space")
    return _infer(params, ins, outs, 1, "InstanceNorm", keep=False)


def _infer_dtype(params: Params, ins: DTypes, outs: DTypes) -> tuple[DTypes, DTypes]:
    data = outs[0]
    for dtype in ins:
        data = merge_dtype(data, dtype, "normalisation: data, gamma, beta and output")
    statistics = None if data is None else accumulator(data)
    return [data] * 3, [data, *[merge_dtype(statistics, dtype, "normalisation: statistics") for dtype in outs[1:]]]


def _blocks(view: View, params: Params, data: SpecLike) -> ScratchSpecs:
    """Return the scratch specs of either pass: two blocks of data, and two of the blocks' statistics."""
    shape, _ = view(params, data.shape)
    step, acc = rows_per_block(shape), accumulator(data.dtype)
    return [((step, *shape[1:]), acc)] * 2 + [((step, shape[1], 1, shape[3]), acc)] * 2


def _vectors(view: View, params: Params, data: SpecLike) -> ScratchSpecs:
    """Return the specs of the backward pass's sums: the gradients of gamma and beta, and one block's share."""
    return [(view(params, data.shape)[1], accumulator(data.dtype))] * 3


def _forward(view: View) -> ArrayKernel:
    @kernel(scratch=lambda p, data, *specs: _blocks(view, p, data))
    def compute(
        xp: ArrayModule,
        p: Params,
        data: RawArray,
        gamma: RawArray,
        beta: RawArray,
        out: RawArray | None,
        means: RawArray | None,
        stds: RawArray | None,
        *buffers: RawArray,
    ) -> None:
        centred_buffer, square_buffer, mean_buffer, std_buffer = buffers
        shape, vector = view(p, data.shape)
        acc = centred_buffer.dtype
        data, gamma, beta = data.reshape(shape), gamma.reshape(vector), beta.reshape(vector)
        small = (shape[0], shape[1], 1, shape[3])
        out = None if out is None else out.reshape(shape)
        statistics = [None if array is None else array.reshape(small) for array in (means, stds)]
        for rows in row_blocks(shape):
            x = data[rows]
            centred, square = centred_buffer[: x.shape[0]], square_buffer[: x.shape[0]]
            mean, std = mean_buffer[: x.shape[0]], std_buffer[: x.shape[0]]
            xp.sum(x, axis=2, dtype=acc, out=mean, keepdims=True)
            xp.multiply(mean, 1.0 / shape[2], out=mean)
            xp.subtract(x, mean, out=centred)
            xp.multiply(centred, centred, out=square)
            xp.sum(square, axis=2, out=std, keepdims=True)
            xp.multiply(std, 1.0 / shape[2], out=std)
            xp.add(std, p["eps"], out=std)
            xp.sqrt(std, out=std)
            for target, value in zip(statistics, (mean, std), strict=True):
                if target is not None:
                    target[rows] = value
            if out is not None:
                xp.divide(centred, std, out=centred)
                xp.multiply(centred, gamma, out=centred)
                xp.add(centred, beta, out=out[rows], casting="same_kind")

    return compute


def _backward(view: View) -> ArrayKernel:
    """Return the backward kernel, which computes the gradients of data, gamma and beta.

    With n = (data - mean) / std and h = ograd · gamma, the data's gradient is (h - mean(h) - n · mean(h · n)) / std.
    """

    @kernel(scratch=lambda p, ograd, data, *specs: [*_blocks(view, p, data), *_vectors(view, p, data)])
    def compute(
        xp: ArrayModule,
        p: Params,
        ograd: RawArray,
        data: RawArray,
        gamma: RawArray,
        means: RawArray,
        stds: RawArray,
        dgrad: RawArray | None,
        d_gamma: RawArray | None,
        d_beta: RawArray | None,
        *buffers: RawArray,
    ) -> None:
        normal_buffer, product_buffer, mean_buffer, slope_buffer, gamma_sum, beta_sum, part = buffers
        shape, vector = view(p, data.shape)
        acc = part.dtype
        small = (shape[0], shape[1], 1, shape[3])
        ograd, data = ograd.reshape(shape), data.reshape(shape)
        gamma, means, stds = gamma.reshape(vector), means.reshape(small), stds.reshape(small)
        dgrad = None if dgrad is None else dgrad.reshape(shape)
        gamma_sum.fill(0)
        beta_sum.fill(0)
        axes = tuple(axis for axis in range(4) if axis == 0 or vector[axis] == 1)
        for rows in row_blocks(shape):
            g, std = ograd[rows], stds[rows]
            count = g.shape[0]
            normal, product = normal_buffer[:count], product_buffer[:count]
            mean, slope = mean_buffer[:count], slope_buffer[:count]
            xp.subtract(data[rows], means[rows], out=normal)
            xp.divide(normal, std, out=normal)
            xp.multiply(g, normal, out=product)
            xp.sum(product, axis=axes, out=part, keepdims=True)
            xp.add(gamma_sum, part, out=gamma_sum)
            xp.sum(g, axis=axes, dtype=acc, out=part, keepdims=True)
            xp.add(beta_sum, part, out=beta_sum)
            if dgrad is None:
                continue
            xp.multiply(product, gamma, out=product)
            xp.sum(product, axis=2, out=slope, keepdims=True)
            xp.multiply(slope, 1.0 / shape[2], out=slope)
            xp.multiply(g, gamma, out=product, dtype=acc)
            xp.sum(product, axis=2, out=mean, keepdims=True)
            xp.multiply(mean, 1.0 / shape[2], out=mean)
            xp.subtract(product, mean, out=product)
            xp.multiply(normal, slope, out=normal)
            xp.subtract(product, normal, out=product)
            xp.divide(product, std, out=dgrad[rows], casting="same_kind")
        for target, total in zip((d_gamma, d_beta), (gamma_sum, beta_sum), strict=True):
            if target is not None:
                target[...] = total.reshape(-1)

    return compute


def register_norm(
    name: str,
    view: View,
    params: tuple[Param, ...],
    shape_rule: ShapeRule,
    visible: int | Callable[[Params], int],
    doc: str,
) -> None:
    """Register the normalisation ``name`` and its backward operator; ``view`` is a :data:`View`."""

    def gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
        reads = [builder.input(0), builder.input(1), builder.output(1), builder.output(2)]
        return builder.node(f"_backward_{name}", [builder.ograd(), *reads])

    register(
        Op(
            name=name,
            forward=_forward(view),
            infer_shape=shape_rule,
            infer_dtype=floats_only(name, _infer_dtype),
            params=params,
            inputs=("data", "gamma", "beta"),
            outputs=("output", "mean", "std"),
            visible_outputs=visible,
            gradient=gradient,
            inplace=(InplacePair(0, 0),),
            doc=doc,
        )
    )
    backward(
        name,
        _backward(view),
        ("ograd", "data", "gamma", "mean", "std"),
        grad_inputs=(0, 1, 2),
        params=params,
        inplace=(InplacePair(0, 0), InplacePair(1, 0)),
    )


register_norm(
    "LayerNorm",
    layer_view,
    _LAYER,
    _layer_shape,
    lambda params: 3 if params["output_mean_var"] else 1,
    "(data - mean) / sqrt(var + eps) · gamma + beta along one axis, in the shape of data; gamma and beta have the "
    "extent of the axis.",
)
register_norm(
    "InstanceNorm",
    instance_view,
    _INSTANCE,
    _instance_shape,
    1,
    "(data - mean) / sqrt(var + eps) · gamma + beta over the space of each channel of each sample, in the shape of "
    "data; gamma and beta are (channels,).",
)
