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
from weftplan.ops.core.registry import by_position, call_order, order_advice
from weftplan.ops.core.schema import Op

EXTRA = ("out", "name")
"""Arguments that every array operator accepts after its parameters."""


def understood(
    op: Op, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[Any], dict[str, Any], Any, Context | None, bool]:
    """Parse the arguments of ``nd.<name>`` into inputs, parameters, ``out``, ``ctx`` and ``is_train``.

    Positional arguments follow MXNet's order: inputs, parameters, ``out``, ``name`` (ignored). An operator with any
    number of inputs has only inputs by position, or a list of them. Every operator accepts ``ctx`` and ``is_train``.
    """
    inputs, ordered = by_position(op, args, kwargs, EXTRA)
    named = {**kwargs, **ordered}
    out = named.pop("out", None)
    named.pop("name", None)
    is_train = bool(named.pop("is_train", False))
    declared = [param.name for param in op.params]
    ctx = None if "ctx" in declared else named.pop("ctx", None)
    for position, value in enumerate(inputs):
        if not isinstance(value, NDArray) and (value is not None or op.any_number):
            names = call_order(op)[0]
            advice = "make one with mx.nd.array" if hasattr(value, "shape") or type(value) is list else order_advice(op)
            raise DTypeError(
                f"{op.name}: input {names[position] if names else position} must be an NDArray, "
                f"got {type(value).__name__}; {advice}"
            )
    if any(value is None for value in inputs):  # inputs left out
        present = {name: value for name, value in zip(call_order(op)[0], inputs, strict=False) if value is not None}
        inputs, named = [], {**present, **named}
    named_inputs = {key: value for key, value in named.items() if isinstance(value, NDArray) and key not in declared}
    named = {
        key: value for key, value in named.items() if key not in named_inputs and (value is not None or key in declared)
    }
    if named_inputs:
        inputs = _named_inputs(op, inputs, named_inputs, named)
    return list(inputs), named, out, _as_context(op, named.get("ctx", ctx)), is_train


def _named_inputs(
    op: Op, inputs: Sequence[NDArray], named: dict[str, NDArray], params: Mapping[str, object]
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
