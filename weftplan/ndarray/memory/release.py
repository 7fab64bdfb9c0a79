"""The release of dead chunks: from the finalizer through the engine back to storage.

A chunk's memory may be returned only when every operation pushed on its var has run. So the engine frees it
(``delete_variable(var, free)``). If no other object has the var, no operation can be pending, and :func:`drain` frees
the memory immediately. The garbage collector may run a finalizer at any moment, possibly inside a lock of the engine or
of storage. So a finalizer only appends to :data:`dead`, which a later push or new chunk empties.

This file owns the three deques, and the steps that storage tries when memory runs out. Any thread may use it, except
that finalizers may only append.
"""

from __future__ import annotations

import gc
import math
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from sys import getrefcount
from typing import Any

import numpy as np

from weftplan import config, engine, storage
from weftplan.device.context import Context, cpu
from weftplan.errors import EngineError
from weftplan.storage import Resource, registry, relief, stream_order

dead: deque[tuple[Any, Any, Context, Callable[[], object]]] = deque()
"""(engine, var, context, function to call when the var is idle) of collected chunks."""
due: deque[int] = deque()
"""Bytes of dead chunks; empty while ``dead`` holds only a few small chunks, which are not counted. Successive pushes on
small arrays check only this: by the time that it fills, the operations on most chunks are over, so that the chunks are
freed without an engine operation."""
SMALL, FEW = 4096, 1024
"""Bytes per chunk and number of chunks that may wait uncounted, 4 MiB in all."""
coming: deque[None] = deque()
"""One element per chunk that the engine will free when the pending operations on its var are over."""
PATIENCE_S = 10.0
"""Seconds that an allocation of host memory waits for pending operations, in all."""


def _next(dead: deque[tuple[Any, Any, Context, Callable[[], object]]]) -> tuple[Any, Any, Context, Any, int]:
    """Remove and return the first entry of ``dead``, with its var's reference count, including this call's."""
    owner, var, context, release = dead.popleft()
    return owner, var, context, release, getrefcount(var)


_ALONE = _next(deque([(None, object(), cpu(), int)]))[4] if getattr(sys, "_is_gil_enabled", lambda: True)() else 0
"""The count without other references; 0, which no count equals, without a GIL, since counts may be inexact then."""


class Shelf:
    """A free list of dead arrays of one kind: var, memory, and a typed view of it.

    Only small host arrays are added, and only if no other object has their var, since no operation can be pending then.
    Entries are ``(var, release, raw, view)``. Finalizers append, any thread may pop.

    Attributes:
        room: the maximum number of entries; 0: closed for good.
        changes: storage's change count when the free list was made; another resource may be in force since.
    """

    __slots__ = ("changes", "context", "engine", "entries", "resource", "room")

    def __init__(self, context: Context, engine: Any, resource: Resource | None, changes: int, room: int) -> None:
        self.context = context
        self.engine = engine
        self.resource = resource
        self.changes = changes
        self.room = room
        self.entries: list[tuple[Any, Any, Any, Any]] = []

    def clear(self) -> None:
        """Free all entries."""
        entries = self.entries
        while entries:
            try:
                entries.pop()[1]()
            except IndexError:  # another thread took the last entry
                return

    def __del__(self) -> None:
        for var, release, _, _ in self.entries:  # of arrays that died while another thread closed it
            dead.append((self.engine, var, self.context, release))


CLOSED = Shelf(cpu(), None, None, 0, 0)
"""The free list of arrays that are never reused."""
_MOST_SHELVES, _ROOM, _ROOM_BYTES = 64, 16, 64 << 10
"""Free lists, entries per list, and bytes per list: together at most 4 MiB."""
_shelves: dict[Any, Shelf] = {}


def shelf_for(context: Context, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Shelf:
    """Return the free list of arrays of this shape and dtype on a host, for the current engine and storage."""
    key = context, shape, dtype
    current, changes = engine.get(), registry.changes
    shelf = _shelves.get(key)
    if shelf is None or shelf.engine is not current or shelf.changes != changes:
        if shelf is not None or len(_shelves) >= _MOST_SHELVES:
            _close_shelves()
        resource = storage.get(context)
        room = min(_ROOM, _ROOM_BYTES // max(1, math.prod(shape) * dtype.itemsize))
        room = room if resource.hands_over and _ALONE else 0
        shelf = _shelves[key] = Shelf(context, current, resource, changes, room)
    return shelf


def _close_shelves() -> None:
    """Free all entries of all free lists, and close the lists."""
    while _shelves:
        try:
            _, shelf = _shelves.popitem()
        except KeyError:  # another thread took the last free list
            return
        shelf.room = 0
        shelf.clear()


_threshold: float | None = None
"""Bytes of ``FLAGS_eager_delete_tensor_gb``; None: not read yet."""


def drain(*, everything: bool = False) -> None:
    """Free the memory of every collected chunk after the operations pending on its var, and clear the free lists.

    This is :func:`sweep` including the free lists; it is cheap if there are no dead chunks.
    """
    for shelf in list(_shelves.values()):
        shelf.clear()
    sweep(everything=everything)


def sweep(*, everything: bool = False) -> None:
    """Free the memory of collected chunks, except those on free lists.

    Nothing is freed while fewer bytes are dead than ``FLAGS_eager_delete_tensor_gb``, or if that is below 0. With
    ``everything`` all is freed, because memory is short.

    Each pending operation holds its vars. So if only this function has a reference to the var (CPython with a GIL
    counts exactly), no operation is pending, and the memory is freed immediately. Otherwise the engine deletes the var
    after its pending operations.
    """
    if stream_order.late:
        stream_order.settle()
    if _threshold != 0.0 and not everything and _early():
        return
    due.clear()
    while dead:
        try:
            owner, var, context, release, count = _next(dead)
        except IndexError:  # another thread took the last entry
            return
        if count == _ALONE and var.failure is None and var.events is None:
            release()
            continue
        coming.append(None)
        try:
            owner.delete_variable(var, partial(_arrive, release), context)
        except EngineError:
            # The engine has stopped for good: nothing can be pending.
            _arrive(release)


def _early() -> bool:
    """Return whether too few bytes are dead to be freed."""
    global _threshold
    if _threshold is None:
        _threshold = float(config.process("FLAGS_eager_delete_tensor_gb")) * 2**30
    return _threshold < 0 or sum(list(due)) < _threshold


def _arrive(release: Callable[[], object]) -> None:
    """Free memory whose var the engine has deleted."""
    try:
        release()
    finally:
        coming.pop()


def _give_dead_back(context: Context, nbytes: int) -> bool:
    """Free dead chunks; a step of storage's ladder."""
    if not dead and not any(shelf.entries for shelf in list(_shelves.values())):
        return False
    drain(everything=True)
    return True


def _collect_cycles(context: Context, nbytes: int) -> bool:
    """Collect arrays that only reference cycles hold; a step of the ladder."""
    gc.collect()
    return _give_dead_back(context, nbytes)


def _await_frees(context: Context, nbytes: int) -> bool:
    """Wait for frees that depend on pending operations; a step of the ladder.

    Without such frees, or inside an operation, it does not wait.
    """
    awaited = len(coming)
    try:
        on_gpu = context.device_type in ("gpu", "sim")
        patience = config.process("FLAGS_gpu_allocator_retry_time") / 1000 if on_gpu else PATIENCE_S
        return awaited > 0 and (engine.get().settle(patience) or len(coming) < awaited)
    except EngineError:  # the engine has stopped, or this thread is in the middle of its work
        return False


relief.add(10, _give_dead_back)
relief.add(30, _collect_cycles)
relief.add(40, _await_frees)
