"""Locks whose ``with`` Ctrl-C cannot break off halfway.

The interpreter looks for signals after a call. Since CPython 3.14 ``with lock`` calls ``__enter__`` like anything else,
so an interrupt may come when the lock is taken and the block that would let it go has not begun: nobody ever gets it
again. Up to 3.13 entering was one step, but never ``if lock.acquire(blocking=False)`` with a ``try`` behind it. Only
the main thread is interrupted, but all wait for the lock.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any


class _Safe:
    """What both kinds share."""

    __slots__ = ("__exit__", "_taking", "_trying", "release")
    # A slot, because an `__exit__` written in Python could be interrupted when it begins, before it lets go.

    def __init__(self, lock: Any) -> None:
        self.__exit__ = lock.__exit__
        self.release = lock.release
        # A loop calls them without looking for signals afterwards; nor does the interpreter when a function returns.
        self._taking = iter(lock.acquire, None)
        self._trying = iter(partial(lock.acquire, False), None)

    def __enter__(self) -> None:
        for _ in self._taking:
            break

    def acquire(self, blocking: bool = True) -> bool:
        """Take it; without ``blocking`` only if that is possible at once. A ``try`` is to follow directly."""
        taken: bool
        for taken in self._taking if blocking else self._trying:
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
    """As ``threading.RLock``: its thread may take it again, and releases it as often."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(threading.RLock())


def free_in_children(lock: Lock) -> Lock:
    """``lock`` itself, of a module; in a forked child it is free, though another thread may have held it."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(Lock.__init__, lock))
    return lock
