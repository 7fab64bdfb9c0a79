"""Lazy imports of parts of the package, safe against signals and forks.

``import weftplan`` imports little, so a first call such as ``symbol.bind`` may import ten layers. An interrupt during
an import would leave some layers half imported for good: a module has run, but its package lacks the attribute. A call
must not behave like that, so Ctrl-C is raised after the import has ended. Any thread may call this module.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, cast

import weftplan.locks  # noqa: F401  # registers its hooks of forks before those below: before a fork the last comes first

_FORK_PATIENCE_S = 10.0
"""Maximum seconds that a fork waits for imports of other threads; the slowest, of PyTorch, takes a few seconds."""
_importing: list[int] = []
"""Identifiers of the threads that are importing, one item per import."""


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

    # The handler is replaced, because nothing else keeps Ctrl-C out of an import. A signal mask does not: another
    # thread receives the signal, and Python runs the handler on the main thread. A helper thread that imports while the
    # main thread waits deadlocks if this call is part of an import: the main thread holds that module's import lock. A
    # second attempt after an interrupt does not help: Python drops the module that failed, and keeps the modules that
    # it had imported, without the attributes of their packages.
    def hold(_: int, frame: FrameType | None) -> None:
        held.append(frame)

    with suppress(ValueError):  # the main thread of a subinterpreter receives no signals
        signal.signal(signal.SIGINT, hold)
    try:
        return importlib.import_module(module)
    finally:
        if signal.getsignal(signal.SIGINT) is hold:  # else the imported module has installed its own handler
            signal.signal(signal.SIGINT, handler)
        if held:
            handler(signal.SIGINT, held[-1])


class Aliases:
    """Alias names for modules of a package: ``import package.name`` returns the aliased module.

    One finder comes first in ``sys.meta_path``, so that a file is never loaded twice under two names. A second finder
    comes last, for names without a file.

    Args:
        package: the full name of the package, which is imported already.
        names: attributes of it that are modules.
        deeper: dotted names -> the name of the module; both relative to ``package``.
        absent: names of modules that are absent on purpose, dotted or plain -> the module or function to use instead.
    """

    def __init__(
        self, package: str, names: Collection[str], deeper: Mapping[str, str], absent: Mapping[str, str]
    ) -> None:
        self._package, self._names, self._deeper, self._absent = package, names, deeper, absent

    def install(self) -> None:
        """Add both finders to ``sys.meta_path``."""
        sys.meta_path.insert(0, _Finder(self._package, self.alias))
        sys.meta_path.append(_Finder(self._package, self.other))

    def alias(self, name: str) -> Callable[[], ModuleType] | None:
        """Return a function that gets the module whose alias ``name`` is, or a submodule of an aliased module."""
        if name in self._deeper:
            return partial(late_import, f"{self._package}.{self._deeper[name]}")
        parent, _, leaf = name.rpartition(".")
        holder = sys.modules.get(f"{self._package}.{parent}") if parent else None
        if holder is None or holder.__name__ == f"{self._package}.{parent}":
            return None
        target = f"{holder.__name__}.{leaf}"
        exists = target in sys.modules or (hasattr(holder, "__path__") and importlib.util.find_spec(target) is not None)
        return partial(late_import, target) if exists else None

    def other(self, name: str) -> Callable[[], ModuleType] | None:
        """Return a function that gets the module stored as an attribute called ``name``.

        Raises:
            ModuleNotFoundError: it is absent on purpose.
        """
        parent, _, leaf = name.rpartition(".")
        if not parent and name in self._names:
            return partial(getattr, sys.modules[self._package], name)
        reason = self._absent.get(name)
        if reason is not None:
            # Without `name=`: with it, ``from package import name`` would replace the text by "cannot import name".
            raise ModuleNotFoundError(f"{self._package} has no {name} on purpose: {reason}")
        holder = sys.modules.get(f"{self._package}.{parent}") if parent else None
        if holder is None or leaf.startswith("_"):
            return None
        try:
            value = getattr(holder, leaf)
        except AttributeError as error:
            if "on purpose" in str(error):
                raise ModuleNotFoundError(str(error)) from None
            return None
        return partial(getattr, holder, leaf) if isinstance(value, ModuleType) else None


class _Finder:
    """A finder and loader for modules that have run already, or that are imported under their own name."""

    def __init__(self, package: str, find: Callable[[str], Callable[[], ModuleType] | None]) -> None:
        self._prefix, self._find = f"{package}.", find
        self._finding = threading.local()

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a spec for a name that this finder knows."""
        names = vars(self._finding).setdefault("names", set())
        if not fullname.startswith(self._prefix) or fullname in names:
            return None
        names.add(fullname)  # the look-up below may import the same name
        try:
            get = self._find(fullname.removeprefix(self._prefix))
        finally:
            names.discard(fullname)
        # As a package, so that it may have deeper names; a module with a path keeps its own.
        return None if get is None else ModuleSpec(fullname, cast(Any, self), loader_state=get, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module, which has run already."""
        module: ModuleType = spec.loader_state()
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the interpreter has replaced by the spec of the alias."""
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state


@contextmanager
def _no_fork_meanwhile() -> Iterator[None]:
    """Delay forks of other threads until the block ends; a child could never acquire an import lock held here."""
    _importing.append(threading.get_ident())
    try:
        yield
    finally:
        with suppress(ValueError):  # in a child that this thread has forked
            _importing.remove(threading.get_ident())


def _wait_for_imports() -> None:
    end = time.monotonic() + _FORK_PATIENCE_S
    while {*_importing} - {threading.get_ident()} and time.monotonic() < end:
        time.sleep(0.001)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_for_imports, after_in_child=_importing.clear)
