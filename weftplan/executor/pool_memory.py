"""Memory under chunks that move: one allocation, and how it is waited for, filled and replaced."""

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
    """One allocation. Chunks, and arrays exported from them, hold the block, never the allocation itself: a block
    without references can be closed inline."""

    __slots__ = ("__weakref__", "chunk", "counted")

    def __init__(self, ctx: Context, nbytes: int) -> None:
        self.chunk = Chunk(ctx, nbytes, name="planned")
        self.counted = spilling.active()
        """Whether views of a result of :meth:`cut` refer to it, so that a count tells whether any view is alive."""

    def cut(self, ranges: Iterable[tuple[int, int]]) -> list[RawArray]:
        """Return the ranges of the bytes, each given as (offset, bytes)."""
        raw = self.raw
        parts = [raw[offset : offset + nbytes] for offset, nbytes in ranges]
        return [spilling.counted(part) for part in parts] if self.counted else parts

    @property
    def raw(self) -> RawArray:
        """Its bytes."""
        raw: RawArray = self.chunk.raw
        return raw

    @property
    def nbytes(self) -> int:
        """How many they are."""
        return self.chunk.nbytes


def settle(vars_: Iterable[Var]) -> None:
    """Block until no operation on these vars is pending, failed operations included; raise no failure.

    Raises:
        WaitInWorkerError: called inside an engine operation.
    """
    done = Chunk(cpu(0), 0, name="settled")
    # The property of deletes: it runs whatever has failed, and leaves failures on the vars as they are.
    push(nothing, (), [done.var, *vars_], cpu(0), prop=FnProperty.DELETE_VAR, name="settle")
    done.engine.wait_for_var(done.var)


def finish_deletes(ctx: Context) -> None:
    """Let the engine delete the vars of dead chunks, and with them the references to blocks on ``ctx``."""
    drain(everything=True)
    done = Chunk(cpu(0), 0, name="drained")
    push(nothing, (), (done.var,), ctx, name="drain")
    done.engine.wait_for_var(done.var)


def copy_bytes(ctx: Context, target: RawArray, source: RawArray) -> None:
    """Copy bytes between the device and itself or the host, and wait for that."""
    done = Chunk(cpu(0), 0, name="moved")
    engine.get().push(partial(device.get(ctx).copy, target, source), (), (done.var,), ctx, name="move memory")
    done.engine.wait_for_var(done.var)


def growable(ctx: Context, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray:
    """Return a zero-filled array whose chunk :func:`grow` can enlarge."""
    block = PoolMemory(ctx, math.prod(shape) * np.dtype(dtype).itemsize)
    array = NDArray(MovableChunk.over(ctx, block.raw, block, name="shared buffer"), shape, dtype)
    array[:] = 0
    return array


def grow(chunk: MovableChunk, nbytes: int) -> None:
    """Give a chunk ``nbytes`` bytes, more than it has: its old bytes first, then zeros. Arrays on it stay valid.

    Raises:
        OutOfMemoryError: no room next to the old bytes; nothing has changed.
        WaitInWorkerError: called inside an engine operation.
    """
    block, before = PoolMemory(chunk.context, nbytes), chunk.nbytes
    settle([chunk.var])
    copy_bytes(chunk.context, block.raw[:before], chunk.raw)
    chunk.move(block.raw, block)
    NDArray(chunk, (nbytes - before,), "uint8", before)[:] = 0
