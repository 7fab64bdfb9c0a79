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
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

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


class ImportsOfAttributes:
    """A finder for ``sys.meta_path``: ``import package.name`` gives the module that the attribute ``name`` stands for.

    It comes last, and so is asked only for what is no file of the package.

    Args:
        package: the full name of the package, which is imported already.
        names: attributes of it that are modules.
        absent: names of modules that are not there on purpose -> what to use instead.
    """

    def __init__(self, package: str, names: Collection[str], absent: Mapping[str, str]) -> None:
        self._package, self._names, self._absent = package, names, absent

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """A spec for one of the names.

        Raises:
            ModuleNotFoundError: it is absent on purpose.
        """
        package, _, name = fullname.rpartition(".")
        if package != self._package:
            return None
        if name in self._absent:
            # without its name, of which ``from package import name`` would hear as "cannot import name"
            raise ModuleNotFoundError(f"{package} has no {name} on purpose: {self._absent[name]}")
        return ModuleSpec(fullname, cast(Any, self)) if name in self._names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module, which has run already."""
        module: ModuleType = getattr(sys.modules[self._package], spec.name.rpartition(".")[2])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, in whose place the interpreter has put the one of its other name."""
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state


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
