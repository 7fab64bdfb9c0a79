"""Allocations under movable chunks: wait for their users, copy their contents, and enlarge them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import numpy as np

from weftplan import device, engine
from weftplan.device.context import Context, cpu
from weftplan.engine import FnProperty
from weftplan.engine.var import Var
from weftplan.ndarray import NDArray
from weftplan.ndarray.memory.chunk import Chunk, MovableChunk, nothing
from weftplan.ndarray.memory.release import drain
from weftplan.ndarray.pushing import push
from weftplan.ndarray.spill import spilling
from weftplan.support.array_types import DTypeLike, RawArray


class PoolMemory:
    """A block: one allocation, which pools cut into movable chunks.

    Chunks and the arrays that are exported from them refer to the block, not to its allocation. So a block without
    references can be freed immediately.
    """

    __slots__ = ("__weakref__", "chunk", "counted")

    def __init__(self, ctx: Context, nbytes: int) -> None:
        self.chunk = Chunk(ctx, nbytes, name="planned")
        self.counted = spilling.active()
        """Whether all views of a part refer to that part, so that its reference count shows whether a view exists."""

    def cut(self, ranges: Iterable[tuple[int, int]]) -> list[RawArray]:
        """Return the parts of the block with the given (offset, bytes), as arrays of uint8."""
        raw = self.raw
        parts = [raw[offset : offset + nbytes] for offset, nbytes in ranges]
        return [spilling.counted(part) for part in parts] if self.counted else parts

    @property
    def raw(self) -> RawArray:
        """All bytes of the block, as an array of uint8."""
        raw: RawArray = self.chunk.raw
        return raw

    @property
    def nbytes(self) -> int:
        """Number of bytes of the block."""
        return self.chunk.nbytes


def settle(vars_: Iterable[Var]) -> None:
    """Block until no operation on ``vars_`` is pending. Failures of these operations are not raised.

    Raises:
        WaitInWorkerError: called inside an engine operation.
    """
    marker = Chunk(cpu(0), 0, name="settled")
    # Like a delete, this operation runs even if a var has failed, and leaves the failure on the var.
    push(nothing, (), [marker.var, *vars_], cpu(0), prop=FnProperty.DELETE_VAR, name="settle")
    marker.engine.wait_for_var(marker.var)


def finish_deletes(ctx: Context) -> None:
    """Wait until the engine has deleted the vars of dead chunks, which refer to blocks on ``ctx``."""
    drain(everything=True)
    marker = Chunk(cpu(0), 0, name="drained")
    push(nothing, (), (marker.var,), ctx, name="drain")
    marker.engine.wait_for_var(marker.var)


def copy_bytes(ctx: Context, target: RawArray, source: RawArray) -> None:
    """Copy bytes within the memory of ``ctx``, or between it and the host, and wait for the copy."""
    marker = Chunk(cpu(0), 0, name="moved")
    engine.get().push(partial(device.get(ctx).copy, target, source), (), (marker.var,), ctx, name="move memory")
    marker.engine.wait_for_var(marker.var)


def growable(ctx: Context, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
    """Return a zero-filled array whose chunk :func:`grow` can enlarge."""
    block = PoolMemory(ctx, math.prod(shape) * np.dtype(dtype).itemsize)
    array = NDArray(MovableChunk.over(ctx, block.raw, block, name="shared buffer"), shape, dtype)
    array[:] = 0
    return array


def grow(chunk: MovableChunk, nbytes: int) -> None:
    """Enlarge a chunk to ``nbytes`` bytes, filling the new bytes with zeros. Arrays on the chunk stay valid.

    Raises:
        OutOfMemoryError: no room for a second allocation; the chunk is unchanged.
        WaitInWorkerError: called inside an engine operation.
    """
    block, old_nbytes = PoolMemory(chunk.context, nbytes), chunk.nbytes
    settle([chunk.var])
    copy_bytes(chunk.context, block.raw[:old_nbytes], chunk.raw)
    chunk.move(block.raw, block)
    NDArray(chunk, (nbytes - old_nbytes,), "uint8", old_nbytes)[:] = 0
