"""The release of dead chunks: from the finalizer through the engine back to storage.

A chunk's memory may be returned only when every operation pushed on its var has run. So the engine frees it
(``delete_variable(var, free)``). If no other object has the var, no operation can be pending, and :func:`drain` frees
the memory immediately. The garbage collector may run a finalizer at any moment, possibly inside a lock of the engine or
of storage. So a finalizer only appends to the queue of :data:`dead`, which a later push or new chunk empties.

This file owns the queue of dead chunks (:class:`DeadChunks`), the free lists, and the steps that storage tries when
memory runs out. Any thread may use it, except that finalizers may only append.
"""

from __future__ import annotations

import gc
import math
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from sys import getrefcount
from typing import Any, TypeVar

from weftplan import config, engine, storage
from weftplan.device.context import Context, cpu
from weftplan.engine import Engine
from weftplan.engine.var import Var
from weftplan.errors import EngineError
from weftplan.storage import Resource, registry, relief, stream_order
from weftplan.support.array_types import DType

SMALL, FEW = 4096, 1024
"""Largest chunk and longest queue for which :attr:`DeadChunks.pending` does not count a dead chunk: 4 MiB in all."""
PATIENCE_S = 10.0
"""Seconds that an allocation of host memory waits for pending operations, in all."""
E = TypeVar("E")
V = TypeVar("V")


def _next(queue: deque[tuple[E, V, Context, Callable[[], object]]]) -> tuple[E, V, Context, Callable[[], object], int]:
    """Remove and return the first entry of ``queue``, with its var's reference count, including this call's."""
    owner, var, context, release = queue.popleft()
    return owner, var, context, release, getrefcount(var)


_ALONE = _next(deque([(None, object(), cpu(), int)]))[4] if getattr(sys, "_is_gil_enabled", lambda: True)() else 0
"""The count without other references; 0, which no count equals, without a GIL, since counts may be inexact then."""


class ArrayFreeList:
    """A free list of dead arrays of one kind: var, memory, and a typed view of it.

    Only small host arrays are added, and only if no other object has their var, since no operation can be pending then.
    Entries are ``(var, release, raw, view)``. Finalizers append, any thread may pop.

    Attributes:
        room: the maximum number of entries; 0: closed for good.
        changes: storage's change count when the free list was made; another resource may be in force since.
    """

    __slots__ = ("capacity", "changes", "context", "engine", "entries", "resource")

    def __init__(
        self, context: Context, engine: Engine | None, resource: Resource | None, changes: int, capacity: int
    ) -> None:
        self.context = context
        self.engine = engine
        self.resource = resource
        self.changes = changes
        self.capacity = capacity
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
        if self.engine is not None and dead is not None:  # at exit the interpreter clears modules first
            for var, release, _, _ in self.entries:  # of arrays that died while another thread closed it
                dead.queue.append((self.engine, var, self.context, release))


CLOSED = ArrayFreeList(cpu(), None, None, 0, 0)
"""The free list of arrays that are never reused."""
_MAX_FREE_LISTS, _CAPACITY, _CAPACITY_BYTES = 64, 16, 64 << 10
"""Free lists, entries per list, and bytes per list: together at most 4 MiB."""


