"""Locks that are safe against Ctrl-C in a ``with`` statement.

CPython checks for signals after a call. Since 3.14, ``with lock`` calls ``__enter__`` like any function. An interrupt
can then arrive after the lock is taken but before the block that releases it, and the lock is never released. The same
holds in all versions for ``if lock.acquire(blocking=False)`` with a ``try`` after it. Only the main thread is
interrupted, but all threads wait for the lock.
"""

from __future__ import annotations

import logging  # noqa: F401  # its fork hooks must be registered before a fork can wait for an import
import os
import threading
import time
import weakref
from functools import partial
from typing import Any, TypeVar

_SOON_S = 0.1


class _Safe:
    """Common base class of both kinds."""

    __slots__ = ("__exit__", "__weakref__", "_taking", "_trying", "_waiting", "release")
    # `__exit__` is a slot: a Python method could be interrupted at its start, before the release.

    def __init__(self, lock: Any) -> None:
        self.__exit__ = lock.__exit__
        self.release = lock.release
        # A `for` loop calls these without checking for signals afterwards; so does a function return.
        self._taking = iter(lock.acquire, None)
        self._trying = iter(partial(lock.acquire, False), None)
        self._waiting = iter(partial(lock.acquire, True, _SOON_S), None)

    def __enter__(self) -> None:
        for _ in self._taking:
            break

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; without ``blocking`` only if it is free. A ``try`` must follow directly."""
        acquired: bool
        for acquired in self._taking if blocking else self._trying:
            return acquired
        raise AssertionError("unreachable: a lock returns True or False, never None")

    def acquire_soon(self) -> bool:
        """Take the lock if it becomes free within a tenth of a second. A ``try`` must follow directly."""
        acquired: bool
        for acquired in self._waiting:
            return acquired
        raise AssertionError("unreachable: a lock returns True or False, never None")


class Lock(_Safe):
    """Like ``threading.Lock``: not re-entrant, any thread may release it."""

    __slots__ = ("locked",)

    def __init__(self) -> None:
        lock = threading.Lock()
        super().__init__(lock)
        self.locked = lock.locked


class ReentrantLock(_Safe):
    """Like ``threading.RLock``: re-entrant.

    ``owned()`` returns whether this thread holds it, for a signal handler or finalizer that interrupts a change.
    """

    __slots__ = ("owned",)

    def __init__(self) -> None:
        lock: Any = threading.RLock()
        super().__init__(lock)
        self.owned = lock._is_owned


def free_in_children(lock: AnySafe) -> AnySafe:
    """Return ``lock``, registered to be free in a forked child even if another thread held it."""
    _freed.add(lock)
    return lock


def consistent_in_children(lock: AnySafe) -> AnySafe:
    """Return ``lock``, registered to be held across forks: the child sees the guarded state intact and the lock free.

    Holders of such a lock must not wait for operations, nor for anything that a forking thread may hold.
    """
    _consistent.add(lock)
    return lock


AnySafe = TypeVar("AnySafe", bound=_Safe)
Member = TypeVar("Member")
_freed: weakref.WeakSet[_Safe] = weakref.WeakSet()
_consistent: weakref.WeakSet[_Safe] = weakref.WeakSet()
_PATIENCE_S = 1.0


class _Fork(threading.local):
    """Fork in progress on this thread; other threads may fork at the same time."""

    def __init__(self) -> None:
        self.held: list[_Safe] = []


_fork = _Fork()


def members(weak_set: weakref.WeakSet[Member]) -> list[Member]:
    """Return the members of a weak set; retry if another thread changes it meanwhile."""
    while True:
        try:
            return list(weak_set)
        except RuntimeError:
            continue


def _take_all() -> None:
    """Before a fork: take all locks or none, so that threads that hold one and want another can go on.

    If a lock is busy, release all, wait for it, and take it first in the next attempt.
    """
    end = time.monotonic() + _PATIENCE_S
    locks: list[_Safe] = []
    while time.monotonic() < end:  # limited, because this thread may itself hold one further up its stack
        for lock in locks:
            if lock.acquire_soon():
                _fork.held.append(lock)
        for lock in members(_consistent):
            if lock in _fork.held:
                continue
            if not lock.acquire(blocking=False):
                _let_all_go()
                locks = [lock]
                break
            _fork.held.append(lock)
        else:
            return


def _let_all_go() -> None:
    while _fork.held:
        _fork.held.pop().release()


def _renew() -> None:
    """In a forked child: reset every lock, whatever its holder and waiters."""
    _fork.held.clear()
    for lock in [*members(_freed), *members(_consistent)]:
        type(lock).__init__(lock)  # type: ignore[call-arg]


if hasattr(os, "register_at_fork"):
    # Hooks registered later, such as the engine's wait for its operations, run earlier before a fork.
    os.register_at_fork(before=_take_all, after_in_parent=_let_all_go, after_in_child=_renew)
