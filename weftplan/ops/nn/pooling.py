"""Pooling over one, two or three spatial axes, channels first.

Among equal elements of a window the first in row-major order is the maximum that gets the gradient, as in MXNet 1.9.1;
a NaN is passed on (MXNet 1.9.1 skips it). A window that lies in the padding altogether has the dtype's lowest number
as its maximum and 0 as its sum. Averages and sums keep nothing for the backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.kernels import BLOCK, BOOL, INDEX, accumulator
from weftplan.ops.params import p_bool, p_enum, p_int, p_optional, p_shape
from weftplan.ops.registry import register
from weftplan.ops.rules import Shapes, backward, merge_shape, same_dtype, take_bytes
from weftplan.ops.schema import EntryRef, GradientBuilder, Op, OpContext, Param, Params, Shape, TensorSpec

_LAYOUTS = ("NCW", "NCHW", "NCDHW")
_PARAMS = (
    Param("kernel", p_shape, (), "Extents of a window; needed unless global_pool."),
    Param("pool_type", p_enum("max", "avg", "sum", "lp"), "max", "What is taken of a window."),
    Param("global_pool", p_bool, False, "True: one window, the whole image; kernel, stride and pad are ignored."),
    Param("cudnn_off", p_bool, False, "Accepted, no effect."),
    Param("pooling_convention", p_enum("valid", "full", "same"), "valid", "Rounding of the number of windows."),
    Param("stride", p_shape, (), "Steps between windows (default 1)."),
    Param("pad", p_shape, (), "Padding on either side of each axis (default 0)."),
    Param("p_value", p_optional(p_int), None, "p of lp pooling: 1, 2 or 3."),
    Param("count_include_pad", p_optional(p_bool), None, "avg: count padding in the divisor (default True)."),
    Param("layout", p_optional(p_enum(*_LAYOUTS, "NWC", "NHWC", "NDHWC")), None, "Channels first only."),
)


def _window(params: Params, rank: int) -> tuple[Shape, Shape, Shape]:
    """Kernel, stride and pad of ``rank`` spatial axes."""
    kernel: Shape = params["kernel"]
    if len(kernel) != rank or min(kernel) < 1:
        raise ParameterError(f"Pooling: kernel={kernel}: expected {rank} positive extents, one per spatial axis")
    stride = params["stride"] or (1,) * rank
    pad = params["pad"] or (0,) * rank
    if len(stride) != rank or min(stride) < 1:
        raise ParameterError(f"Pooling: stride={stride}: expected {rank} numbers of at least 1, as {kernel=}")
    if len(pad) != rank or min(pad) < 0:
        raise ParameterError(f"Pooling: pad={pad}: expected {rank} numbers of at least 0, as {kernel=}")
    if any(p >= k for p, k in zip(pad, kernel, strict=True)):
        raise ParameterError(f"Pooling: pad={pad} must be smaller than {kernel=}: windows would hold padding only")
    return kernel, stride, pad


def _check(params: Params, rank: int) -> None:
    if params["pool_type"] == "lp" and params["p_value"] not in (1, 2, 3):
        raise ParameterError(f"Pooling: pool_type='lp' needs p_value 1, 2 or 3, got {params['p_value']}")
    if params["layout"] is not None and params["layout"] != _LAYOUTS[rank - 1]:
        raise ParameterError(f"Pooling: layout={params['layout']}: expected {_LAYOUTS[rank - 1]} for {rank} axes")


def _extent(convention: str, extent: int, kernel: int, stride: int, pad: int) -> int:
    if convention == "same":
        return -(-(extent + 2 * pad) // stride)
    room = extent + 2 * pad - kernel
    return 1 + (room // stride if convention == "valid" else -(-room // stride))


def _infer_shape(params: Params, ins: Shapes, outs: Shapes) -> tuple[Shapes, Shapes]:
    data, out = ins[0], outs[0]
    if data is None and params["global_pool"]:
        return ins, outs
    rank = len(data) - 2 if data is not None and params["global_pool"] else len(params["kernel"])
    if not 1 <= rank <= 3:
        got = f"data {data}" if params["global_pool"] else f"kernel={params['kernel']}"
        raise ShapeError(f"Pooling: expected one to three spatial axes, got {got}")
    _check(params, rank)
    if not params["global_pool"]:
        kernel, stride, pad = _window(params, rank)
    if data is None and out is None:
        return ins, outs
    data = merge_shape((0,) * (rank + 2), data, f"Pooling: data with {rank} spatial axes")
    out = merge_shape((0,) * (rank + 2), out, "Pooling: output")
    assert data is not None
    assert out is not None
    lead = merge_shape(data[:2], out[:2], "Pooling: batch and channels of data and output")
    assert lead is not None
    if params["global_pool"]:
        grid = [1] * rank
    else:
        grid = [0] * rank
        for axis, extent in enumerate(data[2:]):
            if extent == 0:
                continue
            if kernel[axis] > extent + 2 * pad[axis]:
                raise ShapeError(f"Pooling: kernel {kernel} is larger than data {data} with padding {pad}")
            grid[axis] = _extent(params["pooling_convention"], extent, kernel[axis], stride[axis], pad[axis])
    return [(*lead, *data[2:])], [merge_shape((*lead, *grid), out, f"Pooling: output for data {data}, and given")]


@dataclass(frozen=True, slots=True)
class _Grid:
    """The windows of one image: for each tap (position within the window) which windows and elements meet there."""

    image: Shape
    grid: Shape
    taps: tuple[tuple[tuple[slice, ...], tuple[slice, ...]], ...]
    """(windows, elements) per tap in row-major order; both index (planes, *spatial)."""
    covering: tuple[bool, ...]
    """Whether the tap meets every window."""
    disjoint: bool
    """No element belongs to two windows."""
    counts: tuple[tuple[int, ...], ...]
    """Per axis and window, elements counted by an average."""


@functools.lru_cache(maxsize=1024)
def _grid(image: Shape, grid: Shape, kernel: Shape, stride: Shape, pad: Shape, include_pad: bool) -> _Grid:
    along: list[list[tuple[slice, slice]]] = []
    counts = []
    for extent, size, k, s, p in zip(image, grid, kernel, stride, pad, strict=True):
        ranges = []
        for tap in range(k):
            first = max(0, -(-(p - tap) // s))
            last = min(size, (extent - 1 + p - tap) // s + 1)
            if last > first:
                begin = first * s - p + tap
                ranges.append((slice(first, last), slice(begin, begin + (last - first - 1) * s + 1, s)))
        along.append(ranges)
        spans = []
        for position in range(size):
            begin, end = position * s - p, min(position * s - p + k, extent + p)
            if not include_pad:
                begin, end = max(begin, 0), min(end, extent)
            spans.append(max(1, end - begin))
        counts.append(tuple(spans))
    every = slice(None)
    taps = tuple(((every, *(pair[0] for pair in tap)), (every, *(pair[1] for pair in tap))) for tap in product(*along))
    covering = tuple(
        all(s.start == 0 and s.stop == size for s, size in zip(windows[1:], grid, strict=True)) for windows, _ in taps
    )
    return _Grid(image, grid, taps, covering, all(s >= k for s, k in zip(stride, kernel, strict=True)), tuple(counts))


def _grid_of(params: Params, image: Shape, grid: Shape) -> _Grid:
    kernel, stride, pad = _window(params, len(image))
    return _grid(image, grid, kernel, stride, pad, params["count_include_pad"] is not False)


def _planes(image: Shape, total: int) -> int:
    """Planes (images times channels) that are worked on together, so that they stay in a cache."""
    return min(total, max(1, BLOCK // max(1, math.prod(image))))


def _blocks(total: int, step: int) -> Iterator[tuple[int, int]]:
    for first in range(0, total, step):
        yield first, min(first + step, total)


def _lowest(dtype: Any) -> Any:
    return np.finfo(dtype).min if dtype.kind == "f" else np.iinfo(dtype).min


def _flat(array: Any) -> Any:
    """(batch, channels, *spatial) as (planes, *spatial)."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _divisors(xp: Any, grid: _Grid, dtype: Any) -> Any:
    """1 / count of each window: a number where all are alike, else a small array over the grid."""
    if all(len(set(spans)) == 1 for spans in grid.counts):
        return 1.0 / math.prod(spans[0] for spans in grid.counts)
    counts = functools.reduce(np.multiply.outer, (np.array(spans, np.float64) for spans in grid.counts))
    return xp.asarray((1.0 / counts).astype(dtype))


