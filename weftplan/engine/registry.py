"""Engine types by name: the table for ``create``, ``MXNET_ENGINE_TYPE``, command line and docs.

An engine type is a subclass of :class:`~weftplan.engine.core.Engine` with a ``kind`` and the class decorator
:func:`register`. Types register when their modules are imported; looking up may be done from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from weftplan.engine.core import Engine
from weftplan.errors import ConfigError, did_you_mean

T = TypeVar("T", bound=type[Engine])

_ENGINES: dict[str, type[Engine]] = {}


def register(klass: T) -> T:
    """Class decorator: add an engine type under its ``kind``.

    Raises:
        ConfigError: another class has this name.
    """
    other = _ENGINES.setdefault(klass.kind, klass)
    if other is not klass:
        raise ConfigError(f"an engine {klass.kind!r} is registered already: {other!r}; give {klass!r} another kind")
    return klass


def registered() -> Mapping[str, type[Engine]]:
    """Return every engine type by its name, in the order of registration."""
    return _ENGINES


def find(kind: str) -> type[Engine]:
    """Return the engine type of this name.

    Raises:
        ConfigError: there is none; names the nearest one.
    """
    klass = _ENGINES.get(kind)
    if klass is None:
        hint = did_you_mean(kind, _ENGINES)
        raise ConfigError(f"unknown engine {kind!r}: {hint}legal: {', '.join(_ENGINES)}")
    return klass
