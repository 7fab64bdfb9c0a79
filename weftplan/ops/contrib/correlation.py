"""Correlation of two feature maps (Dosovitskiy et al., "FlowNet", 2015).

Each output channel belongs to one displacement of the second map. Its value is the mean, over channels and a square of
pixels, of the products (or absolute differences) of the first map and the displaced second map. The kernels process one
image at a time, with one operation on strided views of the padded maps per displacement and pixel of the square.
"""

from __future__ import annotations

from collections.abc import Iterator

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core.forms import ScratchSpecs, kernel
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.params import p_bool, p_int
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, floats_only, grad, merge_shape
from weftplan.ops.core.schema import Op, Param, Params, Shape, SpecLike
from weftplan.support.array_types import ArrayModule, RawArray

_PARAMS = (
    Param("kernel_size", p_int, 1, "side of the square, odd"),
    Param("max_displacement", p_int, 1, "largest displacement in each direction, in pixels"),
    Param("stride1", p_int, 1, "pixels between neighbouring squares of the first map"),
    Param("stride2", p_int, 1, "pixels between neighbouring displacements"),
    Param("pad_size", p_int, 0, "pixels of zeros around both maps"),
    Param("is_multiply", p_bool, True, "True: products; False: absolute differences"),
)


def _check(params: Params) -> None:
    small = min(params["kernel_size"], params["stride1"], params["stride2"])
    if small < 1 or params["kernel_size"] % 2 == 0 or params["max_displacement"] < 0 or params["pad_size"] < 0:
        raise ParameterError(
            f"Correlation: expected an odd kernel_size, strides of at least 1 and no negative sizes, got "
            f"{ {param.name: params[param.name] for param in _PARAMS} }"
        )


def _radius(params: Params) -> int:
    """Return the number of displacements in each direction along an axis, not counting 0."""
    count: int = params["max_displacement"] // params["stride2"]
    return count


