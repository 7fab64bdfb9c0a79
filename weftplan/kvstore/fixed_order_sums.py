"""Sums of several arrays in a fixed order of additions, on CPU threads.

The bits of a sum depend on the order of the sources only, never on arrival order, thread count or block size, because
each element is summed by the same sequence of additions. Two orders exist, as in MXNet 1.9.1:

* :func:`sum_grouped_block` (store ``local``): ``acc = x0``, then for i = 1, 5, 9, …
  ``acc = acc + (((x[i] + x[i+1]) + x[i+2]) + x[i+3])``, without terms past the last source. float16 is rounded after
  each addition, as in MXNet; bfloat16 is added in float32 and rounded once.
* :func:`sum_sequential_block` (store ``device``): from left to right; half precision is added in float32 and rounded
  once.

Both read each source from memory once and write the result once. Large float32 and float64 arrays use a compiled loop
(:mod:`weftplan.kernels.compiled.exchange.sums`) if llvmlite is installed; otherwise NumPy works in blocks that stay in
a core's cache. Helper threads, separate from the engine's (:mod:`weftplan.support.core_sharing`), sum ranges of blocks.
They run nothing else, so they never wait for another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import numpy as np

from weftplan.ndarray.errstate import quietly
from weftplan.ops.core.floats import is_half
from weftplan.ops.core.implementations import PAST
from weftplan.support import slots
from weftplan.support.core_sharing import share_out

BLOCK_BYTES = 1 << 18
"""Bytes of one block of one array: a few blocks fit into a core's second-level cache."""

Array = np.ndarray[Any, np.dtype[Any]]


class Sharing(TypedDict):
    """The keyword arguments of :func:`reduce_arrays` that a store sets once."""

    threads: int
    bound: int
    compiled: bool


BlockSum = Callable[[Sequence[Array], Array, Array], None]


def sum_grouped_block(sources: Sequence[Array], out: Array, scratch: Array) -> None:
    """Sum a block in MXNet's ``local`` order; ``out`` may be ``sources[0]``, but no other source.

    ``scratch`` is overwritten; it has the shape and dtype of ``out``, and may be ``out`` for up to two sources.
    """
    count = len(sources)
    if count == 1:
        np.copyto(out, sources[0])
        return
    if count > 2 and out.dtype != np.float16 and is_half(out.dtype):  # bfloat16, which MXNet cannot sum
        wide, group_sum = sources[0].astype(np.float32), np.empty(out.shape, np.float32)
        sum_grouped_block([wide, *(term.astype(np.float32) for term in sources[1:])], wide, group_sum)
        np.copyto(out, wide, casting="unsafe")
        return
    acc = sources[0]
    for begin in range(1, count, 4):
        group = sources[begin : begin + 4]
        if len(group) == 1:
            np.add(acc, group[0], out=out)
        else:
            np.add(group[0], group[1], out=scratch)
            for term in group[2:]:
                np.add(scratch, term, out=scratch)
            np.add(acc, scratch, out=out)
        acc = out


def sum_sequential_block(sources: Sequence[Array], out: Array, scratch: Array) -> None:
    """Sum a block from left to right; ``out`` may be one of the first two sources, but no later source."""
    del scratch
    if len(sources) == 1:
        np.copyto(out, sources[0])
        return
    if len(sources) > 2 and is_half(out.dtype):
        wide = np.add(sources[0], sources[1], dtype=np.float32)
        for term in sources[2:]:
            np.add(wide, term, out=wide, dtype=np.float32)
        np.copyto(out, wide, casting="unsafe")
        return
    np.add(sources[0], sources[1], out=out)
    for term in sources[2:]:
        np.add(out, term, out=out)