def _power(xp: Any, source: Any, p: int, out: Any) -> None:
    """``source`` to the power ``p`` (0, 1, 2 or 3) into ``out`` (another array)."""
    if p == 0:
        out.fill(1)
    elif p == 1:
        out[...] = source
    else:
        xp.multiply(source, source, out=out)
        if p == 3:
            xp.multiply(out, source, out=out)


def _root(xp: Any, array: Any, p: int) -> None:
    if p == 2:
        xp.sqrt(array, out=array)
    elif p == 3:
        xp.cbrt(array, out=array)


def _needs_sum_block(params: Params, dtype: Any) -> bool:
    return bool(params["pool_type"] != "max") and accumulator(dtype) != dtype


def _forward(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    if outputs[0] is None:
        return
    xp = ctx.xp
    data, out = _flat(inputs[0]), _flat(outputs[0])
    kind, p = params["pool_type"], params["p_value"]
    acc = accumulator(out.dtype)
    if params["global_pool"] and (kind != "lp" or p == 1):
        rows, column = data.reshape(data.shape[0], -1), out.reshape(-1)
        if kind == "max":
            xp.max(rows, axis=1, out=column)
        else:
            target = column if acc == column.dtype else ctx.take(column.shape, acc)
            xp.sum(rows, axis=1, dtype=acc, out=target)
            if kind == "avg":
                xp.multiply(target, 1.0 / rows.shape[1], out=target)
            if target is not column:
                column[...] = target
        return
    if params["global_pool"]:
        rank = data.ndim - 1
        grid = _grid(data.shape[1:], out.shape[1:], data.shape[1:], (1,) * rank, (0,) * rank, True)
    else:
        grid = _grid_of(params, data.shape[1:], out.shape[1:])
    step = _planes(grid.image, data.shape[0])
    sums = ctx.take((step, *grid.grid), acc) if _needs_sum_block(params, out.dtype) else None
    powers = ctx.take((step, *grid.grid), acc) if kind == "lp" and p != 1 else None
    scale = _divisors(xp, grid, acc) if kind == "avg" else None
    for first, last in _blocks(data.shape[0], step):
        source, result = data[first:last], out[first:last]
        target = result if sums is None else sums[: last - first]
        if kind == "max":
            _reduce_max(xp, grid, source, target)
        else:
            _reduce_sum(xp, grid, source, target, p if powers is not None else 1, powers)
            if scale is not None:
                xp.multiply(target, scale, out=target)
            elif powers is not None:
                _root(xp, target, p)
        if sums is not None:
            result[...] = target


def _reduce_max(xp: Any, grid: _Grid, source: Any, target: Any) -> None:
    begun = grid.covering[0]
    if not begun:
        target.fill(_lowest(target.dtype))
    for number, (windows, elements) in enumerate(grid.taps):
        if begun and number == 0:
            target[...] = source[elements]
        else:
            xp.maximum(target[windows], source[elements], out=target[windows])


def _reduce_sum(xp: Any, grid: _Grid, source: Any, target: Any, p: int, powers: Any) -> None:
    target.fill(0)
    for windows, elements in grid.taps:
        part = target[windows]
        term = source[elements]
        if powers is not None:
            raised = powers[: source.shape[0]][windows]
            _power(xp, term, p, raised)
            term = raised
        xp.add(part, term, out=part)


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    (shape, dtype), (grid, _) = inputs[0], outputs[0]
    total = shape[0] * shape[1]
    acc = accumulator(dtype)
    if params["global_pool"] and (params["pool_type"] != "lp" or params["p_value"] == 1):
        return take_bytes(((total,), acc)) if _needs_sum_block(params, dtype) else 0
    block = ((_planes(shape[2:], total), *grid[2:]), acc)
    powers = params["pool_type"] == "lp" and params["p_value"] != 1
    return take_bytes(*[block] * (_needs_sum_block(params, dtype) + powers))


def _backward(ctx: OpContext, params: Params, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    if outputs[0] is None:
        return
    xp = ctx.xp
    ograd, dgrad = _flat(inputs[0]), _flat(outputs[0])
    kind, p = params["pool_type"], params["p_value"]
    image, shape = dgrad.shape[1:], ograd.shape[1:]
    acc = accumulator(dgrad.dtype)
    step = _planes(image, dgrad.shape[0])
    if params["global_pool"] and kind == "max":
        _global_max_backward(ctx, ograd, _flat(inputs[1]), dgrad, step)
        return
    if params["global_pool"] and not _keeps(params):
        column = ctx.take((ograd.shape[0],), acc)
        scale = 1.0 / math.prod(image) if kind == "avg" else 1.0
        xp.multiply(ograd.reshape(-1), scale, out=column, dtype=acc)
        dgrad.reshape(dgrad.shape[0], -1)[...] = column[:, None]
        return
    if params["global_pool"]:
        grid = _grid(image, shape, image, (1,) * len(image), (0,) * len(image), True)
    else:
        grid = _grid_of(params, image, shape)
    wide = ctx.take((step, *image), acc) if acc != dgrad.dtype else None
    share = ctx.take((step, *shape), acc)
    term = ctx.take((step, *shape), acc) if _keeps(params) else None
    mask = ctx.take((step, *shape), BOOL) if kind == "max" else None
    scale = _divisors(xp, grid, acc) if kind == "avg" else None
    for first, last in _blocks(dgrad.shape[0], step):
        count = last - first
        target = dgrad[first:last] if wide is None else wide[:count]
        target.fill(0)
        part = share[:count]
        if scale is None:
            part[...] = ograd[first:last]
        else:
            xp.multiply(ograd[first:last], scale, out=part, dtype=acc)
        if kind == "max":
            data, output = _flat(inputs[1])[first:last], _flat(inputs[2])[first:last]
            assert term is not None
            assert mask is not None
            _spread_max(xp, grid, data, output, part, term[:count], mask[:count], target)
        elif term is not None:
            data, output = _flat(inputs[1])[first:last], _flat(inputs[2])[first:last]
            _spread_power(xp, grid, data, output, p, part, term[:count], target)
        else:
            for windows, elements in grid.taps:
                xp.add(target[elements], part[windows], out=target[elements])
        if wide is not None:
            dgrad[first:last] = target


def _spread_max(xp: Any, grid: _Grid, data: Any, output: Any, left: Any, term: Any, mask: Any, target: Any) -> None:
    """Give each window's gradient to its first maximum; ``left`` holds what has not been given yet."""
    for windows, elements in grid.taps:
        hit, given, rest = mask[windows], term[windows], left[windows]
        xp.equal(data[elements], output[windows], out=hit)
        xp.multiply(rest, hit, out=given)
        xp.subtract(rest, given, out=rest)
        if grid.disjoint:
            target[elements] = given
        else:
            xp.add(target[elements], given, out=target[elements])


def _spread_power(xp: Any, grid: _Grid, data: Any, output: Any, p: int, share: Any, term: Any, target: Any) -> None:
    """d out / d x = (x / out)^(p-1); where out is 0 the divisor counts as 1, so nothing becomes infinite."""
    _power(xp, output, p - 1, term)
    xp.copyto(term, 1, where=term == 0)
    xp.divide(share, term, out=share)
    for windows, elements in grid.taps:
        part = term[windows]
        _power(xp, data[elements], p - 1, part)
        xp.multiply(part, share[windows], out=part)
        xp.add(target[elements], part, out=target[elements])


def _global_max_backward(ctx: OpContext, ograd: Any, data: Any, dgrad: Any, step: int) -> None:
    xp = ctx.xp
    where = ctx.take((step,), INDEX)
    for first, last in _blocks(dgrad.shape[0], step):
        rows, target = data[first:last].reshape(last - first, -1), dgrad[first:last].reshape(last - first, -1)
        index = where[: last - first]
        xp.argmax(rows, axis=1, out=index)
        xp.add(index, xp.arange(0, rows.size, rows.shape[1]), out=index)
        target.fill(0)
        target.reshape(-1)[index] = ograd[first:last].reshape(-1)


def _keeps(params: Params) -> bool:
    """True when the backward pass needs data and output."""
    return bool(params["pool_type"] == "max") or (params["pool_type"] == "lp" and params["p_value"] != 1)


def _backward_workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    (shape, dtype), grid = outputs[0], inputs[0].shape
    total = shape[0] * shape[1]
    step = _planes(shape[2:], total)
    acc = accumulator(dtype)
    if params["global_pool"] and params["pool_type"] == "max":
        return take_bytes(((step,), INDEX))
    if params["global_pool"] and not _keeps(params):
        return take_bytes(((total,), acc))
    block = (step, *grid[2:])
    taken = [(block, acc)] * (2 if _keeps(params) else 1)
    if params["pool_type"] == "max":
        taken.append((block, BOOL))
    if acc != dtype:
        taken.append(((step, *shape[2:]), acc))
    return take_bytes(*taken)


def _backward_inputs(params: Params) -> tuple[str, ...]:
    return ("ograd", "data", "output") if _keeps(params) else ("ograd",)


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    kept = [builder.input(0), builder.output(0)] if _keeps(builder.params) else []
    return builder.node("_backward_Pooling", [builder.ograd(), *kept])


register(
    Op(
        name="Pooling",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=same_dtype,
        params=_PARAMS,
        gradient=_gradient,
        workspace=_workspace,
        aliases=("Pooling_v1",),
        doc="Maximum, average, sum or p-norm over windows of each channel.",
    )
)
backward(
    "Pooling",
    _backward,
    _backward_inputs,
    params=_PARAMS,
    workspace=_backward_workspace,
)
