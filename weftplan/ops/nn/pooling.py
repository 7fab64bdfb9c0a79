"""Pooling over one, two or three spatial axes, channels first.

If several elements of a window equal its maximum, the first in row-major order gets the gradient, as in MXNet 1.9.1.
The maximum of a window with a NaN is NaN (MXNet 1.9.1 skips NaN). A window that lies entirely in the padding has the
dtype's lowest number as its maximum and 0 as its sum. The gradients of averages and sums need neither data nor output.

A plane is one channel of one image. The kernels pool a block of planes at a time; on a CPU, idle cores share the
blocks. The result of a plane does not depend on its block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from weftplan.errors import ParameterError, ShapeError
from weftplan.ops.core import tiling
from weftplan.ops.core.forms import workspace_kernel
from weftplan.ops.core.kernels import BOOL, INDEX, accumulator
from weftplan.ops.core.params import p_bool, p_enum, p_int, p_optional, p_shape
from weftplan.ops.core.products import MOST
from weftplan.ops.core.registry import register
from weftplan.ops.core.rules import Shapes, backward, merge_shape, same_dtype, take_bytes
from weftplan.ops.core.schema import EntryRef, GradientBuilder, Op, Param, Params, Shape, TensorSpec, Workspace
from weftplan.ops.nn.pooling_windows import (
    Grid,
    divisors,
    make_grid,
    reduce_max,
    reduce_sum,
    root,
    spread_max,
    spread_power,
)
from weftplan.support.array_types import DType, RawArray
from weftplan.support.core_sharing import split_in_rooms

_LAYOUTS = ("NCW", "NCHW", "NCDHW")
_PARAMS = (
    Param("kernel", p_shape, (), "Extents of a window; needed unless global_pool."),
    Param("pool_type", p_enum("max", "avg", "sum", "lp"), "max", "Reduction of a window; lp: the p-norm."),
    Param("global_pool", p_bool, False, "True: one window, the whole image; kernel, stride and pad are ignored."),
    Param("cudnn_off", p_bool, False, "Accepted, no effect."),
    Param(
        "pooling_convention",
        p_enum("valid", "full", "same"),
        "valid",
        "Number of windows. valid: rounded down; full: rounded up; same: padded extent / stride, rounded up.",
    ),
    Param("stride", p_shape, (), "Steps between windows (default 1)."),
    Param("pad", p_shape, (), "Padding on either side of each axis (default 0)."),
    Param("p_value", p_optional(p_int), None, "p of lp pooling: 1, 2 or 3."),
    Param("count_include_pad", p_optional(p_bool), None, "avg: count padding in the divisor (default True)."),
    Param("layout", p_optional(p_enum(*_LAYOUTS, "NWC", "NHWC", "NDHWC")), None, "Channels first only."),
)


def window(params: Params, rank: int) -> tuple[Shape, Shape, Shape]:
    """Return the checked kernel, stride and pad for ``rank`` spatial axes, defaults filled in."""
    kernel: Shape = params["kernel"]
    if len(kernel) != rank or min(kernel) < 1:
        raise ParameterError(f"Pooling: kernel={kernel}: expected {rank} positive extents, one per spatial axis")
    stride = params["stride"] or (1,) * rank
    pad = params["pad"] or (0,) * rank
    if not any(pad[rank:]):  # as in MXNet, zeros for more axes than ``rank`` are ignored
        pad = pad[:rank]
    if len(stride) != rank or min(stride) < 1:
        raise ParameterError(f"Pooling: stride={stride}: expected {rank} numbers of at least 1, as {kernel=}")
    if params["pooling_convention"] == "same" and any(pad):
        raise ParameterError(f"Pooling: pad={pad}: pooling_convention='same' pads by itself")
    if len(pad) != rank or min(pad) < 0:
        raise ParameterError(f"Pooling: pad={pad}: expected {rank} numbers of at least 0, as {kernel=}")
    return kernel, stride, pad


def _check(params: Params, rank: int) -> None:
    if params["pool_type"] == "lp" and params["p_value"] not in (1, 2, 3):
        raise ParameterError(f"Pooling: pool_type='lp' needs p_value 1, 2 or 3, got {params['p_value']}")
    if params["layout"] is not None and params["layout"] != _LAYOUTS[rank - 1]:
        raise ParameterError(f"Pooling: layout={params['layout']}: expected {_LAYOUTS[rank - 1]} for {rank} axes")


def _extent(convention: str, extent: int, kernel: int, stride: int, pad: int) -> int:
    if convention == "same":
        return -(-(extent + 2 * pad) // stride)
    span = extent + 2 * pad - kernel
    return 1 + (span // stride if convention == "valid" else -(-span // stride))


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
        kernel, stride, pad = window(params, rank)
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


def grid_of(params: Params, image: Shape, grid: Shape) -> Grid:
    """Return the windows of a pooling that is not global, from the spatial shapes of data and output."""
    kernel, stride, pad = window(params, len(image))
    return make_grid(image, grid, kernel, stride, pad, params["count_include_pad"] is not False)


def _planes(image: Shape, total: int) -> int:
    """Return the number of planes per block, at most ``total``: a block fits a cache; ``image`` is a plane's shape."""
    return min(total, max(1, tiling.block() // max(1, math.prod(image))))


_FEW_BLOCKS = 8
"""Minimum number of blocks of a part: with fewer, waking a core costs as much as it gains, and scratch grows."""


def _parts(image: Shape, total: int) -> int:
    """Return the number of parts, each with its own scratch, into which ``total`` planes are cut for idle cores.

    It is 1 on a GPU.
    """
    if tiling.block() != tiling.HOST.block:
        return 1
    return max(1, min(MOST, -(-total // _planes(image, total)) // _FEW_BLOCKS))


def _each_block(image: Shape, total: int, work: Callable[[int, int, int], None]) -> None:
    """Call ``work(first, last, room)`` for each block of planes, on idle cores if there are several parts.

    ``room`` is the index of a scratch room that no other thread uses at the same time.
    """
    step, parts = _planes(image, total), _parts(image, total)
    planes = -(-total // (step * parts)) * step

    def part(number: int, slot: int) -> None:
        end = min((number + 1) * planes, total)
        for start in range(number * planes, end, step):
            work(start, min(start + step, end), slot)

    split_in_rooms(part, -(-total // planes))


def _flat(array: RawArray) -> RawArray:
    """Return a view (planes, *spatial) of ``array`` (batch, channels, *spatial)."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])


def _needs_sum_block(params: Params, dtype: DType) -> bool:
    return bool(params["pool_type"] != "max") and accumulator(dtype) != dtype


@workspace_kernel
def _forward(ctx: Workspace, params: Params, data: RawArray, out: RawArray) -> None:
    xp = ctx.xp
    data, out = _flat(data), _flat(out)
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
        grid = make_grid(data.shape[1:], out.shape[1:], data.shape[1:], (1,) * rank, (0,) * rank, True)
    else:
        grid = grid_of(params, data.shape[1:], out.shape[1:])
    slot_shape = _parts(grid.image, data.shape[0]), _planes(grid.image, data.shape[0])
    sums = ctx.take((*slot_shape, *grid.grid), acc) if _needs_sum_block(params, out.dtype) else None
    powers = ctx.take((*slot_shape, *grid.grid), acc) if kind == "lp" and p != 1 else None
    scale = divisors(xp, grid, acc) if kind == "avg" else None

    def work(start: int, stop: int, slot: int) -> None:
        source, result = data[start:stop], out[start:stop]
        target = result if sums is None else sums[slot, : stop - start]
        if kind == "max":
            reduce_max(xp, grid, source, target)
        else:
            reduce_sum(xp, grid, source, target, 1 if powers is None else p, None if powers is None else powers[slot])
            if scale is not None:
                xp.multiply(target, scale, out=target)
            elif powers is not None:
                root(xp, target, p)
        if sums is not None:
            result[...] = target

    _each_block(grid.image, data.shape[0], work)


def _workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    (shape, dtype), (grid, _) = inputs[0], outputs[0]
    total = shape[0] * shape[1]
    acc = accumulator(dtype)
    if params["global_pool"] and (params["pool_type"] != "lp" or params["p_value"] == 1):
        return take_bytes(((total,), acc)) if _needs_sum_block(params, dtype) else 0
    block = ((_parts(shape[2:], total), _planes(shape[2:], total), *grid[2:]), acc)
    powers = params["pool_type"] == "lp" and params["p_value"] != 1
    return take_bytes(*[block] * (_needs_sum_block(params, dtype) + powers))


@workspace_kernel
def _backward(ctx: Workspace, params: Params, *arrays: RawArray) -> None:
    *inputs, out = arrays
    xp = ctx.xp
    ograd, dgrad = _flat(inputs[0]), _flat(out)
    kind, p = params["pool_type"], params["p_value"]
    image, shape = dgrad.shape[1:], ograd.shape[1:]
    acc = accumulator(dgrad.dtype)
    step = _planes(image, dgrad.shape[0])
    scale: RawArray | float | None
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
        grid = make_grid(image, shape, image, (1,) * len(image), (0,) * len(image), True)
    else:
        grid = grid_of(params, image, shape)
    slot_shape = _parts(image, dgrad.shape[0]), step
    wide = ctx.take((*slot_shape, *image), acc) if acc != dgrad.dtype else None
    share = ctx.take((*slot_shape, *shape), acc)
    term = ctx.take((*slot_shape, *shape), acc) if _keeps(params) else None
    mask = ctx.take((*slot_shape, *shape), BOOL) if kind == "max" else None
    scale = divisors(xp, grid, acc) if kind == "avg" else None

    def work(start: int, stop: int, slot: int) -> None:
        count = stop - start
        target = dgrad[start:stop] if wide is None else wide[slot, :count]
        target.fill(0)
        part = share[slot, :count]
        if scale is None:
            part[...] = ograd[start:stop]
        else:
            xp.multiply(ograd[start:stop], scale, out=part, dtype=acc)
        if kind == "max":
            data, output = _flat(inputs[1])[start:stop], _flat(inputs[2])[start:stop]
            assert term is not None
            assert mask is not None
            spread_max(xp, grid, data, output, part, term[slot, :count], mask[slot, :count], target)
        elif term is not None:
            data, output = _flat(inputs[1])[start:stop], _flat(inputs[2])[start:stop]
            spread_power(xp, grid, data, output, p, part, term[slot, :count], target)
        else:
            for windows, elements in grid.taps:
                xp.add(target[elements], part[windows], out=target[elements])
        if wide is not None:
            dgrad[start:stop] = target

    _each_block(image, dgrad.shape[0], work)


def _global_max_backward(ctx: Workspace, ograd: RawArray, data: RawArray, dgrad: RawArray, step: int) -> None:
    xp = ctx.xp
    buffer = ctx.take((step,), INDEX)
    for start in range(0, dgrad.shape[0], step):
        stop = min(start + step, dgrad.shape[0])
        rows, target = data[start:stop].reshape(stop - start, -1), dgrad[start:stop].reshape(stop - start, -1)
        index = buffer[: stop - start]
        xp.argmax(rows, axis=1, out=index)
        xp.add(index, xp.arange(0, rows.size, rows.shape[1]), out=index)
        target.fill(0)
        target.reshape(-1)[index] = ograd[start:stop].reshape(-1)


def _keeps(params: Params) -> bool:
    """Return whether the backward pass reads data and output, in addition to the incoming gradient."""
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
    slot_shape = _parts(shape[2:], total), step
    block = (*slot_shape, *grid[2:])
    arrays = [(block, acc)] * (2 if _keeps(params) else 1)
    if params["pool_type"] == "max":
        arrays.append((block, BOOL))
    if acc != dtype:
        arrays.append(((*slot_shape, *shape[2:]), acc))
    return take_bytes(*arrays)


def _backward_inputs(params: Params) -> tuple[str, ...]:
    return ("ograd", "data", "output") if _keeps(params) else ("ograd",)


def _gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
    reads = [builder.input(0), builder.output(0)] if _keeps(builder.params) else []
    return builder.node("_backward_Pooling", [builder.ograd(), *reads])


register(
    Op(
        name="Pooling",
        forward=_forward,
        infer_shape=_infer_shape,
        infer_dtype=same_dtype,
        params=_PARAMS,
        gradient=_gradient,
        workspace=_workspace,
        doc="Maximum, average, sum or p-norm of each window of data (batch, channels, *spatial): "
        "(batch, channels, *windows).",
    )
)
backward(
    "Pooling",
    _backward,
    _backward_inputs,
    params=_PARAMS,
    workspace=_backward_workspace,
)
