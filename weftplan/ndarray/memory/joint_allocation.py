"""Joint allocation: an operation gets the memory of all its arrays, or none while it yields to others.

If arrays may be offloaded, an operation may have to bring several of them back. If each operation held its first arrays
while it waited for memory, two operations could each hold half of their arrays, a deadlock. Hence:

1. One operation at a time takes the memory of its arrays (:func:`run`). If an allocation fails, the operation releases
   the memory that it holds, returns new allocations to storage, and waits holding nothing: for operations that are
   ready or running, as ``Engine.retries_after_progress`` defines.
2. If those cannot free enough, it keeps other operations from beginning, waits for the open *looks* and retries after
   each. Its allocation fails if there is no room when no look is open.

A look is the time during which views of arrays exist: while an operation computes, while a copy moves an array to its
offload target or back, while a thread reads. A look ends without waiting for other threads, unless its own thread is
starved of memory; such a look is not waited for. Any thread may call this module.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, Self, TypeVar

from weftplan import engine
from weftplan.device.context import Context
from weftplan.errors import OutOfMemoryError
from weftplan.locks import ReentrantLock, free_in_children
from weftplan.ndarray.memory.release import PATIENCE_S, drain
from weftplan.storage import relief

T = TypeVar("T")

_GLANCE_S = 0.0005
_MOMENT_S = 1.0
_beginning = free_in_children(ReentrantLock())
"""Held while a look begins or an operation takes the memory of its arrays, so that these exclude each other.

Its holder waits only for open looks, for copies and for the device.
"""
_looks: dict[int, int] = {}
"""Open looks: the thread of each, by the look's id."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_looks.clear)


class FreshChunk(Protocol):
    """A chunk whose first memory is still unwritten."""

    def drop(self) -> object:
        """Return the memory to storage."""
        ...


class _Attempt:
    """One attempt of a thread to get the memory of several arrays."""

    __slots__ = ("context", "fresh")

    def __init__(self) -> None:
        self.context: Context | None = None
        """The context on which an allocation failed, or None."""
        self.fresh: list[FreshChunk] = []
        """Chunks whose first memory was allocated in this attempt."""


class _Attempts(threading.local):
    attempt: _Attempt | None = None


_attempts = _Attempts()


class Look:
    """A ``with`` block in which this thread has views of arrays.

    It does not begin while another thread takes memory or needs all memory for itself.
    """

    __slots__ = ()

    def __enter__(self) -> Self:
        with _beginning:
            self.begin()
        return self

    def begin(self) -> None:
        """Open the look, as ``with`` does; the caller holds the lock."""
        _looks[id(self)] = threading.get_ident()

    def __exit__(self, *exc: object) -> None:
        _looks.pop(id(self), None)

    __del__ = __exit__  # an interrupt may have come between enter and exit


def run(get: Callable[[], list[object]], use: Callable[[list[object]], object]) -> None:
    """Run ``use(get())`` in an operation, and empty the list afterwards.

    ``get`` looks up the bytes of arrays, which may allocate memory; it may be called several times.

    Raises:
        OutOfMemoryError: the arrays do not fit even when no other thread has views of arrays.
    """
    look = Look()
    held = _all_of(get, look)
    try:
        use(held)
    finally:
        held.clear()
        look.__exit__()


def _all_of(get: Callable[[], list[object]], look: Look) -> list[object]:
    """Return the result of ``get``, with ``look`` open."""
    attempt = _Attempt()
    held = _tried(get, look, attempt)
    if held is not None:
        return held
    assert attempt.context is not None
    with relief.Starved(attempt.context):
        for _ in chances(attempt.context):
            drain(everything=True)
            held = _tried(get, look, attempt)
            if held is not None:
                return held
        with _beginning:
            for is_last in _ends_of_looks():
                held = _tried(get, look, attempt, is_last=is_last)
                if held is not None:
                    return held
    raise AssertionError("the last attempt has raised")


