"""Idle executors make room: the block of a pool waits in a home of ``WEFTPLAN_SPILL`` until somebody needs its bytes.

A rung of storage's ladder, tried after arrays have left. A block may leave when no run is being pushed on its pool, no
operation on any var of the pool is pending, and nobody has an array exported from it. The thread that sends it away

1. takes the pool's lock; who begins a run, or finds no bytes under an array of the pool, waits for that;
2. takes the bytes from every storage: an operation that is granted from now on finds none, and waits, too;
3. looks whether anything is pending, drops prepared calls, and looks whether anybody else has a view of the bytes. What
   had them before step 2 still is pending, or still has the view: then they are put back;
4. copies the bytes and gives the memory back.

The bytes come back before the next run is pushed, or in the first operation that reads an output. Memory for them is
taken without the lock: that may wait for operations that need it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from sys import getrefcount
from typing import Any

from weftplan import device
from weftplan.device.context import Context
from weftplan.device.stream import no_stream
from weftplan.errors import OutOfMemoryError
from weftplan.executor.pool_memory import PoolMemory
from weftplan.ndarray import spilling
from weftplan.storage import homes, relief

_pools: weakref.WeakSet[Any] = weakref.WeakSet()


class _Held:
    """Something with one attribute, to count references as they are counted below."""

    __slots__ = ("__weakref__", "kept")

    def __init__(self) -> None:
        self.kept = object()


def _references(thing: Any) -> int:
    """How many references there are, those of the caller's variable and of this call included."""
    return getrefcount(thing)


def _measured() -> tuple[int, int]:
    block = _Held()
    table = {0: block}
    return _references(table[0]), _references(block.kept)


_BLOCK, _ATTRIBUTE = _measured()
"""What the count says of a block that a table and a variable hold, and of what one attribute holds."""
_EXACT: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Where references are not counted exactly nothing leaves."""


class Idleness:
    """What of one pool is in homes, and whether more may go there."""

    def __init__(self, pool: Any) -> None:
        self._pool = weakref.ref(pool)
        self._lock = threading.Lock()
        self._users = 0
        """Runs that are being pushed. Guarded by ``_lock``, as is the next."""
        self._kept: dict[Context, tuple[homes.Kept, int]] = {}
        _pools.add(pool)

    @property
    def away(self) -> dict[Context, int]:
        """Bytes in homes, per device."""
        return {ctx: nbytes for ctx, (_, nbytes) in self._kept.items()}

    def __enter__(self) -> None:
        """A run is about to be pushed: all bytes are there until the end of the ``with`` block."""
        with self._lock:
            self._users += 1
        try:
            self.bring_back()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._users -= 1

    def bring_back(self) -> None:
        """Bring every block back; raises OutOfMemoryError where there is no room, with what is away still there."""
        with self._lock:  # behind a copy that is on its way
            away = self.away
        for ctx, nbytes in away.items():
            block = PoolMemory(ctx, nbytes)
            with self._lock:
                kept, _ = self._kept.get(ctx, (None, 0))
                pool = self._pool()
                if kept is None or pool is None:  # another thread was quicker
                    block.chunk.close()
                    continue
                kept.read(block.raw, ctx)
                pool._install(ctx, block)
                del self._kept[ctx]
            kept.free()

    def leave(self, ctx: Context, where: tuple[Any, ...]) -> int:
        """Send the block on ``ctx`` to a home; returns the bytes, 0 where somebody uses it.

        Raises:
            OutOfMemoryError: no home has room. The bytes are where they were.
        """
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            pool = self._pool()
            block = None if pool is None else pool._blocks.get(ctx)
            if pool is None or block is None or self._users or not block.nbytes or not block.counted:
                return 0
            members = pool._placements()
            chunks = [chunk for member in members for chunk in member.chunks if chunk.context == ctx]
            raws = [chunk.withhold() for chunk in chunks]
            kept = None
            try:
                alone = _references(block) == len(chunks) + _BLOCK and all(
                    _references(chunk._release) == _ATTRIBUTE for chunk in chunks
                )
                if alone and pool.idle([pool.var, *(chunk.var for chunk in chunks)]):
                    for chunk in chunks:
                        chunk.forget_views()
                    # Who reads after a wait is no operation: its view refers to the bytes.
                    if all(_references(raw) == _BLOCK for raw in raws):
                        kept = homes.keep(block.raw, ctx, where, "planned")
            finally:
                if kept is None:
                    for chunk, raw in zip(chunks, raws, strict=True):
                        chunk._raw = raw
            if kept is None:
                return 0
            raws.clear()
            self._kept[ctx] = kept, block.nbytes
            pool._vacate(ctx)
            nbytes = block.nbytes
            block.chunk.close()
            return int(nbytes)
        finally:
            self._lock.release()

    def close(self) -> None:
        """The pool is gone: nothing waits any more."""
        for kept, _ in self._kept.values():
            kept.free()


def _send_away(context: Context, nbytes: int) -> bool:
    """A rung: blocks of executors that are not running."""
    if not spilling.active() or not _pools or not _EXACT:
        return False
    place = device.get(context)
    if place.asynchronous:
        with no_stream():
            place.synchronize()
    freed = 0
    for pool in list(_pools):
        try:
            freed += pool.idleness.leave(context, spilling.listed())
        except OutOfMemoryError as error:
            relief.explain(f"Nothing could be sent elsewhere (WEFTPLAN_SPILL): {error}")
            break
        if freed >= nbytes:
            break
    return freed > 0


relief.add(29, _send_away, again=True)
