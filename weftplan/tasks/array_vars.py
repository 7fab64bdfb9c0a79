"""The registry of vars that order access to buffers: one entry per memory owner that tasks have used.

An array is identified by its *owner*, the object at the end of the chain ``array.base``. A buffer that tasks use as a
whole has one var. Slices that tasks write get their own vars (``array_slices.py``), and so do the tiles of a divided
array (``tiles.py``). A view has the vars of all parts that it overlaps, so a slice and the whole never race. If a
caller asks for the single var of an array, the buffer is ordered as a whole from then on. An entry lasts as long as an
array over its owner; it keeps no array alive. Memory that no array owns (a tensor's, a mapped file's) may have several
owners, so entries of such *foreign* memory are linked to all entries with overlapping addresses
(``address_ranges.py``): an access takes the vars of its own entry and of the linked entries. Two mappings of one file
at different addresses are not recognized as the same memory: give such operations a common var.

A buffer must not be cut between looking up its vars and pushing on them, or two tasks would miss each other's vars. A
task is *in flight* during that time, and a thread skips its cut while other tasks are in flight, which is always
correct.

Any thread may call this module. Lock rank: the registry's lock is above the engine's (nothing is pushed under it).
Weak-reference callbacks may run on any thread, also inside this lock, so they only append to a deque, which the next
look-up empties. The interpreter runs them before it can reuse the memory of the dead array. So a thread that sees a
reused ``id`` finds the notice of the old entry's death in the deque. A user's finalizer may even look up a var in the
middle of a look-up of the same thread: the tables change by single steps, and each step checks its table first.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from weftplan.engine.core import Engine
from weftplan.engine.operation import DetailedBlock, FnProperty, searchable
from weftplan.engine.var import Var
from weftplan.errors import EngineError
from weftplan.locks import ReentrantLock, consistent_in_children
from weftplan.support.address_ranges import AddressRanges
from weftplan.support.array_types import RawArray
from weftplan.tasks.array_slices import Parts
from weftplan.tasks.tiles import TileGrid, address, bounds, has_distinct_elements

in_flight: set[object] = set()
"""One item per task in flight, from the look-up of its vars to its push; added and removed atomically, without the
lock."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=in_flight.clear)
_PATIENCE_S = 0.1
"""Seconds that :meth:`_Registry.undivided` waits for tasks that have looked up their vars and are not pushed yet."""


def nothing() -> None:
    """Do nothing, in an operation that orders the vars of parts or tiles after the previous vars."""


class _Entry:
    """The entry of one owner: its vars, and weak references to its known arrays by their ids."""

    __slots__ = ("__weakref__", "anchors", "grid", "links", "parts", "span", "undivided", "var")

    def __init__(self, var: Var) -> None:
        self.var = var
        """The var of all bytes outside the tiles; also the var of the first part."""
        self.grid: TileGrid | None = None
        self.parts: Parts | None = None
        self.undivided = False
        """Whether a caller holds ``var``, so that it must order every access."""
        self.anchors: dict[int, weakref.ref[Any]] = {}
        self.span: tuple[int, int] | None = None
        """The address range of its known arrays; None until a foreign entry exists."""
        self.links: list[_Entry] | None = None
        """Entries of overlapping bytes; an empty list for an array of objects, which is inspected on each use."""

    def vars(self) -> list[Var]:
        """Return all vars of the entry."""
        variables = [self.var, *(self.grid.vars if self.grid is not None else ())]
        return variables if self.parts is None else list(dict.fromkeys((*variables, *self.parts.vars)))

    def move(self, engine: Engine) -> None:
        """Replace the idle vars by new vars of another engine."""
        self.var = engine.new_variable()
        self.parts = None
        if self.grid is not None:
            self.grid.move(engine)


