"""Building blocks of kernels: copies, blockwise evaluation, reduction to a broadcast shape.

An elementwise formula of several steps runs block by block. So its scratch has at most
:func:`weftplan.ops.core.tiling.block` elements, and on a CPU a block stays in the cache between the steps. Block sizes
depend only on shapes and the type of the device, so every sum has one fixed order.

Kernels call ``negative`` on contiguous arrays only: NumPy 2.1 to 2.4.6 computes it wrongly if input and output have the
same strides, of 16 bytes for 4-byte elements or 64 bytes for 8-byte elements. A multiplication by -1 gives the same
bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice

import numpy as np

from weftplan.ops.core import tiling
from weftplan.ops.core.floats import is_float, is_half
from weftplan.ops.core.forms import BoundKernel, Call
from weftplan.ops.core.schema import (
    Arrays,
    DType,
    Params,
    Shape,
    Workspace,
    aligned,
)
from weftplan.support.array_types import ArrayModule, RawArray, Scalar

BOOL = np.dtype(bool)
INDEX = np.dtype(np.int64)


class _CopyKernel(BoundKernel):
    """A kernel that copies the elements of input 0 in order to output 0, whose shape may be another."""

    __slots__ = ()

    def bind(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return a call that copies these arrays."""
        return partial(ctx.xp.copyto, outputs[0].reshape(-1), inputs[0].reshape(-1))

    def expressions(self, params: Params, dtype: DType, operands: Sequence[object]) -> Sequence[object]:
        """Return the operand itself."""
        return operands


copy_kernel = _CopyKernel()


def converted(value: float, dtype: DType) -> float:
    """Return ``value`` as a number of ``dtype``: unchanged for floats, else truncated and wrapped like a C cast.

    >>> converted(2.9, np.dtype("int32")), converted(-1.0, np.dtype("uint8"))
    (2, 255)
    """
    if is_float(dtype):
        return value
    bits = int(value) & (1 << 64) - 1 if math.isfinite(value) else 0
    number: float = np.array(bits, np.uint64).astype(dtype).item()
    return number


def accumulator(dtype: DType) -> DType:
    """Return the accumulator dtype for sums of ``dtype``: float32 for float16 and bfloat16, else ``dtype`` itself."""
    return np.dtype(np.float32) if is_half(dtype) else dtype


def blocks(ctx: Workspace, arrays: Sequence[RawArray], scratch: Sequence[DType] = ()) -> Iterator[tuple[RawArray, ...]]:
    """Yield the blocks of ``arrays``, which have equal sizes: flat slices, then scratch arrays of the same length.

    The scratch of all blocks is the same memory, of :func:`block_bytes` bytes.
    """
    flat = [array.reshape(-1) for array in arrays]
    size = flat[0].size
    limit = tiling.block()
    if size <= limit:
        yield (*flat, *(ctx.take((size,), dtype) for dtype in scratch))
        return
    buffers = [ctx.take((limit,), dtype) for dtype in scratch]
    for start in range(0, size, limit):
        stop = min(start + limit, size)
        yield (*(array[start:stop] for array in flat), *(space[: stop - start] for space in buffers))


def block_bytes(size: int, scratch: Sequence[DType]) -> int:
    """Return the workspace bytes of :func:`blocks` over arrays of ``size`` elements.

    >>> block_bytes(10**9, [np.dtype("float32")]) == 4 * tiling.block()
    True
    """
    limit = tiling.block()
    return sum(aligned(min(size, limit) * dtype.itemsize) for dtype in scratch)


def reduce_to(xp: ArrayModule, source: RawArray, target: RawArray) -> None:
    """Sum ``source`` over the axes along which ``target`` broadcasts to its shape; write the sum to ``target``."""
    shape = source.shape
    padded = (1,) * (len(shape) - target.ndim) + target.shape
    if padded == shape:
        xp.copyto(target.reshape(shape), source)
        return
    axes = tuple(axis for axis, dim in enumerate(padded) if dim == 1 and shape[axis] != 1)
    xp.sum(source, axis=axes, dtype=accumulator(target.dtype), out=target.reshape(padded), keepdims=True)