def _side(params: Params, extent: int) -> int:
    """Return the number of squares along one side of a map of ``extent`` pixels; 0 if ``extent`` is 0 (unknown)."""
    if extent == 0:
        return 0
    border = params["max_displacement"] + params["kernel_size"] // 2
    reach: int = extent + 2 * params["pad_size"] - 2 * border
    if reach < 1:
        raise ShapeError(
            f"Correlation: maps of {extent} pixels and pad_size={params['pad_size']} have no room for "
            f"max_displacement={params['max_displacement']} and kernel_size={params['kernel_size']}"
        )
    stride: int = params["stride1"]
    return -(-reach // stride)


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    _check(params)
    data = merge_shape((0, 0, 0, 0), ins[0], "Correlation: data1 (batch, channels, height, width)")
    data = merge_shape(data, ins[1], "Correlation: data1 and data2")
    assert data is not None
    channels = (2 * _radius(params) + 1) ** 2
    output = (data[0], channels, _side(params, data[2]), _side(params, data[3]))
    out = merge_shape(output, outs[0], f"output of Correlation of {data}")
    assert out is not None
    data = (out[0], *data[1:])
    return [data, data], [out]


def _padded(params: Params, shape: Shape) -> Shape:
    pad = 2 * params["pad_size"]
    return (shape[1], shape[2] + pad, shape[3] + pad)


def _inner(params: Params, padded: RawArray, shape: Shape) -> RawArray:
    """Return a view of the map without its padding; ``shape`` is that of the operator's data."""
    pad = params["pad_size"]
    return padded[:, pad : pad + shape[2], pad : pad + shape[3]]


def _squares(params: Params, out: Shape, map1: RawArray, map2: RawArray) -> Iterator[tuple[int, RawArray, RawArray]]:
    """Yield (output channel, view of the first map, view of the second) for each displacement and pixel of the square.

    ``map1`` and ``map2`` are padded maps (channels, height, width); ``out`` is the shape of the output.
    """
    radius, reach, step = _radius(params), params["max_displacement"], params["stride1"]

    def view(padded: RawArray, top: int, left: int) -> RawArray:
        rows = slice(top, top + (out[2] - 1) * step + 1, step)
        return padded[:, rows, left : left + (out[3] - 1) * step + 1 : step]

    for channel in range((2 * radius + 1) ** 2):
        down, right = (steps - radius for steps in divmod(channel, 2 * radius + 1))
        down, right = down * params["stride2"], right * params["stride2"]
        for row in range(reach, reach + params["kernel_size"]):
            for column in range(reach, reach + params["kernel_size"]):
                yield channel, view(map1, row, column), view(map2, row + down, column + right)


def _scratch(params: Params, data1: SpecLike, data2: object, out: SpecLike) -> ScratchSpecs:
    """Return the scratch specs: two padded maps, an output channel's terms, their sum over channels, and the total."""
    wide, padded, map_shape = accumulator(out.dtype), _padded(params, data1.shape), out.shape[2:]
    shapes = (padded, padded, (data1.shape[1], *map_shape), map_shape, map_shape)
    return [(shape, wide) for shape in shapes]


@kernel(scratch=_scratch)
def _forward(xp: ArrayModule, p: Params, data1: RawArray, data2: RawArray, out: RawArray, *buffers: RawArray) -> None:
    map1, map2, terms, part, total = buffers
    shape = data1.shape
    map1.fill(0)
    map2.fill(0)
    scale = 1.0 / (p["kernel_size"] ** 2 * shape[1])
    for item in range(shape[0]):
        xp.copyto(_inner(p, map1, shape), data1[item])
        xp.copyto(_inner(p, map2, shape), data2[item])
        current = -1
        for channel, a, b in _squares(p, out.shape, map1, map2):
            if channel != current:
                total.fill(0)
                current = channel
            if p["is_multiply"]:
                xp.multiply(a, b, out=terms)
            else:
                xp.subtract(a, b, out=terms)
                xp.absolute(terms, out=terms)
            xp.sum(terms, axis=0, out=part)
            xp.add(total, part, out=total)
            xp.multiply(total, scale, out=out[item, channel], casting="same_kind")


def _backward_scratch(params: Params, ograd: SpecLike, data1: SpecLike, *outputs: SpecLike | None) -> ScratchSpecs:
    wide, padded, map_shape = accumulator(ograd.dtype), _padded(params, data1.shape), ograd.shape[2:]
    return [*[(padded, wide)] * 4, ((data1.shape[1], *map_shape), wide), (map_shape, wide)]


@kernel(scratch=_backward_scratch)
def _backward(
    xp: ArrayModule,
    p: Params,
    ograd: RawArray,
    data1: RawArray,
    data2: RawArray,
    d_data1: RawArray | None,
    d_data2: RawArray | None,
    *scratch: RawArray,
) -> None:
    shape = data1.shape
    maps, gradients, terms, g = scratch[:2], scratch[2:4], scratch[4], scratch[5]
    for padded in maps:
        padded.fill(0)
    scale = 1.0 / (p["kernel_size"] ** 2 * shape[1])
    for item in range(shape[0]):
        for padded, source in zip(maps, (data1, data2), strict=True):
            xp.copyto(_inner(p, padded, shape), source[item])
        for padded in gradients:
            padded.fill(0)
        pairs = zip(_squares(p, ograd.shape, *maps), _squares(p, ograd.shape, *gradients), strict=True)
        for (channel, a, b), (_, of_a, of_b) in pairs:
            xp.multiply(ograd[item, channel], scale, out=g)
            if p["is_multiply"]:
                for target, partner in ((of_a, b), (of_b, a)):
                    xp.multiply(partner, g, out=terms)
                    xp.add(target, terms, out=target)
            else:
                xp.greater_equal(a, b, out=terms)  # if both are equal the slope is 1, as in MXNet
                xp.multiply(terms, 2.0, out=terms)
                xp.subtract(terms, 1.0, out=terms)
                xp.multiply(terms, g, out=terms)
                xp.add(of_a, terms, out=of_a)
                xp.subtract(of_b, terms, out=of_b)
        for out, padded in zip((d_data1, d_data2), gradients, strict=True):
            if out is not None:
                xp.copyto(out[item], _inner(p, padded, shape), casting="same_kind")


register(
    Op(
        name="Correlation",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=floats_only("Correlation"),
        params=_PARAMS,
        inputs=("data1", "data2"),
        gradient=grad("_backward_Correlation", "g0", "x0", "x1"),
        doc="Means of products of data1 and displaced data2, both (batch, channels, height, width): "
        "(batch, displacements, *squares).",
    )
)
backward(
    "Correlation",
    _backward,
    ("ograd", "data1", "data2"),
    grad_inputs=(0, 1),
    params=_PARAMS,
)
