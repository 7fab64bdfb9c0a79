"""``nd.<name>`` for registered operators: one function per operator, made on first use.

``nd.op``, ``nd.linalg``, ``nd.contrib`` and ``nd._internal`` hold the same functions under MXNet's names.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from weftplan.errors import did_you_mean
from weftplan.ndarray.array import NDArray
from weftplan.ndarray.calls.call_arguments import EXTRA
from weftplan.ndarray.calls.call_cache import Calls, call
from weftplan.ops.core import registry
from weftplan.ops.core.signatures import document, signature

BY_NAME = ("ctx", "is_train")
"""Keywords that every array operator accepts, after ``out`` and ``name``, which may follow by position, as in MXNet."""


def function(name: str) -> Any:
    """Return the function that calls operator ``name``, or None if there is no such operator."""
    if name.startswith("__") or not registry.contains(name):
        return None
    op = registry.get(name)
    cache: Calls = {}

    def operator(*args: object, **kwargs: object) -> NDArray | list[NDArray]:
        return call(cache, name, args, kwargs)

    operator.__name__ = operator.__qualname__ = name
    operator.__doc__ = document(op)
    operator.__signature__ = signature(op, "NDArray", EXTRA, BY_NAME)  # type: ignore[attr-defined]
    return operator


def names() -> list[str]:
    """Return the names of all operators that do not begin with an underscore."""
    return [name for name in registry.names() if not name.startswith("_")]


class ArrayNamespace(ModuleType):
    """A namespace of operators whose registered names are one of ``prefixes`` followed by the attribute name.

    It is a module, so that ``import mxnet.ndarray.contrib`` works.
    """

    def __init__(self, name: str, *prefixes: str) -> None:
        super().__init__(f"weftplan.ndarray.{name}", type(self).__doc__)
        self._name = name
        self._prefixes = prefixes

    def __getattr__(self, name: str) -> Any:
        for prefix in () if name.startswith("__") else self._prefixes:
            operator = function(prefix + name)
            if operator is not None:
                return operator
        near = "" if name.startswith("__") else did_you_mean(name, self.__dir__())
        raise AttributeError(f"mx.nd.{self._name} has no operator {name!r}" + (near and f"; {near.rstrip()}"))

    def __dir__(self) -> list[str]:
        return sorted({n.removeprefix(p) for n in registry.names() for p in self._prefixes if n.startswith(p)})


NAMESPACES = {
    "_internal": ArrayNamespace("_internal", ""),
    "contrib": ArrayNamespace("contrib", "_contrib_", "contrib_"),
    "image": ArrayNamespace("image", "_image_"),
    "linalg": ArrayNamespace("linalg", "linalg_", "_linalg_"),
    "op": ArrayNamespace("op", ""),
}
