"""Softmax over the middle axis of (outer, classes, inner): forward and backward, block by block.

Idle cores share the blocks of a large forward pass. The blocks depend only on sizes, and the result of a row does not
depend on its block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from weftplan.ops.core.kernels import accumulator, row_blocks, rows_per_block
from weftplan.ops.core.products import MOST
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import DType, Shape, Workspace
from weftplan.support.array_types import RawArray
from weftplan.support.core_sharing import split_in_rooms

FEW = 1 << 19
"""Minimum number of elements of a part, and of its blocks: about a millisecond of work.

Between two NumPy calls a thread needs the interpreter lock, and sleeps if another thread has it. With blocks of 60,000
elements two threads take 0.9 of one thread's time, with blocks of this size 0.55. The size does not change the time of
one thread.
"""


def as_rows(shape: Shape, axis: int) -> Shape:
    """Return ``shape`` as (outer, classes, inner) around ``axis``.

    >>> as_rows((2, 3, 4, 5), 1)
    (2, 3, 20)
    """
    axis %= len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def compute_dtype(source: DType, target: DType) -> DType:
    """Return the dtype in which softmax of ``source`` into ``target`` is computed: at least float32."""
    return accumulator(np.promote_types(source, target))


def forward_bytes(shape: Shape, source: DType, target: DType, *, log: bool = False, masked: bool = False) -> int:
    """Return the workspace bytes of :func:`softmax`."""
    acc = compute_dtype(source, target)
    parts, step = _parts(shape, plain=acc == target and not log and not masked)
    arrays: list[tuple[Shape, DType]] = [((parts * step, 1, shape[2]), acc)]
    if acc != target:
        arrays.append(((step, *shape[1:]), acc))
    if log:
        arrays.append(((step, *shape[1:]), acc))
    if masked:
        arrays.append(((step, *shape[1:]), np.dtype(bool)))
    return take_bytes(*arrays)


def _parts(shape: Shape, *, plain: bool) -> tuple[int, int]:
    """Return (number of parts of a forward pass, outer size of its blocks).

    Several parts and large blocks are used only if the pass is ``plain``: its scratch is one number per row.
    """
    parts = max(1, min(MOST, math.prod(shape) // FEW, shape[0])) if plain else 1
    if parts == 1:
        return 1, rows_per_block(shape)
    rows = -(-shape[0] // parts)
    return parts, max(rows_per_block(shape), -(-rows // max(1, rows * math.prod(shape[1:]) // FEW)))


def softmax(
    ctx: Workspace,
    data: RawArray,
    out: RawArray,
    *,
    scale: float = 1.0,
    log: bool = False,
    length: Any = None,
) -> None:
    """Compute ``out`` = softmax of ``scale · data`` over axis 1, or its logarithm if ``log``.

    Both are (outer, classes, inner), and ``out`` may be ``data``. With ``length`` (outer, inner), only the first
    ``length[o, i]`` classes of row (o, ·, i) count; the others give 0.
    """
    xp = ctx.xp
    shape = data.shape
    if xp is np and scale == 1.0 and data.dtype == out.dtype and not log and length is None:
        short = softmax_bare(shape, out.dtype)
        if short is not None:
            short(data, out, ctx.take((shape[0], 1, shape[2]), out.dtype))
            return
    acc = compute_dtype(data.dtype, out.dtype)
    parts, step = _parts(shape, plain=acc == out.dtype and not log and length is None)
    reduced = ctx.take((parts * step, 1, shape[2]), acc)
    wide = ctx.take((step, *shape[1:]), acc) if acc != out.dtype else None
    powers = ctx.take((step, *shape[1:]), acc) if log else None
    hidden = ctx.take((step, *shape[1:]), np.dtype(bool)) if length is not None else None
    positions = xp.arange(shape[1]).reshape(1, -1, 1) if length is not None else None

    def block(rows: slice, row_values: RawArray) -> None:
        x, y = data[rows], out[rows]
        row_values, z = row_values[: x.shape[0]], y if wide is None else wide[: x.shape[0]]
        if scale != 1.0 or hidden is not None:
            xp.multiply(x, scale, out=z, dtype=acc)
            x = z
        if hidden is not None:
            mask = hidden[: x.shape[0]]
            xp.greater_equal(positions, length[rows, None, :], out=mask)
            xp.copyto(z, xp.finfo(acc).min, where=mask)
        xp.max(x, axis=1, out=row_values, keepdims=True)
        xp.subtract(x, row_values, out=z, dtype=acc)
        if powers is not None:
            term = powers[: x.shape[0]]
            xp.exp(z, out=term)
            xp.sum(term, axis=1, out=row_values, keepdims=True)
            xp.log(row_values, out=row_values)
            xp.subtract(z, row_values, out=z)
        else:
            xp.exp(z, out=z)
            xp.sum(z, axis=1, out=row_values, keepdims=True)
            xp.divide(z, row_values, out=z)
        if hidden is not None:
            xp.copyto(z, 0, where=mask)
        if wide is not None:
            y[...] = z

    blocks = [slice(start, start + step) for start in range(0, shape[0], step)]

    def part(number: int, slot: int) -> None:
        for rows in blocks[number::parts]:
            block(rows, reduced[slot * step : (slot + 1) * step])

    if parts > 1 and xp is np:
        split_in_rooms(part, parts)
    else:
        for rows in blocks:
            block(rows, reduced)


def softmax_bare(shape: Shape, dtype: DType) -> Callable[..., object] | None:
    """Return a fast function (data, out, workspace) for a plain :func:`softmax` of ``shape`` in one block.

    Return None if the shape needs several blocks, or if the dtype needs a wider accumulator.
    """
    if rows_per_block(shape) < shape[0] or accumulator(dtype) != dtype:
        return None
    if shape[2] == 1:  # NumPy then sums the same numbers in the same order, with less overhead
        shape = shape[:2]
    small = (shape[0], 1, *shape[2:])
    largest: Any = np.maximum.reduce
    total: Any = np.add.reduce

    def call(data: RawArray, out: RawArray, workspace: RawArray) -> None:
        if data.shape != shape:
            data, out = data.reshape(shape), out.reshape(shape)
        reduced: Any = np.ndarray(small, dtype, workspace)
        largest(data, 1, None, reduced, True)
        np.subtract(data, reduced, out)
        np.exp(out, out)
        total(out, 1, None, reduced, True)
        np.divide(out, reduced, out)

    return call


def backward_bytes(shape: Shape, source: DType, target: DType) -> int:
    """Return the workspace bytes of :func:`softmax_backward`."""
    acc = compute_dtype(source, target)
    step = rows_per_block(shape)
    return take_bytes(((step, 1, shape[2]), acc), ((step, *shape[1:]), acc))


def softmax_backward(
    ctx: Workspace, ograd: RawArray, output: RawArray, out: RawArray, *, scale: float = 1.0, log: bool = False
) -> None:
    """Compute the gradient of :func:`softmax` from its output; ``out`` may be ``ograd`` or ``output``."""
    xp = ctx.xp
    shape = output.shape
    step = rows_per_block(shape)
    acc = compute_dtype(output.dtype, out.dtype)
    reduced = ctx.take((step, 1, shape[2]), acc)
    scratch = ctx.take((step, *shape[1:]), acc)
    for rows in row_blocks(shape):
        g, y, target = ograd[rows], output[rows], out[rows]
        total, z = reduced[: g.shape[0]], scratch[: g.shape[0]]
        if log:
            xp.sum(g, axis=1, dtype=acc, out=total, keepdims=True)
            xp.exp(y, out=z)
            xp.multiply(z, total, out=z)
            xp.subtract(g, z, out=z)
        else:
            xp.multiply(g, y, out=z)
            xp.sum(z, axis=1, out=total, keepdims=True)
            xp.subtract(g, total, out=z)
            xp.multiply(z, y, out=z)
        if scale != 1.0:
            xp.multiply(z, scale, out=z)
        xp.copyto(target, z, casting="same_kind")
