"""Asynchronous copies of arrays to offload targets and back, scheduled when operations are pushed.

This module is inactive while everything fits. From the first failed allocation on a device, each push on its arrays
also updates a model of that device's memory, in program order: which arrays are present after the operation. If the
operation needs an offloaded array, a separate operation on the device's copy queue brings it back. Another operation
writes the least recently used arrays to an offload target:

    write-back of v   reads v, writes the order r          after everything that was pushed on v
    bring-back of x   reads r, writes x                    after the write-back that makes room for it
    the operation     reads r, x, …

The engine runs both directions concurrently with other operations. Orders carry no failures: a failed array fails only
the operations that read it.

The model only decides when copies begin. If it takes a present array to be away, this costs nothing. If it takes an
offloaded array to be present, the array is brought back at its use. If a device is full in spite of the model, storage
climbs its ladder as without a model, and the model lowers its budget. Any thread may push; the model has a lock.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from weftplan import engine
from weftplan.device.context import Context
from weftplan.device.offload_targets import OffloadTarget
from weftplan.engine import FnProperty
from weftplan.engine.var import Var
from weftplan.errors import DeviceError, OutOfMemoryError
from weftplan.locks import ReentrantLock, consistent_in_children
from weftplan.ndarray.memory import joint_allocation

_lock = consistent_in_children(ReentrantLock())
"""Reentrant, because a destructor that runs while it is held may push operations on arrays."""


class Guest(Protocol):
    """A chunk that may be offloaded, as this module sees it."""

    context: Context
    engine: Any
    nbytes: int
    var: Any
    is_offloading: bool

    @property
    def is_offloaded(self) -> bool: ...
    def leave(self, targets: tuple[OffloadTarget, ...], *, stream_ordered: bool = False) -> bool: ...
    def return_beside(self) -> None: ...


class _Model:
    """A model of the chunks in one device's memory after the last push."""

    def __init__(self) -> None:
        self.present: OrderedDict[int, tuple[weakref.ref[Guest], int]] = OrderedDict()
        """Chunks by id, least recently used first."""
        self.total = 0
        self.budget = 0
        """Bytes that may be present."""

    def add(self, chunk: Guest) -> None:
        """Record that a chunk is present and is now the most recently used."""
        if id(chunk) not in self.present:
            self.total += chunk.nbytes
        self.present[id(chunk)] = weakref.ref(chunk), chunk.nbytes
        self.present.move_to_end(id(chunk))

    def remove(self, key: int) -> None:
        """Record that a chunk is no longer present."""
        entry = self.present.pop(key, None)
        if entry is not None:
            self.total -= entry[1]


_models: dict[Context, _Model] = {}
"""One model per device; guarded by the lock, including the models' contents."""
_changes: deque[tuple[Context, int, weakref.ref[Guest] | None]] = deque()
"""Pending notices by chunk id: with a reference for a chunk that got memory, with None for a chunk that is gone.
Finalizers may only append."""


def active() -> bool:
    """Return whether a device has run out of room: operations are then ordered after copies that make room."""
    return bool(_models)


def came(chunk: Guest) -> None:
    """Record that a chunk got memory outside a push."""
    if _models:
        _changes.append((chunk.context, id(chunk), weakref.ref(chunk)))


def gone(chunk: Guest) -> None:
    """Record that a chunk has died, or was offloaded outside a push. Finalizers may call this."""
    if _models and (context := getattr(chunk, "context", None)) is not None:
        _changes.append((context, id(chunk), None))