def reduce_arrays(
    sources: Sequence[Array],
    out: Array,
    *,
    block_sum: BlockSum = sum_grouped_block,
    threads: int,
    bound: int,
    compiled: bool = True,
) -> None:
    """Write the sum of ``sources`` to ``out``; all arrays are contiguous and have the same shape and dtype.

    Args:
        sources: at least one array; ``sources[0]`` may be ``out``.
        out: receives the sum.
        block_sum: the function that sums a block, which sets the order of additions.
        threads: maximum number of threads, including the calling thread.
        bound: arrays of fewer elements are summed on the calling thread alone.
        compiled: whether a compiled loop, which gives the same bits, may be used for large arrays.
    """
    flat_out = out.reshape(-1)
    flats = [source.reshape(-1) for source in sources]
    if flat_out.size == 0:
        return
    block = max(1, BLOCK_BYTES // flat_out.itemsize)
    if flat_out.size <= block and (threads <= 1 or flat_out.size < bound):
        _sum_range(flats, flat_out, 0, flat_out.size, block, block_sum)
        return
    work = None
    if compiled and block_sum in _COMPILED and flat_out.nbytes > BLOCK_BYTES:
        work = slots.COMPILED_SUM.get()(flats, flat_out, grouped=_COMPILED[block_sum])
    if work is None:

        def work(lo: int, hi: int) -> None:
            _sum_range(flats, flat_out, lo, hi, block, block_sum)

    share_out(work, flat_out.size, block, threads if flat_out.size >= bound else 1)


def reduce_each(
    sums: Sequence[tuple[Sequence[Array], Array]],
    *,
    block_sum: BlockSum = sum_grouped_block,
    threads: int,
    bound: int,
    compiled: bool = True,
) -> None:
    """Do :func:`reduce_arrays` for each (sources, out), with the same bits; small sums share the overhead of a call."""
    small = []
    for sources, out in sums:
        single_block = len(sources) == 2 or out.nbytes <= BLOCK_BYTES
        if single_block and out.nbytes < PAST and (threads <= 1 or out.size < bound):
            small.append((sources, out))
        else:
            reduce_arrays(sources, out, block_sum=block_sum, threads=threads, bound=bound, compiled=compiled)
    if small:
        quietly(_sum_each, small, block_sum)


def _sum_each(sums: Sequence[tuple[Sequence[Array], Array]], block_sum: BlockSum) -> None:
    for sources, out in sums:
        block_sum(sources, out, np.empty(out.shape, out.dtype) if len(sources) > 2 else out)


def sum_single_block(sources: Sequence[Array], out: Array, block_sum: BlockSum) -> None:
    """Do :func:`reduce_arrays` for arrays of at most :data:`BLOCK_BYTES` on the calling thread, with less overhead."""
    quietly(block_sum, sources, out, np.empty(out.shape, out.dtype) if len(sources) > 2 else out)


_COMPILED: dict[BlockSum, bool] = {sum_grouped_block: True, sum_sequential_block: False}
"""The orders that have a compiled loop; True: the loop adds in groups of four."""


def spread_array(
    source: Array, targets: Sequence[Array], *, threads: int, bound: int, compiled: bool = True, total: int = 0
) -> None:
    """Copy ``source`` to each target; a compiled loop reads it once for all targets.

    Args:
        source: contiguous array.
        targets: contiguous arrays of the same shape and dtype, without shared memory.
        threads: maximum number of threads, including the calling thread.
        bound: arrays of fewer elements are copied on the calling thread alone.
        compiled: whether a compiled loop may be used for large arrays.
        total: bytes that the caller writes in all, if more than those of these targets; decides whether copies bypass
            the caches.
    """
    if source.size == 0 or not targets:
        return
    if source.nbytes <= BLOCK_BYTES and (threads <= 1 or source.size < bound):
        for target in targets:
            target[...] = source
        return
    flat = source.reshape(-1)
    flats = [target.reshape(-1) for target in targets]
    block = max(1, BLOCK_BYTES // flat.itemsize)
    work = None
    if compiled and len(flats) > 1 and flat.nbytes > BLOCK_BYTES:
        work = slots.COMPILED_SPREAD.get()(flat, flats)
    if work is None:
        fill = filler(max(total, len(targets) * source.nbytes), compiled=compiled)

        def work(lo: int, hi: int) -> None:
            for target in flats:
                fill(flat[lo:hi], target[lo:hi])

    share_out(work, flat.size, block, threads if flat.size >= bound else 1)


def filler(nbytes: int, *, compiled: bool = True) -> Callable[[Array, Array], object]:
    """Return a function ``fill(source, target)`` that copies a one-dimensional array.

    If the caller copies at least ``PAST`` bytes (``nbytes``) in all, and a compiled loop may be used, the stores of
    ``fill`` bypass the caches.
    """
    return _fill_past if compiled and nbytes >= PAST else _fill


def _fill(source: Array, target: Array) -> None:
    target[...] = source


def _fill_past(source: Array, target: Array) -> None:
    if not slots.COPY_PAST.get()(source, target):
        target[...] = source


def _sum_range(sources: Sequence[Array], out: Array, start: int, stop: int, block: int, block_sum: BlockSum) -> None:
    # Overflow gives inf without a warning: NumPy's warning settings are per thread, and any thread may sum.
    scratch = np.empty(min(block, stop - start), out.dtype) if len(sources) > 2 else out
    if stop - start <= block and start == 0 and stop == out.size:
        quietly(block_sum, sources, out, scratch)
        return
    for lo in range(start, stop, block):
        hi = min(lo + block, stop)
        quietly(block_sum, [source[lo:hi] for source in sources], out[lo:hi], scratch[: hi - lo])