class DeadChunks:
    """The dead chunks of this process whose memory has not been returned to storage yet.

    A finalizer only appends, to ``queue`` and ``due``; :meth:`sweep` empties both.

    Attributes:
        queue: (engine, var, context, function to call when the var is idle) of collected chunks.
        due: bytes of dead chunks; empty while ``queue`` holds only a few small chunks, which are not counted.
            Successive pushes on small arrays check only this: by the time that it fills, the operations on most chunks
            are over, so that the chunks are freed without an engine operation.
        coming: one element per chunk that the engine will free when the pending operations on its var are over.
        free_lists: the free list of each (context, shape, dtype).
    """

    __slots__ = ("_threshold", "coming", "free_lists", "pending", "queue")

    def __init__(self) -> None:
        self.queue: deque[tuple[Engine, Var, Context, Callable[[], object]]] = deque()
        self.pending: deque[int] = deque()
        self.coming: deque[None] = deque()
        self.free_lists: dict[tuple[Context, tuple[int, ...], DType], ArrayFreeList] = {}
        self._threshold: float | None = None  # bytes of FLAGS_eager_delete_tensor_gb; None: not read yet

    def free_list_for(self, context: Context, shape: tuple[int, ...], dtype: DType) -> ArrayFreeList:
        """Return the free list of arrays of this shape and dtype on a host, for the current engine and storage."""
        key = context, shape, dtype
        current, changes = engine.get(), registry.changes
        free_list = self.free_lists.get(key)
        if free_list is None or free_list.engine is not current or free_list.changes != changes:
            if free_list is not None or len(self.free_lists) >= _MAX_FREE_LISTS:
                self._close_free_lists()
            resource = storage.get(context)
            capacity = min(_CAPACITY, _CAPACITY_BYTES // max(1, math.prod(shape) * dtype.itemsize))
            capacity = capacity if resource.hands_over and _ALONE else 0
            free_list = self.free_lists[key] = ArrayFreeList(context, current, resource, changes, capacity)
        return free_list

    def _close_free_lists(self) -> None:
        """Free all entries of all free lists, and close the lists."""
        while self.free_lists:
            try:
                _, free_list = self.free_lists.popitem()
            except KeyError:  # another thread took the last free list
                return
            free_list.capacity = 0
            free_list.clear()

    def drain(self, *, everything: bool = False) -> None:
        """Free the memory of every collected chunk after the operations pending on its var, and clear the free lists.

        This is :meth:`sweep` including the free lists; it is cheap if there are no dead chunks.
        """
        for free_list in list(self.free_lists.values()):
            free_list.clear()
        self.sweep(everything=everything)

    def sweep(self, *, everything: bool = False) -> None:
        """Free the memory of collected chunks, except those on free lists.

        Nothing is freed while fewer bytes are dead than ``FLAGS_eager_delete_tensor_gb``, or if that is below 0. With
        ``everything`` all is freed, because memory is short.

        Each pending operation holds its vars. So if only this function has a reference to the var (CPython with a GIL
        counts exactly), no operation is pending, and the memory is freed immediately. Otherwise the engine deletes the
        var after its pending operations.
        """
        if stream_order.late:
            stream_order.settle()
        if self._threshold != 0.0 and not everything and self._early():
            return
        queue = self.queue
        self.pending.clear()
        while queue:
            try:
                owner, var, context, release, count = _next(queue)
            except IndexError:  # another thread took the last entry
                return
            if count == _ALONE and var.failure is None and var.events is None:
                release()
                continue
            self.coming.append(None)
            try:
                owner.delete_variable(var, partial(self._arrive, release), context)
            except EngineError:
                # The engine has stopped for good: nothing can be pending.
                self._arrive(release)

    def _early(self) -> bool:
        """Return whether too few bytes are dead to be freed."""
        if self._threshold is None:
            self._threshold = float(config.process("FLAGS_eager_delete_tensor_gb")) * 2**30
        return self._threshold < 0 or sum(list(self.pending)) < self._threshold

    def _arrive(self, release: Callable[[], object]) -> None:
        """Free memory whose var the engine has deleted."""
        try:
            release()
        finally:
            self.coming.pop()


dead = DeadChunks()
"""The dead chunks of this process."""
drain, sweep, free_list_for = dead.drain, dead.sweep, dead.free_list_for


def _give_dead_back(context: Context, nbytes: int) -> bool:
    """Free dead chunks; a step of storage's ladder."""
    if not dead.queue and not any(free_list.entries for free_list in list(dead.free_lists.values())):
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
    awaited = len(dead.coming)
    try:
        on_gpu = context.device_type in ("gpu", "sim")
        patience = config.process("FLAGS_gpu_allocator_retry_time") / 1000 if on_gpu else PATIENCE_S
        return awaited > 0 and (engine.get().settle(patience) or len(dead.coming) < awaited)
    except EngineError:  # the engine has stopped, or this thread is in the middle of its work
        return False


relief.add(10, _give_dead_back)
relief.add(30, _collect_cycles)
relief.add(40, _await_frees)