def short(context: Context, nbytes: int, holders: Sequence[Guest]) -> None:
    """Record that a device has no room for ``nbytes`` while it holds ``holders``, least recently used first."""
    with _lock:
        _catch_up()
        held = sum([chunk.nbytes for chunk in holders])
        model = _models.get(context)
        if model is None:
            model = _models[context] = _Model()
            model.budget = held
            for chunk in holders:
                model.add(chunk)
        elif model.total + nbytes <= model.budget:  # memory outside the model takes room, too
            model.budget = max(min(model.budget - nbytes, held), held // 2)


def forget() -> None:
    """Discard all models, because offloading has ended or its targets have changed."""
    with _lock:
        _models.clear()
        _changes.clear()


def make_room(targets: tuple[OffloadTarget, ...], context: Context, operands: Sequence[object]) -> tuple[Var, ...]:
    """Push the copies that an operation on ``operands`` depends on; return the vars that it has to read."""
    if not _models:
        return ()
    current = engine.get()
    with _lock:
        _catch_up()
        model = _models.get(context)
        if model is None:
            return ()
        chunks: dict[int, Guest] = {}
        for operand in operands:
            chunk = getattr(operand, "chunk", None)
            if chunk is not None and chunk.may_leave and chunk.context == context:
                chunks[id(chunk)] = chunk
        need = sum([chunk.nbytes for key, chunk in chunks.items() if key not in model.present])
        offloaded = [chunk for key, chunk in chunks.items() if chunk.is_offloaded or chunk.is_offloading]
        leaving = _victims(model, need, chunks, current) if need else []
        for chunk in chunks.values():
            model.add(chunk)
            chunk.is_offloading = False
    orders = []
    for chunk in leaving:
        order = current.new_order("room")
        lane, prop = _lane(targets, context, out=True)
        write_back = partial(_write_back, weakref.ref(chunk), targets)
        current.push(write_back, (chunk.var,), (order,), lane, prop=prop, name="write back")
        orders.append(order)
    for chunk in offloaded:
        if chunk.var.failure is None:
            lane, prop = _lane(targets, context, out=False)
            bring = partial(_bring_back, weakref.ref(chunk))
            current.push(bring, orders, (chunk.var,), lane, prop=prop, name="bring back")
    return tuple(orders)


def _catch_up() -> None:
    """Apply the pending notices to the models; under the lock."""
    while True:
        try:
            context, key, ref = _changes.popleft()
        except IndexError:  # a destructor may have taken the last notice
            return
        model = _models.get(context)
        if model is None:
            continue
        if ref is None:
            model.remove(key)
        elif (chunk := ref()) is not None:
            model.add(chunk)


def _victims(model: _Model, need: int, used: dict[int, Guest], current: object) -> list[Guest]:
    """Choose the chunks to offload so that ``need`` more bytes fit; under the lock.

    Chunks of engines other than ``current`` stay, since this module cannot wait for their operations.
    """
    victims: list[Guest] = []
    for key, (ref, _) in list(model.present.items()):
        if model.total + need <= model.budget:
            break
        if key in used:
            continue
        chunk = ref()
        if chunk is not None and chunk.engine is not current:
            continue
        model.remove(key)
        if chunk is not None:
            chunk.is_offloading = True
            victims.append(chunk)
    return victims


def _lane(targets: tuple[OffloadTarget, ...], context: Context, *, out: bool) -> tuple[Context, FnProperty]:
    """Return the queue of copies to or from offload targets: the device's if it has streams, else the file's."""
    if context.has_streams:
        return context, FnProperty.COPY_FROM_GPU if out else FnProperty.COPY_TO_GPU
    lane_context = Context("file", 0) if targets[0].kind == "file" else context
    return lane_context, FnProperty.COPY_TO_GPU if out else FnProperty.COPY_FROM_GPU


def _write_back(ref: weakref.ref[Guest], targets: tuple[OffloadTarget, ...]) -> None:
    """Offload a chunk if it is still present and has no views; runs as an operation."""
    chunk = ref()
    if chunk is not None:
        try:
            with joint_allocation.Look():
                chunk.leave(targets, stream_ordered=True)
        except (OutOfMemoryError, DeviceError, OSError):
            return  # the chunk stays; the allocation that needs the room reports the error


def _bring_back(ref: weakref.ref[Guest]) -> None:
    """Bring a chunk back if it is offloaded; runs as an operation."""
    chunk = ref()
    if chunk is not None and chunk.is_offloaded:
        try:
            with joint_allocation.Look(), joint_allocation.Impatient():
                chunk.return_beside()
        except (OutOfMemoryError, DeviceError, OSError):
            return  # the operation that uses the chunk retries and reports the error
