"""Derivation of operators from others: a new name, other parameters or other rules.

A derived operator has the kernel, the gradient and the planner facts of its base. They read the base's parameters,
which ``translate`` computes from the derived operator's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weftplan.ops.core import registry
from weftplan.ops.core.forms import ChosenKernel
from weftplan.ops.core.schema import (
    DTypeRule,
    EntryRef,
    GradientBuilder,
    GradientRule,
    Op,
    Param,
    Params,
    ShapeRule,
)

Translate = Callable[[Params], Mapping[str, Any]]


def _translated_gradient(rule: GradientRule, translate: Translate) -> GradientRule:
    def gradient(builder: GradientBuilder) -> Sequence[EntryRef | None]:
        return rule(builder.showing(translate(builder.params)))

    return gradient


def derive(
    name: str,
    base: str,
    *,
    inputs: tuple[str, ...] | None = None,
    params: tuple[Param, ...] | None = None,
    translate: Translate | None = None,
    infer_shape: ShapeRule | None = None,
    infer_dtype: DTypeRule | None = None,
    aliases: tuple[str, ...] = (),
    doc: str = "",
) -> Op:
    """Register the operator ``name``: a copy of ``base`` with the fields passed here in place of its own.

    Args:
        params: parameters of the new operator; they need ``translate``.
        translate: computes the base's parameters from ``params``. The base's rules get the translated parameters, the
            rules passed here get ``params``.
    """
    op = registry.get(base)
    changed = replace(op, name=name, aliases=aliases, doc=doc or f"{op.doc} As {base}.")
    if inputs is not None:
        changed = replace(changed, inputs=inputs)
    if translate is not None:
        assert params is not None
        changed = _with_parameters(changed, params, translate)
    if infer_shape is not None:
        changed = replace(changed, infer_shape=infer_shape)
    if infer_dtype is not None:
        changed = replace(changed, infer_dtype=infer_dtype)
    return registry.register(changed)


def _with_parameters(op: Op, params: tuple[Param, ...], translate: Translate) -> Op:
    """Return ``op`` with ``params`` in place of its own; its functions get the translated parameters."""

    def translated(function: Callable[..., object]) -> Callable[..., object]:
        return lambda values, *arguments: function(translate(values), *arguments)

    changes: dict[str, Any] = {
        name: translated(value)
        for name in (
            "infer_shape",
            "infer_dtype",
            "inputs",
            "outputs",
            "visible_outputs",
            "inplace",
            "ignored_inputs",
            "workspace",
        )
        if callable(value := getattr(op, name))
    }
    gradient = None if op.gradient is None else _translated_gradient(op.gradient, translate)
    return replace(
        op,
        params=params,
        forward=ChosenKernel(lambda values: (op.forward, translate(values))),
        gradient=gradient,
        **changes,
    )
