"""Argument parsing of ``nd.<Operator>(...)``: inputs, parameters, ``out``, ``ctx``, ``is_train``.

This module keeps no state; any thread may call it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from weftplan.device.context import Context
from weftplan.errors import DeviceError, DTypeError, ParameterError
from weftplan.ndarray.array import NDArray
from weftplan.ops.core import registry
from weftplan.ops.core.schema import Op


def understood(
    op: Op, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[Any], dict[str, Any], Any, Context | None, bool]:
    """Parse the arguments of ``nd.<name>`` into inputs, parameters, ``out``, ``ctx`` and ``is_train``.

    Leading arrays are the inputs (a list of arrays counts as its elements if the operator is variadic). Parameters
    follow in the operator's declared order; inputs may also be given by name. ``out``, ``ctx``, ``is_train`` and
    ``name`` (ignored) are accepted for every operator.
    """
    named = dict(kwargs)
    out = named.pop("out", None)
    named.pop("name", None)
    is_train = bool(named.pop("is_train", False))
    declared = [param.name for param in op.params]
    ctx = None if "ctx" in declared else named.pop("ctx", None)
    inputs: list[Any] = []
    remaining = list(args)
    if op.variadic is not None and len(remaining) >= 1 and isinstance(remaining[0], list | tuple):
        remaining[:1] = list(remaining[0])
    while remaining and isinstance(remaining[0], NDArray):
        inputs.append(remaining.pop(0))
    optional = callable(op.inputs) and op.variadic is None
    while optional and remaining and remaining[0] is None:  # an optional input left out
        remaining.pop(0)
    if remaining and remaining[0] is not None and not isinstance(remaining[0], str):
        # Text and None may be meant for a parameter; missing inputs are reported later.
        names = () if callable(op.inputs) else op.inputs
        missing = names[len(inputs) :] if not any(name in named for name in names) else ()
        if missing:
            raise DTypeError(
                f"{op.name}: input {missing[0]} must be an NDArray, got {type(remaining[0]).__name__}; make one with "
                f"mx.nd.array"
            )
    for parameter in declared:
        if not remaining:
            break
        if parameter not in named and parameter != op.variadic:
            named[parameter] = remaining.pop(0)
    if remaining:
        raise ParameterError(f"{op.name}: {len(remaining)} positional arguments too many: {remaining!r}")
    named_inputs = {key: value for key, value in named.items() if isinstance(value, NDArray) and key not in declared}
    named = {
        key: value for key, value in named.items() if key not in named_inputs and (value is not None or key in declared)
    }
    if named_inputs:
        inputs = _named_inputs(op, inputs, named_inputs, named)
    return inputs, named, out, _as_context(op, named.get("ctx", ctx)), is_train


def _named_inputs(
    op: Op, inputs: list[NDArray], named: dict[str, NDArray], params: Mapping[str, object]
) -> list[NDArray]:
    """Return positional inputs followed by the named inputs, in the operator's order."""
    filled = dict(params)
    if op.variadic is not None:
        filled.setdefault(op.variadic, len(inputs) + len(named))
    names = op.input_names(registry.parse_params(op, filled))
    placed = dict(zip(names, inputs, strict=False))
    for key, array in named.items():
        if key not in names or key in placed:
            raise ParameterError(f"{op.name}: unknown or repeated input {key!r}; the inputs are {', '.join(names)}")
        placed[key] = array
    missing = [name for name in names if name not in placed]
    if missing:
        raise ParameterError(f"{op.name}: missing inputs {', '.join(missing)}")
    return [placed[name] for name in names]


def _as_context(op: Op, ctx: object) -> Context | None:
    """Return ``ctx``, given as a context or as text such as ``cpu(1)``; None for None and empty text."""
    if ctx is None or isinstance(ctx, Context):
        return ctx
    match = re.fullmatch(r"([a-z_]+)(?:\((\d+)\))?|", ctx.strip()) if isinstance(ctx, str) else None
    if match is None:
        raise DeviceError(f"{op.name}: ctx must be a context such as mx.cpu(0) or its text, got {ctx!r}")
    return Context(match[1], int(match[2] or 0)) if match[1] else None
