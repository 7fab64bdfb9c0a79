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
"""(engine, var, context, what to do when the var is idle) of collected chunks."""
due: deque[int] = deque()
"""Bytes of dead chunks; empty while ``dead`` is a few small chunks, which are not counted. Arithmetic on small arrays,
one push after the other, looks at this only: most chunks will be given back without an operation then, because those
on their vars are over."""
SMALL, FEW = 4096, 1024
"""Bytes, chunks: together the most that waits, 4 MiB."""
coming: deque[None] = deque()
"""One element for each memory that the engine will give back when the operations on it are over."""
PATIENCE_S = 10.0
"""Seconds that a request for memory waits for pending operations, in all."""


def _next(dead: deque[tuple[Any, Any, Context, Callable[[], object]]]) -> tuple[Any, Any, Context, Any, int]:
    """The first entry of ``dead``, taken out, and how many references its var has, those of this call included."""
    owner, var, context, release = dead.popleft()
    return owner, var, context, release, getrefcount(var)


_ALONE = _next(deque([(None, object(), cpu(), int)]))[4] if getattr(sys, "_is_gil_enabled", lambda: True)() else 0
"""The count where there is no other reference; 0, which no count is, without a GIL: there it may not be exact."""


class Shelf:
    """What dead arrays of one kind have left for the next of that kind: var, memory, and a typed view of it.

    Only small arrays of a host leave anything, and only where nobody else has their var: no operation can be pending
    then. Entries are ``(var, release, raw, view)``. Finalizers append, any thread may pop.

    Attributes:
        room: how many entries there may be; 0: none, for good.
        changes: of storage, when it was made: another resource may be in force since.
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
        """Give everything back."""
        entries = self.entries
        while entries:
            try:
                entries.pop()[1]()
            except IndexError:  # another thread took the last one
                return

    def __del__(self) -> None:
        for var, release, _, _ in self.entries:  # of arrays that died while another thread closed it
            dead.append((self.engine, var, self.context, release))


CLOSED = Shelf(cpu(), None, None, 0, 0)
"""For arrays that leave nothing."""
_MOST_SHELVES, _ROOM, _ROOM_BYTES = 64, 16, 64 << 10
"""Together the shelves hold at most 4 MiB."""
_shelves: dict[Any, Shelf] = {}


def shelf_for(context: Context, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Shelf:
    """The shelf of arrays that are made on this host, by the engine and from the storage that are in force."""
    key = context, shape, dtype
    current, changes = engine.get(), registry.changes
    found = _shelves.get(key)
    if found is None or found.engine is not current or found.changes != changes:
        if found is not None or len(_shelves) >= _MOST_SHELVES:
            _close_shelves()
        resource = storage.get(context)
        room = min(_ROOM, _ROOM_BYTES // max(1, math.prod(shape) * dtype.itemsize))
        room = room if resource.hands_over and _ALONE else 0
        found = _shelves[key] = Shelf(context, current, resource, changes, room)
    return found


def _close_shelves() -> None:
    """Give back what lies on shelves, which take nothing more."""
    while _shelves:
        try:
            _, shelf = _shelves.popitem()
        except KeyError:  # another thread took the last one
            return
        shelf.room = 0
        shelf.clear()


_threshold: float | None = None
"""Bytes of ``FLAGS_eager_delete_tensor_gb``; None: not read yet."""


def drain(*, everything: bool = False) -> None:
    """Give the memory of every collected chunk back, after the operations pending on its var; cheap without any.

    As :func:`sweep`, and what lies on shelves, too.
    """
    for shelf in list(_shelves.values()):
        shelf.clear()
    sweep(everything=everything)


def sweep(*, everything: bool = False) -> None:
    """Give back the memory of those collected chunks that do not wait on a shelf for the next one of their kind.

    Nothing is given back while fewer bytes are dead than ``FLAGS_eager_delete_tensor_gb`` says, or where that is below
    0, unless ``everything`` is asked for: memory is short then.

    Each pending operation holds its vars. So when nobody but this function has the var (CPython with a GIL counts
    that exactly) there is none, and the memory goes back at once; else the engine deletes the var in its turn.
    """
    if stream_order.late:
        stream_order.settle()
    if _threshold != 0.0 and not everything and _early():
        return
    due.clear()
    while dead:
        try:
            owner, var, context, release, count = _next(dead)
        except IndexError:  # another thread took the last one
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
    """True while what is dead is to stay."""
    global _threshold
    if _threshold is None:
        _threshold = float(config.process("FLAGS_eager_delete_tensor_gb")) * 2**30
    return _threshold < 0 or sum(list(due)) < _threshold


def _arrive(release: Callable[[], object]) -> None:
    """Give memory back whose var the engine has deleted."""
    try:
        release()
    finally:
        coming.pop()


def _give_dead_back(context: Context, nbytes: int) -> bool:
    """A rung of the ladder: what is dead."""
    if not dead and not any(shelf.entries for shelf in list(_shelves.values())):
        return False
    drain(everything=True)
    return True


def _collect_cycles(context: Context, nbytes: int) -> bool:
    """A rung: arrays that only cycles hold."""
    gc.collect()
    return _give_dead_back(context, nbytes)


def _await_frees(context: Context, nbytes: int) -> bool:
    """A rung: frees that wait for pending operations. Where none does, or in an operation, there is no wait."""
    awaited = len(coming)
    try:
        return awaited > 0 and (engine.get().settle(PATIENCE_S) or len(coming) < awaited)
    except EngineError:  # the engine has stopped, or this thread is in the middle of its work
        return False


relief.add(10, _give_dead_back)
relief.add(30, _collect_cycles)
relief.add(40, _await_frees)