def _tried(
    get: Callable[[], list[object]], look: Look, attempt: _Attempt, *, is_last: bool = False
) -> list[object] | None:
    """Return the result of ``get``, or None if there was no room; new memory is freed then.

    Raises:
        OutOfMemoryError: there was no room in the ``is_last`` attempt, or a retry cannot help.
    """
    with _beginning:
        previous, _attempts.attempt = _attempts.attempt, attempt
        attempt.context = None
        try:
            held = get()
            look.begin()
            return held
        except OutOfMemoryError as error:
            for chunk in attempt.fresh:
                chunk.drop()
            if is_last or attempt.context is None:
                raise error.with_traceback(None) from None
            return None
        finally:
            attempt.fresh.clear()
            _attempts.attempt = previous


def refused(context: Context) -> bool:
    """Record a failed allocation on ``context``; return True if the caller must not wait.

    A thread inside an attempt must not wait, since it may hold memory that other threads wait for.
    """
    attempt = _attempts.attempt
    if attempt is not None:
        attempt.context = context
    return attempt is not None


def first_memory(chunk: FreshChunk) -> None:
    """Record that a chunk got its first memory, still unwritten; it is freed if the attempt fails."""
    if _attempts.attempt is not None:
        _attempts.attempt.fresh.append(chunk)


class Impatient:
    """A ``with`` block in which allocations of this thread never wait: they succeed immediately or fail."""

    __slots__ = ("_previous",)

    def __enter__(self) -> Self:
        self._previous, _attempts.attempt = _attempts.attempt, _Attempt()
        return self

    def __exit__(self, *exc: object) -> None:
        _attempts.attempt = self._previous


def patiently(attempt: Callable[[], T], context: Context) -> T:
    """Retry ``attempt`` while it raises OutOfMemoryError for lack of room on ``context``; return its result.

    The caller must hold no memory that other threads may wait for.
    """
    try:
        return relief.again(attempt, chances(context))
    except OutOfMemoryError:
        if engine.get().in_operation:
            raise
    with _beginning:  # no other thread is inside an attempt, holding memory without an open look
        for is_last in _ends_of_looks(time.monotonic() + PATIENCE_S):
            try:
                return attempt()
            except OutOfMemoryError:
                if is_last:
                    raise
    raise AssertionError("the last attempt has raised")


def chances(context: Context) -> Iterator[None]:
    """Yield each time that ``context`` may have more free memory.

    Stop if neither pending operations nor registered waits (:func:`relief.wait`) can free more. The caller then has
    to wait for the end of a look.
    """
    current = engine.get()
    inside = current.in_operation
    while True:
        while not inside and relief.wait(context, in_operation=False):
            yield
        for _ in current.retries_after_progress(PATIENCE_S):
            yield
        if not relief.wait(context, in_operation=inside):
            return
        yield


def _ends_of_looks(end: float = math.inf) -> Iterator[bool]:
    """Yield False immediately and after each look of another thread ends; finally yield True.

    The iteration ends when no such look is open, or at the time ``end``. A thread that was starved and has just got
    memory still counts as starved for a moment, so the looks of starved threads are also waited for briefly.
    """
    late = time.monotonic() + _MOMENT_S
    while time.monotonic() < end:
        begun = _other_looks()
        if not begun and not (_looks_elsewhere() and time.monotonic() < late):
            break
        yield False
        _await_completion(begun, end)
    yield True


def _await_completion(begun: dict[int, int], end: float) -> None:
    """Wait until one of these looks ends or its thread is starved; wait a moment if there are none."""
    time.sleep(_GLANCE_S)
    while begun and begun.keys() <= _other_looks().keys() and time.monotonic() < end:
        time.sleep(_GLANCE_S)


def _looks_elsewhere() -> dict[int, int]:
    caller = threading.get_ident()
    return {key: thread for key, thread in list(_looks.items()) if thread != caller}


def _other_looks() -> dict[int, int]:
    """Return the looks of other threads that are not starved, which therefore end without further help."""
    lacking = relief.starved_threads()
    return {key: thread for key, thread in _looks_elsewhere().items() if thread not in lacking}
