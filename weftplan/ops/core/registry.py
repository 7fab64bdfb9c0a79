"""The operator registry: a process-wide dictionary of operators, which are imported by name.

This module owns the table of operators, and the parsing of positions and parameters for all kinds of calls. The module
of an operator is imported when the operator is first asked for (:mod:`weftplan.ops.core.operator_modules`), so a
program loads the families that its networks use. Any thread may look up operators.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weftplan.errors import ParameterError, UnknownOperatorError, did_you_mean
from weftplan.ops.core.operator_modules import ALIASES, OPERATORS
from weftplan.ops.core.schema import REQUIRED, Op
from weftplan.support.lazy_import import late_import

_MODULE_OF = {name: module for module, names in OPERATORS.items() for name in names.split()}
_MODULES = _MODULE_OF | {alias: module for module, names in ALIASES.items() for alias in names.split()}
"""The module of each operator of the package, by its name or alias."""
_OPS: dict[str, Op] = {}
_ALIASES: dict[str, Op] = {}
_PLANNERS: dict[str, Op] = {}


def register(*ops: Op) -> Op:
    """Add operators under their names and aliases, and return the first.

    Raises:
        ParameterError: a name is registered already, given twice, or no identifier; none of ``ops`` is added.
    """
    added: set[str] = set()
    for op in ops:
        for name in (op.name, *op.aliases):
            if not (isinstance(op.aliases, tuple) and isinstance(name, str) and name.isidentifier()):
                raise ParameterError(
                    f"operator {op.name!r} with aliases {op.aliases!r}: expected identifiers, the aliases in a tuple"
                )
            if name in _MODULES and f"weftplan.{_MODULES[name]}" not in sys.modules:
                _load(name)  # the package's own operator of this name comes first
            if name in _OPS or name in _ALIASES or name in added:
                what = f"operator {name!r}" if name == op.name else f"alias {name!r} of operator {op.name!r}"
                raise ParameterError(f"{what} is registered already")
            added.add(name)
    for op in ops:
        _OPS[op.name] = op
        for alias in op.aliases:
            # Aliases that end in _v1 are operators of their own in MXNet 1.9.1, which symbol files name.
            _ALIASES[alias] = replace(op, saved_as=alias) if alias.endswith("_v1") else op
    return ops[0]


def _load(name: str) -> bool:
    """Import the module of the operator with the name or alias ``name``; return False if the package has none."""
    module = _MODULES.get(name)
    if module is not None:
        late_import(f"weftplan.{module}")
    return module is not None


def is_packaged(name: str) -> bool:
    """Return whether ``name`` is the name of an operator of this package."""
    return name in _MODULE_OF


def get(name: str) -> Op:
    """Return the operator with the name or alias ``name``; import its module first if necessary.

    Raises:
        UnknownOperatorError: there is none; the message suggests similar names.
    """
    op = _OPS.get(name) or _ALIASES.get(name)
    if op is None and _load(name):
        op = _OPS.get(name) or _ALIASES.get(name)
    if op is None:
        # Users never call the gradients' operators by name.
        registered = [other for other in names() if not other.startswith("_backward")]
        near = difflib.get_close_matches(name, registered, n=3)
        hint = f"; did you mean {', '.join(map(repr, near))}?" if near else ""
        raise UnknownOperatorError(f"unknown operator {name!r}{hint}")
    return op


def register_planner_op(op: Op) -> Op:
    """Add an operator that only the planner uses and only :func:`find` returns; return ``op``.

    Raises:
        ParameterError: the name is registered already.
    """
    if find(op.name) is not None:
        raise ParameterError(f"operator {op.name!r} is registered already")
    _PLANNERS[op.name] = op
    return op


def find(name: str) -> Op | None:
    """Return the operator whose own name is ``name``, the planner's included; None if there is none."""
    if name not in _OPS and name in _MODULE_OF:
        _load(name)
    return _OPS.get(name) or _PLANNERS.get(name)


ANY = "*"
_makers: dict[str, Callable[[Mapping[str, Any]], Op]] = {}
"""Functions that build the operator of a single node (``Op.single``) from its attributes, by the operator's name."""


def register_maker(name: str, make: Callable[[Mapping[str, object]], Op]) -> None:
    """Register ``make`` as the function that builds the operator of each node whose operator is called ``name``."""
    _makers[name] = make


