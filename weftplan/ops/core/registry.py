"""The operator registry: a process-wide dictionary, filled when ``weftplan.ops`` is imported.

This file owns the table and the parsing of parameters that every way to call an operator shares. Registering is meant
for the import of a module; looking up may be done from any thread.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from weftplan.errors import ParameterError, UnknownOperatorError, did_you_mean
from weftplan.ops.core.schema import REQUIRED, Op

_OPS: dict[str, Op] = {}
_ALIASES: dict[str, str] = {}
_PLANNERS: dict[str, Op] = {}


def register(op: Op) -> Op:
    """Add ``op`` under its name and aliases; a name that exists is an error. Returns ``op``."""
    for name in (op.name, *op.aliases):
        if name in _OPS or name in _ALIASES:
            raise ParameterError(f"operator {name!r} is registered already")
    _OPS[op.name] = op
    for alias in op.aliases:
        _ALIASES[alias] = op.name
    return op


def get(name: str) -> Op:
    """Return the operator called ``name`` (or with that alias); raises UnknownOperatorError with near names."""
    op = _OPS.get(name) or _OPS.get(_ALIASES.get(name, ""))
    if op is None:
        # Users never call the gradients' operators by name.
        known = [other for other in (*_OPS, *_ALIASES) if not other.startswith("_backward")]
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
        raise UnknownOperatorError(f"unknown operator {name!r}{hint}")
    return op


def register_planner_op(op: Op) -> Op:
    """Add an operator that only the planner uses: only :func:`find` returns it. Return ``op``."""
    if find(op.name) is not None:
        raise ParameterError(f"operator {op.name!r} is registered already")
    _PLANNERS[op.name] = op
    return op


def find(name: str) -> Op | None:
    """Return the operator whose own name is ``name``, the planner's included; None if there is none."""
    return _OPS.get(name) or _PLANNERS.get(name)


ANY = "*"
_makers: dict[str, Callable[[Mapping[str, Any]], Op]] = {}
"""Functions that make a single operator (``Op.single``) from a node's attributes, by the operator's name."""


def register_maker(name: str, make: Callable[[Mapping[str, object]], Op]) -> None:
    """Let ``make`` give the operator of each node of that name."""
    _makers[name] = make


def resolve(name: str, attrs: Mapping[str, object]) -> Op:
    """Return the operator of a node: as :func:`get`, or built from the attributes by a registered maker.

    The maker named :data:`ANY` is asked for names that are not registered.
    """
    make = _makers.get(name)
    if make is None and not contains(name) and ANY in _makers:
        return _makers[ANY]({**attrs, "op_type": name})
    return get(name) if make is None else make(attrs)


def contains(name: str) -> bool:
    """Return whether ``name`` is an operator or an alias."""
    return name in _OPS or name in _ALIASES


def names(*, aliases: bool = True) -> Iterator[str]:
    """Yield all operator names, and the aliases unless ``aliases`` is False."""
    yield from _OPS
    if aliases:
        yield from _ALIASES


def parse_params(op: Op, attrs: Mapping[str, object], *, node: str = "") -> dict[str, Any]:
    """Return the parsed parameters of ``op`` from strings or Python values; keys of the form ``__x__`` are skipped.

    Raises:
        ParameterError: unknown key, missing required parameter, or text that does not parse.
    """
    where = f"operator {op.name}" + (f" ({node!r})" if node else "")
    known = {param.name: param for param in op.params}
    parsed: dict[str, Any] = {}
    for key, value in attrs.items():
        if key.startswith("__") and key.endswith("__"):
            continue
        param = known.get(key)
        if param is None:
            hint = did_you_mean(key, known)
            raise ParameterError(f"{where}: unknown parameter {key!r}; {hint}known: {', '.join(known) or 'none'}")
        try:
            parsed[key] = param.parse(value)
        except (ValueError, TypeError, SyntaxError) as error:
            raise ParameterError(f"{where}: parameter {key}={value!r}: {error}") from None
    for param in op.params:
        if param.name not in parsed:
            if param.default is REQUIRED:
                raise ParameterError(f"{where}: required parameter {param.name!r} is missing")
            parsed[param.name] = param.default
    return parsed
