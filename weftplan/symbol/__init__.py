"""The symbolic graph interface ``mx.sym``: registered operators as functions, by name and alias."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weftplan.errors import UnknownOperatorError, did_you_mean
from weftplan.ops.core import registry
from weftplan.support import slots
from weftplan.symbol.api.creation import (
    Variable,
    arange,
    eye,
    full,
    histogram,
    hypot,
    linspace,
    maximum,
    minimum,
    modulo,
    ones,
    power,
    split_v2,
    zeros,
)
from weftplan.symbol.api.functions import function
from weftplan.symbol.api.functions import internal as _internal
from weftplan.symbol.attribute import AttrScope
from weftplan.symbol.name import NameManager, Prefix
from weftplan.symbol.node import Entry, Node, topological_order
from weftplan.symbol.symbol import Group, Symbol, load, load_json

if TYPE_CHECKING:
    from weftplan.symbol.registered import *  # noqa: F403 - the operators, written by docs/write_stubs.py
    from weftplan.symbol.registered import contrib, image, linalg, random
else:
    from weftplan.symbol.api.functions import contrib, image, linalg, random

var = Variable
pow = power
op = _internal

__all__ = [
    "AttrScope",
    "Entry",
    "Group",
    "NameManager",
    "Node",
    "Prefix",
    "Symbol",
    "Variable",
    "arange",
    "contrib",
    "eye",
    "full",
    "histogram",
    "hypot",
    "image",
    "linalg",
    "linspace",
    "load",
    "load_json",
    "maximum",
    "minimum",
    "modulo",
    "ones",
    "pow",
    "power",
    "random",
    "split_v2",
    "topological_order",
    "var",
    "zeros",
]


def _attribute(name: str) -> object:
    # Python itself asks for dunder names (__path__, __wrapped__, …); no operator has such a name.
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "sparse":
        raise UnknownOperatorError(
            "mx.sym.sparse is absent on purpose: every array is dense; use the operators of mx.sym"
        )
    if name == "cast_storage":
        raise UnknownOperatorError(
            "mx.sym.cast_storage is absent on purpose: every array of a graph is dense; leave it out"
        )
    if name == "Custom":
        return slots.SYMBOL_CUSTOM.get()
    if not registry.contains(name):
        near = did_you_mean(name, __dir__())
        raise UnknownOperatorError(f"mx.sym has no operator or function {name!r}" + (near and f"; {near.rstrip()}"))
    return function(name)


if not TYPE_CHECKING:  # for a type checker a name that no operator has is an error
    __getattr__ = _attribute


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in registry.names() if not name.startswith("_"))})
