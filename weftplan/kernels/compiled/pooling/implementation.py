"""Compiled implementations of Pooling: maxima forward and backward, averages and sums forward only.

Results have the bits of NumPy's kernel, which computes all other cases. Planes are independent, so idle cores may take
ranges of them, each with a buffer of a few rows. The kernels are those of ``kernels.py``; any worker may call them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from weftplan.kernels.compiled.jit import Entry, library
from weftplan.kernels.compiled.offset_tables import KernelArguments
from weftplan.kernels.compiled.parts import count, in_parts
from weftplan.kernels.compiled.pooling.kernels import VECTOR_BYTES, WORDS, backward, backward_of_pairs, forward, sums
from weftplan.kernels.compiled.replay import Call, Maker, RepeatedKernel, holding
from weftplan.kernels.compiled.target import Target, host
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.schema import Arrays, DType, OpContext, Params, Shape, aligned
from weftplan.ops.nn.pooling import grid_of, window
from weftplan.ops.nn.pooling_windows import divisors, lowest
from weftplan.support.addresses import address
from weftplan.support.array_types import RawArray, Scalar

FEW = 1 << 17
"""Minimum elements of a part, which is a range of planes."""


class _Triple(NamedTuple):
    """Sizes along three axes; a missing leading axis has extent 1, step 1 and no padding."""

    image: Shape
    grid: Shape
    kernel: Shape
    step: Shape
    pad: Shape

    @property
    def inside(self) -> bool:
        """Whether all windows would lie within the image if each were as long as its step.

        If the number of windows is rounded up, the last window may reach beyond the image.
        """
        return all(g * s <= i for g, s, i in zip(self.grid, self.step, self.image, strict=True))


def _triple(params: Params, image: Shape, grid: Shape) -> _Triple:
    kernel, step, pad = window(params, len(image))
    missing = 3 - len(image)
    unit_extents, zeros = (1,) * missing, (0,) * missing
    return _Triple(unit_extents + image, unit_extents + grid, unit_extents + kernel, unit_extents + step, zeros + pad)


def _pitch(of: _Triple, itemsize: int) -> int:
    """Return the bytes of a row of the buffer: enough for whole vectors of windows, and for a row with its padding."""
    lanes = VECTOR_BYTES // itemsize
    windows = -(-of.grid[2] // lanes) * lanes
    read = windows * of.step[2] + of.kernel[2] + lanes
    return aligned(max(read, of.pad[2] + of.image[2] + lanes) * itemsize)


def _parts(planes: int, plane: int) -> int:
    return count(planes * plane, FEW, planes)


def entries(dtype: DType, step: int, target: Target | None = None) -> dict[str, Entry]:
    """Return the compiled functions by name, for elements of ``dtype`` and windows that are ``step`` elements apart."""
    scalar = "float" if dtype.itemsize == 4 else "double"
    static_step = step if step in (1, 2) else 0
    pairs = [backward_of_pairs(scalar)] if static_step == 2 else []
    return library(
        f"pooling-{scalar}-{static_step}",
        lambda _: [forward(scalar, static_step), sums(scalar, static_step), backward(scalar, static_step), *pairs],
        ("forward", "sums", "backward", *(function.name for function in pairs)),
        target,
    )


def _compute(
    ctx: OpContext, params: Params, name: str, start: Scalar, padding: float, *, scales: RawArray | None = None,
    **arrays: RawArray
) -> Call:  # fmt: skip
    """Return a call of the compiled function ``name``.

    Args:
        start: the initial value of each window's maximum or sum.
        padding: the value of padding elements.
        scales: factors of the sums, for one row of windows or for all rows; None: no sums.
        arrays: x and y; for a gradient also dy and dx.
    """
    data, out = arrays["x"], arrays["y"]
    of = _triple(params, data.shape[2:], out.shape[2:])
    planes = data.shape[0] * data.shape[1]
    parts = _parts(planes, math.prod(of.image))
    pitch = _pitch(of, data.itemsize)
    part_bytes = of.kernel[0] * of.kernel[1] * pitch
    buffer = ctx.take((parts * part_bytes,), np.uint8)
    constants = np.array([padding, start], data.dtype)
    values = {word: address(array) for word, array in arrays.items()}
    values |= {"buffer": address(buffer), "constants": address(constants), "pitch": pitch, "step": of.step[2]}
    if scales is not None:
        values |= {"scales": address(scales), "scale_row": 0 if scales.ndim == 1 else scales.shape[-1] * data.itemsize}
    for number, axis in enumerate(("depth", "height", "width")):
        values |= {axis: of.image[number], f"out_{axis}": of.grid[number], f"kernel_{axis}": of.kernel[number],
                   f"step_{axis}": of.step[number], f"pad_{axis}": of.pad[number]}  # fmt: skip
    words = KernelArguments(WORDS, np.array([values.get(word, 0) for word in WORDS], dtype=np.int64), [constants])
    if name == "backward" and of.kernel == of.step and of.kernel[2] == 2 and not any(of.pad) and of.inside:
        name = "backward_of_pairs"
    entry = entries(data.dtype, of.step[2])[name]
    return holding(
        in_parts(entry, words, planes, parts, moves={"buffer": part_bytes}), buffer, scales, *arrays.values()
    )


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
    data, out = inputs[0], outputs[0]
    grid = grid_of(params, data.shape[2:], out.shape[2:])
    kind = params["pool_type"]
    if kind != "max":
        factors = divisors(np, grid, data.dtype) if kind == "avg" else 1.0
        # One factor: a single row serves all rows of windows. Otherwise a cached table has a factor for each window.
        scales = np.full(out.shape[-1], factors, data.dtype) if isinstance(factors, float) else factors
        return _compute(ctx, params, "sums", 0.0, -0.0, scales=scales, x=data, y=out)
    covers = grid.covering[0]
    start = -math.inf if covers else lowest(data.dtype)
    return _compute(ctx, params, "forward", start, -math.inf, x=data, y=out)


def _backward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
    ograd, data, output = inputs
    return _compute(ctx, params, "backward", 0.0, math.nan, x=data, y=output, dy=ograd, dx=outputs[0])


def _provide(op: str, make: Maker, *, gradient: bool) -> None:
    """Register the kernel whose calls ``make`` prepares; ``gradient``: whether ``op`` is the backward operator."""

    def refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
        target = host()
        if isinstance(target, str):
            return target
        dtype = inputs[0].dtype
        if params["global_pool"]:
            return "all pixels of an image, which NumPy reduces at once"
        kind = params["pool_type"]
        if kind == "lp" or (gradient and kind != "max"):
            return "compiled kernels take maxima, averages and sums of windows, and give gradients of maxima"
        if dtype not in (np.float32, np.float64):
            return f"compiled kernels are written for float32 and float64, not {dtype}"
        return ""

    def workspace(params: Params, inputs: Specs, outputs: Specs) -> int:
        (data, dtype), grid = (inputs[1] if gradient else inputs[0]), (inputs[2] if gradient else outputs[0]).shape
        of = _triple(params, data[2:], grid[2:])
        parts = _parts(data[0] * data[1], math.prod(of.image))
        return aligned(parts * of.kernel[0] * of.kernel[1] * _pitch(of, dtype.itemsize))

    provide(op, Implementation(name="native", kernel=RepeatedKernel(make), workspace=workspace, refusal=refusal))


_provide("Pooling", _forward, gradient=False)
_provide("_backward_Pooling", _backward, gradient=True)
