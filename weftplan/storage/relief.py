"""Memory relief: a ladder of rungs, cheapest first, that an allocation tries before it fails.

A pool first takes back freed memory and returns its own idle blocks to the device. Then it climbs the rungs registered
by other layers: dead arrays not yet freed, caches of other pools of the same memory, arrays that can be offloaded,
arrays in reference cycles, and finally a wait for frees of pending operations. After each rung that may have freed
memory the pool retries.

Rungs run on the allocating thread without the pool's lock. A rung that allocates gets no ladder of its own.

A thread that has climbed in vain is *starved* until it has memory or gives up. Runs that have not begun then release
their memory (:func:`other_thread_starves`). Layers that know of memory that will soon be free register a wait
(:func:`add_wait`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar

from weftplan.device.context import Context
from weftplan.errors import OutOfMemoryError

T = TypeVar("T")

Rung = Callable[[Context, int], bool]
"""Frees memory on a context, if possible as many bytes as requested. Returns whether there may be more than before."""

Wait = Callable[[Context, bool], bool]
"""Waits for memory of a context that will soon be free. The second argument tells whether this thread is inside an
operation, which must not wait for operations. Returns False if there is no such memory.
"""

_rungs: dict[int, list[tuple[Rung, bool]]] = {}
_waits: list[Wait] = []
_starved: dict[int, tuple[int, Context]] = {}
"""Thread and context of every starved thread."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_starved.clear)


class _Climbing(threading.local):
    active = False
    why: str = ""


_climbing = _Climbing()


def add(height: int, rung: Rung, *, retries: bool = False) -> None:
    """Register a rung. Lower rungs are tried first.

    Args:
        height: its position on the ladder.
        rung: the function that frees memory.
        retries: repeat it while it frees memory.
    """
    _rungs.setdefault(height, []).append((rung, retries))


def climb(context: Context, nbytes: int) -> Iterator[None]:
    """Yield after each rung that may have freed memory; :func:`again` retries then."""
    if _climbing.active:
        return
    _climbing.active, _climbing.why = True, ""
    try:
        for height in sorted(_rungs):
            for rung, repeated in _rungs[height]:
                while rung(context, nbytes):
                    yield
                    if not repeated:
                        break
    finally:
        _climbing.active = False


def again(attempt: Callable[[], T], chances: Iterable[object]) -> T:
    """Return the result of ``attempt``, called after each of ``chances`` and once more at the end.

    The final attempt is needed because other threads free memory at any moment, even after the last chance has looked.

    Raises:
        OutOfMemoryError: that of the last attempt.
    """
    for _ in chances:
        try:
            return attempt()
        except OutOfMemoryError:
            pass
    return attempt()


class Starved:
    """Context manager that marks this thread as starved while it retries an allocation on ``context``."""

    __slots__ = ("_context",)

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> Self:
        _starved[id(self)] = threading.get_ident(), self._context
        return self

    def __exit__(self, *exc: object) -> None:
        _starved.pop(id(self), None)

    __del__ = __exit__  # an interrupt may come between `__enter__` and the block


def other_thread_starves(contexts: Iterable[Context]) -> bool:
    """Return whether another thread is starved on one of ``contexts``."""
    if not _starved:
        return False
    needed, caller = set(contexts), threading.get_ident()
    return any(context in needed and thread != caller for thread, context in list(_starved.values()))


def starved_threads() -> set[int]:
    """Return the starved threads."""
    return {thread for thread, _ in list(_starved.values())}


def add_wait(wait: Wait) -> None:
    """Register a wait for starved threads."""
    _waits.append(wait)


def wait(context: Context, *, in_operation: bool) -> bool:
    """Wait for memory that will soon be free. Return False if there is none."""
    return any(wait(context, in_operation) for wait in _waits)


def explain(text: str) -> None:
    """Record why a rung could free nothing; the next report of this thread shows it."""
    _climbing.why = text


def explanation() -> str:
    """Return the explanations of this thread's last climb, and clear them."""
    why, _climbing.why = _climbing.why, ""
    return why