class _Registry:
    """A table of entries by the ids of their owners."""

    def __init__(self) -> None:
        self._lock = consistent_in_children(ReentrantLock())
        """Reentrant, because a garbage collection under the lock may run a user's finalizer that looks up a var."""
        self._entries: dict[int, _Entry] = {}
        self._dead: deque[tuple[int, int, weakref.ref[Any]]] = deque()
        """Death notices: owner and anchor ids and the dead reference; appended only by weak-reference callbacks."""
        self._ranges: AddressRanges[_Entry] | None = None
        """Entries by their addresses; None until the first array over foreign memory."""

    def vars_of(self, array: RawArray, engine: Engine) -> list[Var]:
        collected: list[Var] = []
        self.add_vars(array, engine, collected)
        return collected

    def add_vars(self, array: RawArray, engine: Engine, collected: list[Var], *, cut: bool = False) -> None:
        """Append the vars of ``array`` to ``collected``; with ``cut``, after :meth:`cut`."""
        with self._lock:
            entry = self._entry(array, engine)
            span = self._cut(entry, array, engine) if cut else None
            if entry.parts is None and entry.grid is None:
                collected.append(entry.var)
            else:
                collected += _vars_in(entry, array, span)
            for linked in entry.links or ():
                collected += _vars_in(linked, array)

    def cached_vars(self, arrays: Sequence[object], engine: Engine) -> list[Var] | None:
        """Return the vars of arrays that are known, own their memory and have one var each, as most do; else None.

        This takes no lock. It never returns the entry of a dead array with the same id: as long as that entry exists,
        its death notice does too. While the caller's task is in flight, no thread cuts the arrays.
        """
        if self._dead:
            return None
        entries, variables = self._entries, []
        for array in arrays:
            key = id(array)
            entry = entries.get(key)
            if (
                entry is None
                or key not in entry.anchors
                or entry.parts is not None
                or entry.grid is not None
                or entry.links is not None
                or type(array) is not np.ndarray
                or array.base is not None
            ):
                return None
            var = entry.var
            if var.engine is not engine:
                return None
            variables.append(var)
        return variables

    def undivided(self, array: RawArray, engine: Engine) -> list[Var]:
        """Return the single var that orders every access to the buffer from now on, or the array's tile vars."""
        end = time.monotonic() + _PATIENCE_S
        while True:
            with self._lock:
                entry = self._entry(array, engine)
                if entry.grid is not None:
                    return _vars_in(entry, array)
                if entry.links:
                    return self.vars_of(array, engine)
                if entry.parts is None or entry.undivided:
                    entry.undivided = True
                    return [entry.var]
                if not in_flight or time.monotonic() > end:  # else a task could miss the new var
                    var = engine.new_variable()
                    fence = _fence(engine, [var, *entry.parts.vars])
                    entry.var, entry.undivided = var, True
                    break
            time.sleep(0)
        engine._admitted(fence)
        return [var]

    def has(self, array: object) -> bool:
        """Return whether tasks have used the memory of ``array``."""
        with self._lock:
            self._bury()
            return isinstance(array, np.ndarray) and id(_roots(array)[1]) in self._entries

    def covers(self, array: RawArray, var: Var, engine: Engine) -> bool:
        """Return whether ``array`` has all the elements that ``var`` orders."""
        with self._lock:
            entry = self._entry(array, engine)
            anchor, owner = _roots(array)
            root: Any = owner if isinstance(owner, np.ndarray) else anchor  # windows hide their array from the anchor
            if not array.size or not root.size:
                return not root.size
            low, high = bounds(array)
            dense = has_distinct_elements(array) and array.nbytes == high - low
            if (low, high) == bounds(root) == (entry.span or (low, high)) and (
                dense or _layout(array) == _layout(root)
            ):
                return True
            if entry.grid is not None:
                return entry.grid.covers(array)
            if entry.parts is None or not dense:
                return False
            ends = [*entry.parts.starts[1:], bounds(root)[1]]
            return all(
                low <= max(start, bounds(root)[0]) and end <= high
                for start, end, owner in zip(entry.parts.starts, ends, entry.parts.vars, strict=True)
                if owner is var
            )

    def cut(self, array: RawArray, engine: Engine) -> None:
        """Give a slice that a task is about to write its own vars, if that is possible now.

        The operations that order the new vars after the old vars run with the following push at the latest.
        """
        with self._lock:
            self._cut(self._entry(array, engine), array, engine)

    def _cut(self, entry: _Entry, array: RawArray, engine: Engine) -> tuple[int, int] | None:
        """Cut at a slice of ``entry``; return its bounds, or None if it cannot have its own vars. The lock is held."""
        if entry.grid is not None or entry.undivided or entry.links or len(in_flight) > 1 or not array.size:
            return None
        if array.nbytes >= _roots(array)[0].nbytes:
            return None
        parts = entry.parts
        if parts is None:
            parts = Parts([0], [entry.var])

        def idle(var: Var) -> bool:
            # In this order: once the requests are empty, their effects are visible on the var.
            return not engine._region.requests and var.write is None and not var.readers

        span = bounds(array)
        divided, fences = parts.cut(*span, engine.new_variable, idle)
        for group in fences:
            _fence(engine, group)
        if divided is not parts:
            entry.parts = divided
        return span

    def divide(self, array: RawArray, grid: TileGrid, engine: Engine) -> list[Var]:
        """Give the owner of ``array`` a grid; return its previous vars."""
        with self._lock:
            entry = self._entry(array, engine)
            previous_vars = entry.vars()
            entry.grid, entry.parts = grid, None
            return previous_vars

    def _entry(self, array: RawArray, engine: Engine) -> _Entry:
        """Return the entry of the owner of ``array``, made if necessary; the lock is held."""
        anchor, owner = _roots(array)
        key, anchor_key, dead = id(owner), id(anchor), self._dead
        while True:
            self._bury()
            entry = self._entries.get(key)
            if entry is None:
                entry = _Entry(engine.new_variable())
            if entry.var.engine is not engine or entry.links:
                _move_all(entry, array, engine)
            if anchor_key in entry.anchors:
                return entry
            entry.anchors[anchor_key] = weakref.ref(anchor, lambda reference: dead.append((key, anchor_key, reference)))
            # Otherwise a finalizer's look-up has made another entry meanwhile. It may also have removed this one with
            # its last other array; then it is stored again.
            if self._entries.setdefault(key, entry) is entry:
                break
        if isinstance(anchor, np.ndarray):
            if anchor.dtype.hasobject and entry.links is None:
                entry.links = []
            self._record_addresses(entry, anchor, foreign=not anchor.flags.owndata)
            if entry.links:
                _move_all(entry, array, engine)
        return entry

    def _record_addresses(self, entry: _Entry, anchor: np.ndarray, *, foreign: bool) -> None:
        """Record the addresses of a new array of ``entry`` and link overlapping entries; the lock is held."""
        if self._ranges is None:
            if not foreign:
                return
            self._ranges = AddressRanges(_is_in_use)
            for other in list(self._entries.values()):
                for reference in list(other.anchors.values()) if other is not entry else ():
                    root = reference()
                    if isinstance(root, np.ndarray) and root.size:
                        self._add_range(other, *bounds(root))
        if not anchor.size:
            return
        low, high = bounds(anchor)
        if entry.span is not None and entry.span[0] <= low and high <= entry.span[1]:
            return
        # In this order: of two entries made at the same time, the later finds the earlier.
        self._add_range(entry, low, high)
        for other in self._ranges.overlapping(low, high):
            if other is not entry and other not in (entry.links or ()) and _is_in_use(other):
                entry.links = [*(entry.links or ()), other]

    def _add_range(self, entry: _Entry, low: int, high: int) -> None:
        """Extend the address range of ``entry``; address ranges are recorded, and the lock is held."""
        assert self._ranges is not None
        if entry.span is not None:
            low, high = min(low, entry.span[0]), max(high, entry.span[1])
        self._ranges.add(entry, low, high)
        entry.span = low, high

    def _bury(self) -> None:
        """Remove dead arrays and owners without arrays, each death notice after its entry; the lock is held."""
        entries = self._entries
        while self._dead:
            notice = self._dead[0]
            key, anchor_key, reference = notice
            entry = entries.get(key)
            if entry is not None:
                anchors = entry.anchors
                if anchor_key in anchors and anchors[anchor_key] is reference:  # else a nested call has removed it
                    del anchors[anchor_key]
                if not anchors:
                    if self._ranges is not None:
                        self._ranges.end(entry)
                    entry.links = entry.span = None
                    if key in entries and entries[key] is entry:
                        del entries[key]
            if self._dead and self._dead[0] is notice:  # else a nested call has removed it
                self._dead.popleft()

    def __len__(self) -> int:
        with self._lock:
            self._bury()
            return len(self._entries)