@lru_cache(maxsize=4096)
def collapse(out: Shape, *shapes: Shape) -> tuple[Shape, ...]:
    """Return ``out`` and the shapes that broadcast to it, with adjacent axes merged if no shape distinguishes them.

    >>> collapse((2, 3, 4, 5), (2, 3, 4, 5), (3, 1, 1))
    ((2, 3, 20), (2, 3, 20), (1, 3, 1))
    """
    rank = len(out)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    joined: list[list[int]] = [[] for _ in range(len(shapes) + 1)]
    previous: tuple[bool, ...] | None = None
    for axis in range(rank):
        if out[axis] == 1:
            continue
        pattern = tuple(shape[axis] != 1 for shape in padded)
        if pattern == previous:
            joined[0][-1] *= out[axis]
            for k, shape in enumerate(padded):
                joined[k + 1][-1] *= shape[axis]
        else:
            joined[0].append(out[axis])
            for k, shape in enumerate(padded):
                joined[k + 1].append(shape[axis])
        previous = pattern
    return tuple(tuple(dims) or (1,) for dims in joined)


def rows_per_block(out: Shape, limit: int | None = None) -> int:
    """Return the number of leading rows of shape ``out`` in a block of at most ``limit`` elements; at least one row.

    None: the elements of :func:`weftplan.ops.core.tiling.block`.
    """
    return min(out[0], max(1, (limit or tiling.block()) // max(1, math.prod(out[1:]))))


def row_blocks(shape: Shape, limit: int | None = None) -> Iterator[slice]:
    """Yield slices that cut axis 0 of a tensor of shape ``shape`` into blocks of :func:`rows_per_block` rows.

    >>> list(row_blocks((5, tiling.block() // 2)))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = rows_per_block(shape, limit)
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


def gather(xp: ArrayModule, source: RawArray, index: RawArray, axis: int, out: RawArray) -> None:
    """Write the elements of ``source`` at ``index`` along ``axis`` to ``out``; ``index``: int64, all within range."""
    if xp is np:
        np.take(source, index, axis=axis, out=out, mode="clip")  # "raise" would buffer the whole output
    else:
        xp.take(source, index, axis=axis, out=out)


def divide_integers(
    xp: ArrayModule, a: RawArray | Scalar, b: RawArray | Scalar, out: RawArray, scratch: RawArray
) -> None:
    """Write the quotients of integers ``a`` and ``b`` to ``out``, rounded towards zero; division by 0 gives 0.

    ``out`` may be ``a`` or ``b``; ``scratch`` has the shape and dtype of ``out``.
    """
    xp.fmod(a, b, out=scratch)
    xp.subtract(a, scratch, out=scratch)  # a multiple of b, nearer to zero than a: cannot overflow
    xp.floor_divide(scratch, b, out=out)


def to_index(xp: ArrayModule, index: RawArray, size: int, mode: str, out: RawArray) -> None:
    """Write ``index`` (any dtype) as integers to ``out`` (int64), limited to [0, size).

    ``mode``: ``wrap``: modulo ``size``; any other mode: clip.
    """
    xp.copyto(out, index, casting="unsafe")
    if mode == "wrap":
        xp.remainder(out, size, out=out)
    else:
        xp.clip(out, 0, size - 1, out=out)


MAX_PREPARED = 64
"""Maximum blocks of a prepared call. More blocks would need many views, and gain little: calls are cheap compared with
the work on large arrays."""


def bound_blocks(
    ctx: Workspace, step: Callable[..., object], arguments: Callable[[], Iterator[tuple[object, ...]]], count: int = 0
) -> Call:
    """Return a call of ``step`` on each block that ``arguments`` yields; the views of few blocks are made only once.

    ``count``: the number of blocks, which saves time if they are many; 0: not known.
    """
    every = ctx.repeated(partial(_run_blocks, step, arguments))
    if count > MAX_PREPARED:
        return every
    calls = [partial(step, *block) for block in islice(arguments(), MAX_PREPARED + 1)]
    if len(calls) > MAX_PREPARED:
        return every
    return calls[0] if len(calls) == 1 else partial(_run_all, calls)


def _run_blocks(step: Callable[..., object], arguments: Callable[[], Iterator[tuple[object, ...]]]) -> None:
    for block in arguments():
        step(*block)


def _run_all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()
