"""Copies of arrays to homes and back, made beside the computation: who leaves and who returns is settled at the push.

While everything fits, nothing here is done. From the first time that a device has no room, each push on its arrays is
followed in a model of the memory, in the order of the program: which arrays are there after it. What the operation
needs and is away is brought back by an operation of its own on the device's copy queue, and what was used least
recently is written to a home by another one, so that

    write-back of v   reads v, writes the order r          behind everything that was pushed on v
    bring-back of x   reads r, writes x                    behind the write-back that makes room for it
    the operation     reads r, x, …

and the engine runs both directions beside other operations. The orders carry no failures: an array that failed fails
nothing but what reads it.

The model only says when to begin. An array that it takes to be away and is not costs nothing; one that it takes to be
there and is not is brought back at its use, and a device that is full in spite of it climbs the ladder of storage, as
without a model: that tells it that there is less room. Any thread may push; the model has a lock.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from weftplan import engine
from weftplan.device.context import Context
from weftplan.device.homes import HomeSpec
from weftplan.engine import FnProperty
from weftplan.errors import DeviceError, OutOfMemoryError
from weftplan.locks import ReentrantLock, whole_in_children
from weftplan.ndarray.memory import joint_allocation

_lock = whole_in_children(ReentrantLock())
"""Reentrant, because a destructor that runs in there may push work on arrays."""


class Guest(Protocol):
    """A chunk that may be elsewhere, as it is seen from here."""

    context: Context
    engine: Any
    nbytes: int
    var: Any
    sent_away: bool

    @property
    def away(self) -> bool: ...
    def leave(self, where: tuple[HomeSpec, ...], *, beside: bool = False) -> bool: ...
    def return_beside(self) -> None: ...


class _Model:
    """What is in the memory of one device behind the last push."""

    def __init__(self) -> None:
        self.present: OrderedDict[int, tuple[weakref.ref[Guest], int]] = OrderedDict()
        """By id, those used least recently first."""
        self.total = 0
        self.budget = 0
        """Bytes that may be there."""

    def add(self, chunk: Guest) -> None:
        """It is there, and was used last."""
        if id(chunk) not in self.present:
            self.total += chunk.nbytes
        self.present[id(chunk)] = weakref.ref(chunk), chunk.nbytes
        self.present.move_to_end(id(chunk))

    def remove(self, key: int) -> None:
        """It is not."""
        found = self.present.pop(key, None)
        if found is not None:
            self.total -= found[1]


_models: dict[Context, _Model] = {}
"""Guarded by the lock, as is all that is in them."""
_changes: deque[tuple[Context, int, weakref.ref[Guest] | None]] = deque()
"""Chunks that have got memory and, with None, chunks that are gone, by id: finalizers may only append."""


def active() -> bool:
    """True from the first time that a device has no room: operations are ordered behind others that make some."""
    return bool(_models)


def came(chunk: Guest) -> None:
    """A chunk has got memory, at no push."""
    if _models:
        _changes.append((chunk.context, id(chunk), weakref.ref(chunk)))


def gone(chunk: Guest) -> None:
    """A chunk is no more, or was sent away at no push. For finalizers."""
    if _models and (context := getattr(chunk, "context", None)) is not None:
        _changes.append((context, id(chunk), None))


def short(context: Context, nbytes: int, there: Sequence[Guest]) -> None:
    """A device has no room for ``nbytes``, with these chunks there, those used least recently first."""
    with _lock:
        _catch_up()
        held = sum([chunk.nbytes for chunk in there])
        model = _models.get(context)
        if model is None:
            model = _models[context] = _Model()
            model.budget = held
            for chunk in there:
                model.add(chunk)
        elif model.total + nbytes <= model.budget:  # something else needs room, too
            model.budget = max(min(model.budget - nbytes, held), held // 2)


def forget() -> None:
    """Begin anew: arrays wait elsewhere no more, or in other homes."""
    with _lock:
        _models.clear()
        _changes.clear()


def make_room(where: tuple[HomeSpec, ...], context: Context, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Push what an operation on ``operands`` needs to have gone before; returns the vars that it has to read."""
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
        away = [chunk for key, chunk in chunks.items() if chunk.away or chunk.sent_away]
        leaving = _victims(model, need, chunks, current) if need else []
        for chunk in chunks.values():
            model.add(chunk)
            chunk.sent_away = False
    orders = []
    for chunk in leaving:
        order = current.new_order("room")
        lane, prop = _lane(where, context, out=True)
        back = partial(_write_back, weakref.ref(chunk), where)
        current.push(back, (chunk.var,), (order,), lane, prop=prop, name="write back")
        orders.append(order)
    for chunk in away:
        if chunk.var.failure is None:
            lane, prop = _lane(where, context, out=False)
            bring = partial(_bring_back, weakref.ref(chunk))
            current.push(bring, orders, (chunk.var,), lane, prop=prop, name="bring back")
    return tuple(orders)


def _catch_up() -> None:
    """Take note of what came and went; under the lock."""
    while True:
        try:
            context, key, ref = _changes.popleft()
        except IndexError:  # a destructor may have taken the last one
            return
        model = _models.get(context)
        if model is None:
            continue
        if ref is None:
            model.remove(key)
        elif (chunk := ref()) is not None:
            model.add(chunk)


def _victims(model: _Model, need: int, used: dict[int, Guest], current: Any) -> list[Guest]:
    """Those that leave so that ``need`` bytes more fit; under the lock. Who belongs to another engine than ``current``
    stays, since nothing here can wait for its operations."""
    found: list[Guest] = []
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
            chunk.sent_away = True
            found.append(chunk)
    return found


def _lane(where: tuple[HomeSpec, ...], context: Context, *, out: bool) -> tuple[Context, FnProperty]:
    """Where copies to homes, or from there, are queued: at the device, or where there are no streams at the file."""
    if context.has_streams:
        return context, FnProperty.COPY_FROM_GPU if out else FnProperty.COPY_TO_GPU
    place = Context("file", 0) if where[0].kind == "file" else context
    return place, FnProperty.COPY_TO_GPU if out else FnProperty.COPY_FROM_GPU


def _write_back(ref: weakref.ref[Guest], where: tuple[HomeSpec, ...]) -> None:
    """The operation that sends a chunk away, if it is still there and nobody looks at it."""
    chunk = ref()
    if chunk is not None:
        try:
            with joint_allocation.Look():
                chunk.leave(where, beside=True)
        except (OutOfMemoryError, DeviceError, OSError):
            return  # it stays; who needs the room hears why there is none


def _bring_back(ref: weakref.ref[Guest]) -> None:
    """The operation that brings a chunk back, if it is away."""
    chunk = ref()
    if chunk is not None and chunk.away:
        try:
            with joint_allocation.Look(), joint_allocation.Impatient():
                chunk.return_beside()
        except (OutOfMemoryError, DeviceError, OSError):
            return  # who uses it tries again, and hears why