def _is_in_use(entry: _Entry) -> bool:
    """Return whether an array or a pending operation uses the memory of an entry."""
    return any(reference() is not None for reference in list(entry.anchors.values())) or any(
        var.engine._region.requests or var.state != "IDLE" for var in entry.vars()
    )


def _move_all(entry: _Entry, array: object, engine: Engine) -> None:
    """Move ``entry`` and its links to ``engine``.

    Raises:
        EngineError: operations of the current engine of one of them are still pending.
    """
    for member in (entry, *(entry.links or ())):
        if member.var.engine is not engine:
            _move(member, array, engine)


def _move(entry: _Entry, array: object, engine: Engine) -> None:
    for var in entry.vars():
        if var.state != "IDLE":
            raise EngineError(
                f"an array of shape {getattr(array, 'shape', '?')} is still used by operations on {var.engine!r}, and "
                f"was given to {engine!r}; wait for the first engine before"
            )
    entry.move(engine)


def owner_of(array: object) -> object:
    """Return the owner of the memory of ``array``; the array itself if it has its own var."""
    return _roots(array)[1] if isinstance(array, np.ndarray) else array


def _vars_in(entry: _Entry, array: RawArray, span: tuple[int, int] | None = None) -> list[Var]:
    """Return the entry's vars that order ``array``, whose bounds are ``span`` if known; the registry's lock is held."""
    if entry.grid is not None:
        touched, beyond = entry.grid.touched(array)
        return [*touched, entry.var] if beyond or not touched else touched
    if entry.parts is None:
        return [entry.var]
    if span is None:
        span = bounds(array) if array.size else (address(array),) * 2
    touched_parts = entry.parts.touched(*span)
    return [*touched_parts, entry.var] if entry.undivided else list(touched_parts)


