"""Importing a part of the package when it is first used: wholly, whatever signals come and whoever forks.

``import weftplan`` imports little, so a first call such as ``symbol.bind`` may import ten layers. An interrupt in the
middle of an import leaves some of them half done for good: a module that has run, but which its package does not know
as an attribute. What a user wrote as a call must not behave like that, so Ctrl-C is raised when the import has ended.
Any thread may call it.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

import weftplan.locks  # noqa: F401  # registers its hooks of forks before those below: before a fork the last comes first

_FORK_PATIENCE_S = 10.0
_importing: list[int] = []
"""Threads that import a part of the package, once for each import."""


def late_import(module: str) -> ModuleType:
    """Import ``module``, a full name.

    Raises:
        KeyboardInterrupt: after the import, if Ctrl-C came during it (or whatever else the handler of SIGINT raises).
        ImportError: as ``importlib.import_module``.
    """
    with _no_fork_meanwhile():
        if threading.current_thread() is not threading.main_thread():
            return importlib.import_module(module)  # signal handlers run on the main thread only
        return _import_without_interrupt(module)


def _import_without_interrupt(module: str) -> ModuleType:
    handler: Any = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # the default action ends the process; an ignored signal raises nothing
        return importlib.import_module(module)
    held: list[Any] = []

    def hold(_: int, frame: Any) -> None:
        held.append(frame)

    with suppress(ValueError):  # the main thread of a subinterpreter gets no signals
        signal.signal(signal.SIGINT, hold)
    try:
        return importlib.import_module(module)
    finally:
        if signal.getsignal(signal.SIGINT) is hold:  # else what was imported has installed a handler of its own
            signal.signal(signal.SIGINT, handler)
        if held:
            handler(signal.SIGINT, held[-1])


@contextmanager
def _no_fork_meanwhile() -> Iterator[None]:
    """A fork of another thread waits for the end of the block: a child could never get the lock of an import."""
    _importing.append(threading.get_ident())
    try:
        yield
    finally:
        with suppress(ValueError):  # in a child that it has forked itself
            _importing.remove(threading.get_ident())


def _wait_for_imports() -> None:
    end = time.monotonic() + _FORK_PATIENCE_S
    while {*_importing} - {threading.get_ident()} and time.monotonic() < end:
        time.sleep(0.001)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_imports, after_in_child=_importing.clear)
