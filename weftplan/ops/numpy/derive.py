"""Derivation of operators from others: a new name, other parameters or other rules.

Kernel, gradient and planner facts are those of the base, which sees its own parameters: ``translate`` makes them from
the derived operator's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import weftplan.ops.creation.filling
import weftplan.ops.detection
import weftplan.ops.elementwise.binary
import weftplan.ops.elementwise.clip
import weftplan.ops.elementwise.scalar
import weftplan.ops.elementwise.special
import weftplan.ops.elementwise.unary
import weftplan.ops.elementwise.where
import weftplan.ops.indexing.gather_nd
import weftplan.ops.indexing.take
import weftplan.ops.linalg.matrix
import weftplan.ops.nn
import weftplan.ops.reduction.argmax
import weftplan.ops.reduction.cumsum
import weftplan.ops.reduction.ordering
import weftplan.ops.reduction.reduce
import weftplan.ops.shape.broadcast
import weftplan.ops.shape.concat
import weftplan.ops.shape.reshape
import weftplan.ops.shape.shape_of
import weftplan.ops.shape.slicing
import weftplan.ops.shape.split_v2  # noqa: F401  (the families that operators are derived from)
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
    """Register ``name``: the operator ``base`` with the fields passed here in place of its own.

    Args:
        params: needs ``translate``. Rules passed here get these parameters, the base's own rules the translated
            parameters.
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
    """Return ``op`` declaring ``params``; each of its functions gets the translated parameters."""

    def first(function: Callable[..., object]) -> Callable[..., object]:
        return lambda values, *rest: function(translate(values), *rest)

    changes: dict[str, Any] = {
        name: first(value)
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