def _layout(array: RawArray) -> tuple[int, list[tuple[int, int]]]:
    """Return what determines the bytes of an array's elements within its bounds: item size, strides and counts."""
    return array.itemsize, sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1)


def _fence(engine: Engine, variables: list[Var]) -> DetailedBlock:
    """Request an operation that writes ``variables``, executed with the next push; this runs no user code."""
    fence = DetailedBlock(nothing, (), searchable(tuple(variables)), "parts", None, None, FnProperty.TASK)
    fence.internal = True
    if engine._tracer is not None:
        fence.push_ns = time.perf_counter_ns()
    engine._region.requests.append(fence)
    return fence


def _roots(array: RawArray) -> tuple[RawArray, object]:
    """Return the last array of the chain of bases, which all views keep alive, and the memory owner at its end."""
    anchor = array
    base = array.base
    if base is None:
        return array, array
    kind = np.ndarray if isinstance(array, np.ndarray) else type(array)
    while isinstance(base, kind):
        anchor = base
        base = anchor.base
    owner: Any = anchor if base is None else base
    below: Any
    while True:
        if isinstance(owner, memoryview):
            below = owner.obj
        else:
            below = getattr(owner, "base", None)
            # Any object may have a ``base``; it counts only if it is an array, as in NumPy's strided views.
            if not isinstance(owner, np.ndarray) and not isinstance(below, np.ndarray):
                return anchor, owner
        if below is None:
            return anchor, owner
        owner = below


registry = _Registry()
"""The registry of the process."""
