"""Registry of engine types by name, for ``create``, ``MXNET_ENGINE_TYPE``, command line and docs.

An engine type is a subclass of :class:`~weftplan.engine.core.Engine` with a ``kind``, decorated with :func:`register`.
Types register at import; lookups are allowed from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from weftplan.engine.core import Engine
from weftplan.errors import ConfigError, did_you_mean

T = TypeVar("T", bound=type[Engine])

_ENGINES: dict[str, type[Engine]] = {}


def register(klass: T) -> T:
    """Register an engine type under its ``kind``.

    Raises:
        ConfigError: another class has this name.
    """
    earlier = _ENGINES.setdefault(klass.kind, klass)
    if earlier is not klass:
        raise ConfigError(f"an engine {klass.kind!r} is registered already: {earlier!r}; give {klass!r} another kind")
    return klass


def registered() -> Mapping[str, type[Engine]]:
    """Return every engine type by its name, in the order of registration."""
    return _ENGINES


def find(kind: str) -> type[Engine]:
    """Return the engine type of this name.

    Raises:
        ConfigError: there is none; the message names the nearest one.
    """
    klass = _ENGINES.get(kind)
    if klass is None:
        hint = did_you_mean(kind, _ENGINES)
        raise ConfigError(f"unknown engine {kind!r}: {hint}legal: {', '.join(_ENGINES)}")
    return klass
