"""Automatic node names: a stack of name managers per thread, each with its own counters.

Two threads that build networks concurrently count separately. So automatic names depend on the nodes that the same
thread has built before.
"""

from __future__ import annotations

import threading


class _Current(type):
    """A metaclass that gives the class MXNet's ``current`` property."""

    @property
    def current(cls) -> NameManager:
        """The innermost manager of this thread; it may be set."""
        return current()

    @current.setter
    def current(cls, manager: NameManager) -> None:
        _local.stack[-1] = manager


class NameManager(metaclass=_Current):
    """A generator of names such as ``fullyconnected0``; a name that the user chose is used unchanged.

    >>> with NameManager():
    ...     [current().get(None, "fullyconnected"), current().get(None, "fullyconnected"), current().get("fc", "x")]
    ['fullyconnected0', 'fullyconnected1', 'fc']
    """

    def __init__(self) -> None:
        self._counter: dict[str, int] = {}

    def get(self, name: str | None, hint: str) -> str:
        """Return ``name``, or if that is None or empty, ``hint`` with the next number."""
        if name:
            return name
        number = self._counter.get(hint, 0)
        self._counter[hint] = number + 1
        return f"{hint}{number}"

    def __enter__(self) -> NameManager:
        _local.stack.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        _local.stack.pop()


class Prefix(NameManager):
    """A name manager that prepends ``prefix`` to every name, chosen or automatic.

    >>> with Prefix("stage1_"):
    ...     [current().get("conv", "x"), current().get(None, "activation")]
    ['stage1_conv', 'stage1_activation0']
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def get(self, name: str | None, hint: str) -> str:
        """Return the name that :class:`NameManager` would give, with the prefix."""
        return self._prefix + super().get(name, hint)


class _Local(threading.local):
    def __init__(self) -> None:
        self.stack = [NameManager()]


_local = _Local()


def current() -> NameManager:
    """Return the innermost manager of this thread; a new thread starts with a new manager."""
    return _local.stack[-1]
