"""Locks whose ``with`` Ctrl-C cannot break off halfway.

The interpreter looks for signals after a call. Since CPython 3.14 ``with lock`` calls ``__enter__`` like anything else,
so an interrupt may come when the lock is taken and the block that would let it go has not begun: nobody ever gets it
again. Up to 3.13 entering was one step, but never ``if lock.acquire(blocking=False)`` with a ``try`` behind it. Only
the main thread is interrupted, but all wait for the lock.
"""

from __future__ import annotations

import logging  # noqa: F401  # has hooks of forks, which must be there before a fork waits for an import
import os
import threading
import time
import weakref
from functools import partial
from typing import Any, TypeVar

_SOON_S = 0.1


class _Safe:
    """What both kinds share."""

    __slots__ = ("__exit__", "__weakref__", "_taking", "_trying", "_waiting", "release")
    # A slot, because an `__exit__` written in Python could be interrupted when it begins, before it lets go.

    def __init__(self, lock: Any) -> None:
        self.__exit__ = lock.__exit__
        self.release = lock.release
        # A loop calls them without looking for signals afterwards; nor does the interpreter when a function returns.
        self._taking = iter(lock.acquire, None)
        self._trying = iter(partial(lock.acquire, False), None)
        self._waiting = iter(partial(lock.acquire, True, _SOON_S), None)

    def __enter__(self) -> None:
        for _ in self._taking:
            break

    def acquire(self, blocking: bool = True) -> bool:
        """Take it; without ``blocking`` only if that is possible at once. A ``try`` is to follow directly."""
        taken: bool
        for taken in self._taking if blocking else self._trying:
            return taken
        raise AssertionError("unreachable: a lock returns True or False, never None")

    def acquire_soon(self) -> bool:
        """Take it if that is possible within a tenth of a second. A ``try`` is to follow directly."""
        taken: bool
        for taken in self._waiting:
            return taken
        raise AssertionError("unreachable: a lock returns True or False, never None")


class Lock(_Safe):
    """As ``threading.Lock``: not re-entrant, any thread may release it."""

    __slots__ = ("locked",)

    def __init__(self) -> None:
        lock = threading.Lock()
        super().__init__(lock)
        self.locked = lock.locked


class ReentrantLock(_Safe):
    """As ``threading.RLock``: its thread may take it again, and releases it as often.

    ``owned()`` is true on the thread that has it: in a signal handler or finalizer that runs in the middle of a change.
    """

    __slots__ = ("owned",)

    def __init__(self) -> None:
        lock: Any = threading.RLock()
        super().__init__(lock)
        self.owned = lock._is_owned


def free_in_children(lock: AnySafe) -> AnySafe:
    """``lock`` itself; in a forked child it is free, though another thread may have held it."""
    _freed.add(lock)
    return lock


def whole_in_children(lock: AnySafe) -> AnySafe:
    """``lock`` itself; whoever forks holds it meanwhile, so that a child finds what it guards unharmed, and it free.

    Only for locks whose holders wait for nobody: neither for operations nor for what a forking thread may hold.
    """
    _whole.add(lock)
    return lock


AnySafe = TypeVar("AnySafe", bound=_Safe)
Member = TypeVar("Member")
_freed: weakref.WeakSet[_Safe] = weakref.WeakSet()
_whole: weakref.WeakSet[_Safe] = weakref.WeakSet()
_PATIENCE_S = 1.0


class _Fork(threading.local):
    """The fork that this thread is in the middle of; others may fork at the same time."""

    def __init__(self) -> None:
        self.held: list[_Safe] = []


_fork = _Fork()


def members(found: weakref.WeakSet[Member]) -> list[Member]:
    """What is in a weak set now; one that another thread changes meanwhile is read again."""
    while True:
        try:
            return list(found)
        except RuntimeError:
            continue


def _take_all() -> None:
    """Before a fork: all or none, so that threads that hold one and want another can go on.

    The one that was not to be had is waited for while holding none, and taken first the next time.
    """
    end = time.monotonic() + _PATIENCE_S
    first: list[_Safe] = []
    while time.monotonic() < end:  # for ever if this very thread has one, below in its stack
        for lock in first:
            if lock.acquire_soon():
                _fork.held.append(lock)
        for lock in members(_whole):
            if lock in _fork.held:
                continue
            if not lock.acquire(blocking=False):
                _let_all_go()
                first = [lock]
                break
            _fork.held.append(lock)
        else:
            return


def _let_all_go() -> None:
    while _fork.held:
        _fork.held.pop().release()


def _renew() -> None:
    """In a forked child: free, whoever held it, and whoever waited for it."""
    _fork.held.clear()
    for lock in [*members(_freed), *members(_whole)]:
        type(lock).__init__(lock)  # type: ignore[call-arg]


if hasattr(os, "register_at_fork"):
    # What is registered later, as the engine's wait for its operations, comes first before a fork.
    os.register_at_fork(before=_take_all, after_in_parent=_let_all_go, after_in_child=_renew)
