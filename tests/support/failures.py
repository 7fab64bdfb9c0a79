"""Failures at every point of an operation where another part of the package may fail.

A point is a call from the tested part (its *rooms*) into another room of the package, or an allocation of storage at
any depth. :func:`check_all_or_nothing` lets an operation fail at its points, one at a time, each time on new objects,
and compares the objects before and after.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import numpy as np

from weftplan.data.images.threaded_images import ThreadedImageIter
from weftplan.data.prefetching import PrefetchingIter
from weftplan.ndarray import NDArray

SKIPPED = {"__exit__", "__del__", "__enter__", "release", "__hash__", "__eq__", "__repr__", "allocated"}
"""Calls that cannot be made to fail: a lock that is not released would stop the test."""
WRITES = {
    *("copyto", "__setitem__", "copy_into", "_set", "push", "copy_in", "replace", "push_kernel"),
    *("copy_to_all", "_launch", "_ask", "_ask_now"),
}
"""Calls that write an array, push operations or send requests to servers.

They come after all others; a failure in them is one of the engine, or of the exchange.
"""
OWNERS = ("weftplan.training", "weftplan.data", "weftplan.kvstore", "weftplan.executor.executor")
"""Modules whose objects are compared field by field, others by identity."""
PLAIN = (str, bytes, int, float, complex, bool, type(None), type)


class Injected(Exception):
    """The failure that is injected."""


class Points:
    """Counts the points of a run on this thread, and raises :class:`Injected` at one of them."""

    def __init__(self, rooms: Collection[str], fail_at: int = -1) -> None:
        self.rooms, self.fail_at = tuple(f"weftplan.{room}" for room in rooms), fail_at
        self.sites: list[tuple[object, ...]] = []

    def _is_point(self, frame: FrameType) -> bool:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if not name.startswith("weftplan.") or code in SKIPPED or code.startswith("<"):
            return False
        caller = frame.f_back
        origin = caller.f_globals.get("__name__", "") if caller is not None else ""
        allocates = name.startswith("weftplan.storage.") and code == "allocate"
        leaves = origin.startswith(self.rooms) and not name.startswith(self.rooms)
        return (allocates or leaves) and not _inside_write(frame)

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not self._is_point(frame):
            return
        caller = frame.f_back
        self.sites.append((frame.f_code, caller and (caller.f_code, caller.f_lineno)))
        if len(self.sites) - 1 == self.fail_at:
            raise Injected(f"{frame.f_globals['__name__']}.{frame.f_code.co_name}")

    def run(self, operation: Callable[[], object]) -> None:
        """Run the operation under this profile function."""
        sys.setprofile(self)
        try:
            operation()
        finally:
            sys.setprofile(None)


def _inside_write(frame: FrameType | None) -> bool:
    """Return whether a call of the package by the package, which is not the tested operation, writes."""
    while frame is not None:
        caller = frame.f_back
        if frame.f_code.co_name in WRITES and _is_ours(frame) and caller is not None and _is_ours(caller):
            return True
        frame = caller
    return False


def _is_ours(frame: FrameType) -> bool:
    return bool(frame.f_globals.get("__name__", "").startswith("weftplan."))


def snapshot(value: Any, caches: Collection[str] = (), alive: list[Any] | None = None) -> Any:
    """Return a comparable value of everything that is reachable from ``value`` within the package's objects.

    Args:
        value: the object.
        caches: fields to leave out, which only save time.
        alive: receives every object, so that no identity is reused while snapshots are compared.
    """
    alive = [] if alive is None else alive
    seen: set[int] = set()

    def of(item: Any, name: str = "") -> Any:
        if isinstance(item, PLAIN):
            return item
        alive.append(item)
        if isinstance(item, NDArray):
            return "array", id(item.chunk), item.shape, str(item.dtype), item.asnumpy().tobytes()
        if isinstance(item, (np.ndarray, np.generic)):
            return item.tobytes()
        if isinstance(item, (PrefetchingIter, ThreadedImageIter)):
            return item.state()  # its threads change the fields
        if isinstance(item, dict):
            return {key if isinstance(key, PLAIN) else id(key): of(each) for key, each in item.items()}
        if isinstance(item, (list, tuple)):
            return [of(each) for each in item]
        if isinstance(item, (set, frozenset)):
            return sorted(map(repr, item))
        if id(item) in seen or not type(item).__module__.startswith(OWNERS):
            return "object", id(item)
        seen.add(id(item))
        fields = vars(item) if hasattr(item, "__dict__") else {}
        return id(item), {key: of(each, key) for key, each in fields.items() if key not in caches}

    return of(value)


def check_all_or_nothing(
    make: Callable[[], tuple[Any, Callable[[], object]]], rooms: Collection[str], caches: Collection[str] = ()
) -> int:
    """Let an operation fail at its points; return the number of failures.

    After each the objects must be as before, and the operation must succeed when it is repeated. Of the calls at one
    line the first and the last fail.

    Args:
        make: returns new objects, always alike, and the operation on them.
        rooms: modules of the tested part, without ``weftplan.``.
        caches: see :func:`snapshot`.
    """
    _, operation = make()
    points = Points(rooms)
    points.run(operation)
    sites = points.sites
    chosen = sorted({sites.index(site) for site in sites} | {len(sites) - 1 - sites[::-1].index(s) for s in sites})
    failures = 0
    for number in chosen:
        objects, operation = make()
        alive: list[Any] = []
        before = snapshot(objects, caches, alive)
        try:
            Points(rooms, number).run(operation)
        except Exception as error:
            failures += 1
            after = snapshot(objects, caches, alive)
            code, caller = sites[number]
            where = f"{error!r} in {getattr(code, 'co_qualname', code)}, called at {caller}"
            assert after == before, f"changed by {where}: {_difference(before, after)}"
            operation()
    return failures


def _difference(before: Any, after: Any, path: str = "") -> str:
    """Return the path of the first difference of two snapshots."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            if before.get(key) != after.get(key) or (key in before) != (key in after):
                return _difference(before.get(key), after.get(key), f"{path}.{key}")
    if isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            if one != other:
                return _difference(one, other, f"{path}[{number}]")
    return f"{path}: {before!r:.90} -> {after!r:.90}"
