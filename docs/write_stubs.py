"""Write the stubs of ``mx.sym`` and ``mx.nd``, which type checkers and editors read, from the registry of operators.

    python docs/write_stubs.py            # writes weftplan/symbol/registered.pyi and weftplan/ndarray/registered.pyi

A stub has the operators as functions, a class ``Methods`` of those that are also methods, and the namespaces
``contrib``, ``image``, ``linalg`` and, for symbols, ``random``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path

import weftplan
from weftplan import ndarray, symbol
from weftplan.ndarray.array import OPERATOR_METHODS, NDArray
from weftplan.ndarray.calls.call_arguments import EXTRA
from weftplan.ndarray.operators import BY_NAME, NAMESPACES
from weftplan.ndarray.randomness.distributions import DISTRIBUTIONS
from weftplan.ops.core import registry
from weftplan.ops.core.signatures import stub, written
from weftplan.symbol.api import functions
from weftplan.symbol.api.functions import FUNCTIONS
from weftplan.symbol.symbol import Symbol

PACKAGE = Path(weftplan.__file__).parent
HEAD = '''"""{name}: one function for every operator. Written by docs/write_stubs.py; do not edit."""

# ruff: noqa: E501
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

{context}from {module} import {array}
from weftplan.support.array_types import {types}

Numbers = float | {array}
'''
PLAIN = {"context": "", "types": "DTypeLike, ShapeLike"}
DRAWN = {
    "context": "from weftplan.device.context import Context\n", "types": "Dims, DTypeLike, Scalar, ShapeLike",
}  # fmt: skip
"""Imports of a stub without and with the functions that draw numbers."""
HANDED_ON = {"exponential": ("lam",), "randn": ("data",)}
"""Keywords of a distribution's operator that its function also accepts."""


def _class(name: str, lines: Iterable[str], *, static: bool) -> list[str]:
    """Return the lines of a class with these functions; ``static`` makes them static, for a namespace."""
    before = ["    @staticmethod"] if static else []
    return ["", f"class {name}:", *([] if static else ["    __slots__ = ()"])] + [
        line for text in lines for line in (*before, f"    {text}")
    ]


def _operators(prefixes: Iterable[str], without: Iterable[str] = ()) -> dict[str, str]:
    """Return {short name: registered name} of the operators of a namespace; the first prefix wins."""
    found: dict[str, str] = {}
    for prefix in prefixes:
        for name in registry.names():
            short = name.removeprefix(prefix)
            if name.startswith(prefix) and short.isidentifier() and short not in without:
                found.setdefault(short, name)
    return dict(sorted(found.items()))


def _namespace(
    name: str, prefixes: Iterable[str], array: str, extra: tuple[tuple[str, ...], ...], more: Iterable[str]
) -> list[str]:
    """Return the lines that declare a namespace: a class of static functions, and a variable of that class."""
    operators = _operators(prefixes, without=FUNCTIONS if more else ())
    lines = [*more, *(stub(short, registry.get(full), array, *extra) for short, full in operators.items())]
    return [*_class(f"_{name.capitalize()}", lines, static=True), f"{name}: _{name.capitalize()}"]


def _drawn(function: Callable[..., Symbol]) -> inspect.Signature:
    """Return the signature of a distribution, including the keywords that it passes to its operator."""
    found = inspect.signature(function)
    own = list(found.parameters.values())[:-1]
    more = [
        *HANDED_ON.get(function.__name__, ()),
        *(() if function.__name__ in ("multinomial", "shuffle") else ("ctx",)),
        "name",
        "attr",
    ]
    kind = inspect.Parameter.KEYWORD_ONLY
    return found.replace(
        parameters=[*own, *(inspect.Parameter(name, kind, default=None, annotation="Any") for name in more)]
    )


def stubs() -> dict[Path, str]:
    """Return {path: text} of every stub file."""
    found = {}
    own = {*dir(object), *(name for kind in Symbol.__mro__ for name in vars(kind))}
    drawn = [written(name, _drawn(function)).replace("'", "") for name, function in FUNCTIONS.items()]
    for name, package, kind, extra, methods, spaces in (
        (
            "mx.sym", symbol, Symbol, (functions.EXTRA,), [n for n in sorted(registry.names()) if n not in own],
            {name: (getattr(functions, name)._prefixes, drawn * (name == "random"))
             for name in ("contrib", "image", "linalg", "random")},
        ),
        (
            "mx.nd", ndarray, NDArray, (EXTRA, BY_NAME), sorted(OPERATOR_METHODS),
            {name: (NAMESPACES[name]._prefixes, []) for name in ("contrib", "image", "linalg")},
        ),
    ):  # fmt: skip
        array = kind.__name__
        names = [n for n in sorted(registry.names()) if not n.startswith("_") and n not in package.__all__]
        lines = [
            HEAD.format(name=name, module=kind.__module__, array=array, **(DRAWN if package is ndarray else PLAIN))
        ]
        lines += [stub(n, registry.get(n), array, *extra) for n in names if n.isidentifier()]
        for space, (prefixes, more) in spaces.items():
            lines += _namespace(space, prefixes, array, extra, more)
        public = [n for n in methods if n.isidentifier() and not n.startswith("_")]
        if package is ndarray:
            draws = (getattr(ndarray.random, row.draw.__name__) for row in DISTRIBUTIONS)
            lines += _class(
                "Distributions",
                (written(f.__name__, inspect.signature(f)).replace("'", "") for f in draws),
                static=True,
            )
        lines += _class("Methods", (stub(n, registry.get(n), array, *extra, method=True) for n in public), static=False)
        found[Path(package.__file__).with_name("registered.pyi")] = "\n".join(lines) + "\n"
    return found


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(PACKAGE.parent)}")
