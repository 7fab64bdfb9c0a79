"""``nd.<name>`` for registered operators: a function per operator, made at first use."""

from __future__ import annotations

from typing import Any

from weftplan.ndarray.invoke import call
from weftplan.ops import registry


def function(name: str) -> Any:
    """The function that calls operator ``name``, or None when there is no such operator."""
    if name.startswith("__") or not registry.contains(name):
        return None
    op = registry.get(name)

    def operator(*args: Any, **kwargs: Any) -> Any:
        return call(name, args, kwargs)

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = op.doc or f"The operator {op.name}."
    return operator


def names() -> list[str]:
    """Names of all operators that do not begin with an underscore."""
    return [name for name in registry.names() if not name.startswith("_")]