def resolve(name: str, attrs: Mapping[str, object]) -> Op:
    """Return the operator of a node, by :func:`get`, or built from its attributes by a registered maker.

    The maker registered as :data:`ANY` builds operators for names that are not registered.
    """
    make = _makers.get(name)
    if make is None and not contains(name) and ANY in _makers:
        return _makers[ANY]({**attrs, "op_type": name})
    return get(name) if make is None else make(attrs)


def contains(name: str) -> bool:
    """Return whether ``name`` is the name or alias of an operator, other than the planner's."""
    return name in _OPS or name in _ALIASES or name in _MODULES


def names(*, aliases: bool = True) -> Iterator[str]:
    """Yield the names of all operators other than the planner's, and their aliases unless ``aliases`` is False."""
    yield from dict.fromkeys((*_MODULES, *_OPS, *_ALIASES) if aliases else (*_MODULE_OF, *_OPS))


def parse_params(op: Op, attrs: Mapping[str, object], *, node: str = "") -> dict[str, Any]:
    """Return all parameters of ``op``, parsed from the texts or Python values in ``attrs``, or their defaults.

    Keys of the form ``__x__`` are skipped, and unknown keys of a lenient operator. ``node``: name of the node for error
    messages.

    Raises:
        ParameterError: unknown key, missing required parameter, or value that does not parse.
    """
    context = f"operator {op.name}" + (f" ({node!r})" if node else "")
    declared = {param.name: param for param in op.params}
    parsed: dict[str, Any] = {}
    for key, value in attrs.items():
        if key.startswith("__") and key.endswith("__"):
            continue
        param = declared.get(key)
        if param is None and op.lenient:
            continue
        if param is None:
            hint = did_you_mean(key, declared)
            raise ParameterError(f"{context}: unknown parameter {key!r}; {hint}known: {', '.join(declared) or 'none'}")
        try:
            parsed[key] = param.parse(value)
        except (ValueError, TypeError, SyntaxError) as error:
            raise ParameterError(f"{context}: parameter {key}={value!r}: {error}") from None
    for param in op.params:
        if param.name not in parsed:
            if param.default is REQUIRED:
                raise ParameterError(f"{context}: required parameter {param.name!r} is missing")
            parsed[param.name] = param.default
    return parsed


def usual_inputs(op: Op) -> tuple[str, ...] | None:
    """Return the names of an operator's inputs with default parameters; None if their number is not fixed."""
    if op.variadic is not None:
        return None
    if isinstance(op.inputs, tuple):
        return op.inputs
    defaults = {param.name: None if param.default is REQUIRED else param.default for param in op.params}
    try:
        return op.inputs(defaults)
    except (TypeError, ValueError, KeyError):
        return None


def call_order(op: Op) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the inputs and the parameters that a call may give by position, in MXNet's order.

    >>> call_order(get("LeakyReLU"))
    (('data', 'gamma'), ('act_type', 'slope', 'lower_bound', 'upper_bound'))
    """
    if op.any_number:
        return (), ()
    inputs = op.positions if op.positions is not None else usual_inputs(op) or ()
    return inputs, tuple(param.name for param in op.params if not param.by_name)


def by_position(
    op: Op, args: Sequence[Any], named: Mapping[str, object], extra: Sequence[str]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the inputs among the positional arguments ``args`` of a call, and the others by their names.

    Args:
        named: the arguments that are given by name.
        extra: keywords of every operator that may also follow by position.

    Raises:
        ParameterError: too many arguments, or one that is also given by name.
    """
    if op.any_number:
        return [*args[0], *args[1:]] if args and isinstance(args[0], list | tuple) else args, {}
    inputs, params = call_order(op)
    values = args[len(inputs) :]
    if not values:
        return args, {}
    order = (*params, *extra)
    if len(values) > len(order):
        raise ParameterError(
            f"operator {op.name}: {len(args)} arguments by position, it takes {len(inputs) + len(order)} at most: "
            f"{', '.join((*inputs, *order))}"
        )
    for name in order[: len(values)]:
        if name in named:
            raise ParameterError(f"operator {op.name}: parameter {name!r} is given twice, by position and by name")
    return args[: len(inputs)], dict(zip(order, values, strict=False))


def order_advice(op: Op) -> str:
    """Return the advice for an argument at a wrong position: the order of the arguments."""
    if op.any_number:
        return "inputs are given by position, parameters by name"
    inputs, params = call_order(op)
    return f"the order by position is {', '.join((*inputs, *params))}"
