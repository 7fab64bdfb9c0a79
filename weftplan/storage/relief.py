"""Memory relief: a ladder of rungs, cheapest first, that an allocation tries before it fails.

A pool first takes back what has been freed and gives its own idle blocks to the device. Then come the rungs, added by
whoever can make room: arrays that are dead but not yet given back, the caches of other pools of the same memory, arrays
that can wait elsewhere, arrays in cycles, and last a wait for frees that pending operations are about to make. After
each that may have freed something the pool asks again.

Rungs run without the pool's lock, on the thread that asks. One that finds itself on the ladder already, because a rung
allocates, is refused at once.

Whoever has climbed in vain is *lacking* until it has memory or gives up. Those who could do without more memory for a
moment, as runs that have not begun, let it go first (:func:`lacked`); those who know of memory in use that its users
will soon let go add a wait (:func:`add_wait`).
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
"""Makes room on a context, for so many bytes if it can choose; True if there may be more than before."""

Wait = Callable[[Context, bool], bool]
"""Waits for memory of a context that is in use and will soon not be; the second argument says that this thread is in an
operation, which may not wait for operations. False: there is none."""

_rungs: dict[int, list[tuple[Rung, bool]]] = {}
_waits: list[Wait] = []
_lacking: dict[int, tuple[int, Context]] = {}
"""Thread and context of everybody who lacks memory now."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lacking.clear)


class _Climbing(threading.local):
    now = False
    why: str = ""


_climbing = _Climbing()


def add(height: int, rung: Rung, *, again: bool = False) -> None:
    """Add a rung; lower ones are tried first.

    Args:
        height: its place.
        rung: makes room.
        again: it is tried until it makes no more room, since what it freed may not have been enough.
    """
    _rungs.setdefault(height, []).append((rung, again))


def climb(context: Context, nbytes: int) -> Iterator[None]:
    """Yields after each rung that may have made room: chances for :func:`again`."""
    if _climbing.now:
        return
    _climbing.now, _climbing.why = True, ""
    try:
        for height in sorted(_rungs):
            for rung, repeated in _rungs[height]:
                while rung(context, nbytes):
                    yield
                    if not repeated:
                        break
    finally:
        _climbing.now = False


def again(attempt: Callable[[], T], chances: Iterable[object]) -> T:
    """What ``attempt`` returns, which raises OutOfMemoryError while there is no room: called after each of ``chances``,
    and once more when there are none left. Other threads give memory back at any moment, so what the last chance looked
    for may have come back between the attempt before it and its look.

    Raises:
        OutOfMemoryError: the last attempt's.
    """
    for _ in chances:
        try:
            return attempt()
        except OutOfMemoryError:
            pass
    return attempt()


class Lacking:
    """The time in which this thread has been refused memory of ``context`` and tries again: a ``with`` block."""

    __slots__ = ("_context",)

    def __init__(self, context: Context) -> None:
        self._context = context

    def __enter__(self) -> Self:
        _lacking[id(self)] = threading.get_ident(), self._context
        return self

    def __exit__(self, *exc: object) -> None:
        _lacking.pop(id(self), None)

    __del__ = __exit__  # an interrupt may have come between the two


def lacked(contexts: Iterable[Context]) -> bool:
    """True while another thread lacks memory of one of ``contexts``."""
    if not _lacking:
        return False
    wanted, here = set(contexts), threading.get_ident()
    return any(context in wanted and thread != here for thread, context in list(_lacking.values()))


def lacking() -> set[int]:
    """The threads that lack memory now."""
    return {thread for thread, _ in list(_lacking.values())}


def add_wait(wait: Wait) -> None:
    """Add a wait, for those who have climbed in vain."""
    _waits.append(wait)


def wait(context: Context, *, in_operation: bool) -> bool:
    """Wait for memory that is in use, and that its users will soon let go; False when there is none."""
    return any(wait(context, in_operation) for wait in _waits)


def explain(text: str) -> None:
    """Called by a rung that could make no room, with the reason: the next report of this thread says it."""
    _climbing.why = text


def explanation() -> str:
    """What rungs have said since this thread began its last climb, and then forgotten."""
    why, _climbing.why = _climbing.why, ""
    return why
