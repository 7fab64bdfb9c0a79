"""Optimizer steps from their formulas: the operator of a step, and the one that steps a float32 copy of the weight.

The output of a step is the new weight, which may reuse the old weight's memory. The optimizer's states are updated in
place. A multi-precision step has low-precision weights and gradients: it updates the copy, which is one more state, and
its output is the copy rounded to the weight's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from typing import TypeVar

import numpy as np

from weftplan.ops.core.declaration import check_kernel, check_names, inferred_dtypes, parsed_examples
from weftplan.ops.core.expression import Expr, FormulaError, Parameters, Scalar, cast
from weftplan.ops.core.formula_kernel import FormulaKernel
from weftplan.ops.core.params import p_bool, p_float, p_int
from weftplan.ops.core.registry import is_packaged, register
from weftplan.ops.core.rules import UNARY_INPLACE, floats_only, merge_dtype, merge_shape
from weftplan.ops.core.schema import Op, Param, Params

Rule = Callable[..., tuple[Expr, ...]]
"""``rule(p, weight, grad, *others)`` is the formula of a step; it returns the new weight and the new states."""
Fact = TypeVar("Fact")
Facts = Sequence[Fact | None]
"""Shapes or dtypes of arrays, as far as they are known."""
Inference = Callable[[Params, list[Fact | None], list[Fact | None]], tuple[Facts[Fact], Facts[Fact]]]
"""A shape or dtype rule."""
Merge = Callable[[Fact | None, Fact | None, str], Fact | None]
"""Merges what is known about two arrays, or raises an error that begins with the last argument."""
WIDE = np.dtype(np.float32)
COPY = "weight32"
"""Name of the float32 copy of a low-precision weight."""

# -------------------------------------------------------------------------------------------------- common parameters

LR = Param("lr", p_float, doc="learning rate")
MOMENTUM = Param("momentum", p_float, 0.0, "factor of the velocity")
T = Param("t", p_int, doc="number of this update, counted from 1")
ADAM = (
    Param("beta1", p_float, 0.9, "decay of the mean"),
    Param("beta2", p_float, 0.999, "decay of the mean of squares"),
    Param("epsilon", p_float, 1e-8, "added to the root of var"),
)
COMMON = (
    Param("wd", p_float, 0.0, "weight decay: times the weight, added to the gradient"),
    Param("rescale_grad", p_float, 1.0, "factor of the gradient"),
    Param("clip_gradient", p_float, -1.0, "limit of the rescaled gradient's absolute values; negative: none"),
    Param("lazy_update", p_bool, True, "accepted; all gradients are dense"),
)
_CHOICES: Mapping[str, tuple[str, Callable[[Params], bool]]] = {
    "clip_gradient": ("clips", lambda p: p["clip_gradient"] >= 0),
    "clip_grad": ("clips", lambda p: p["clip_grad"] >= 0),
    "clip_weights": ("limits", lambda p: p["clip_weights"] >= 0),
    # The host never reads the value of an array.
    "wd": ("decays", lambda p: not isinstance(p["wd"], float) or p["wd"] != 0.0),
    "bias_correction": ("corrects", lambda p: p["bias_correction"]),
    "lower_bound": ("has_lower", lambda p: p["lower_bound"] >= 0),
    "upper_bound": ("has_upper", lambda p: p["upper_bound"] >= 0),
}
"""For each parameter on which a formula may branch: the name of the choice, and its value."""

# -------------------------------------------------------------------------------------------------- parts of formulas


def rescaled(p: Parameters, gradient: Expr, decayed: Expr | None = None) -> Expr:
    """Return the formula gradient · rescale_grad + decayed, clipped; None for ``decayed``: 0."""
    gradient = gradient * p.rescale_grad
    if decayed is not None:
        gradient = gradient + decayed
    return gradient.clip(-p.clip_gradient, p.clip_gradient) if p.clips else gradient


def rounded(value: object) -> Scalar:
    """Return a parameter rounded to float32, as a part of a formula."""
    return Scalar.call(lambda number: float(np.float32(number)), value)


def average(old: Expr, rate: object, news: Expr) -> Expr:
    """Return the formula rate · old + (1 - rate) · news, with the rate rounded to float32."""
    share = rounded(rate)
    mean: Expr = old * share + news * (1.0 - share)
    return mean


# -------------------------------------------------------------------------------------------------------- declaration


def _sharing(
    name: str, arrays: Sequence[str], merge: Merge[Fact], fixed: Collection[str], value: Fact
) -> Inference[Fact]:
    """Return a rule of operator ``name``: ``value`` for the ``arrays`` in ``fixed``; all other arrays share one."""

    def infer(params: Params, ins: Facts[Fact], outs: Facts[Fact]) -> tuple[Facts[Fact], Facts[Fact]]:
        facts, shared = dict(zip(arrays, (*ins, *outs), strict=True)), None
        for array, fact in facts.items():
            if array not in fixed:
                shared = merge(shared, fact, f"{name}: weight and {array}")
        new = [
            merge(value, fact, f"{name}: {array}, expected {value}") if array in fixed else shared
            for array, fact in facts.items()
        ]
        return new[:-1], new[-1:]

    return infer


def _on_copy(rule: Rule, copy: int, *, is_direction: bool) -> Rule:
    """Return the formula of a step on the copy, which is operand ``copy`` after the gradient, with a cast gradient."""

    def mixed(p: Parameters, weight: Expr, gradient: Expr, *others: Expr) -> tuple[Expr, ...]:
        results = rule(p, others[copy], cast(gradient, WIDE), *others[:copy], *others[copy + 1 :])
        return results if is_direction else (*results, results[0])

    return mixed


def _check(op: Op, kernel: FormulaKernel) -> None:
    """Trace and compute a step with every choice, so that a wrong formula is an error when the step is declared."""
    what = f"step {op.name!r}"
    check_names(what, op)
    values = {one.name: (0, 1) if one.parse is p_bool else (-1, 0, 1) for one in op.params if one.name in _CHOICES}
    examples = [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]
    for params, inputs, output in inferred_dtypes(what, op, parsed_examples(what, op, examples)):
        check_kernel(what, kernel, params, inputs, [output])


def step(
    name: str,
    rule: Rule,
    others: tuple[str, ...],
    params: tuple[Param, ...],
    doc: str,
    *,
    gradient: str = "grad",
    numbers: tuple[str, ...] = (),
    single: tuple[str, ...] = (),
    on_copy: Rule | None = None,
    is_direction: bool = False,
    in_mxnet: bool = True,
) -> None:
    """Register the operator of a step, and the multi-precision operator ``mp_<name>`` if the step has a copy.

    All arrays share one float dtype. In the multi-precision operator only weight, gradient and new weight do; states,
    copy and numbers are float32.

    Args:
        rule: see :data:`Rule`; the copy is not among its operands, but replaces the weight.
        others: names of the inputs after the gradient: states, numbers, and :data:`COPY` after all states.
        gradient: name of the gradient; by another name it is a direction, which is float32 if there is a copy.
        numbers: names of the inputs that are arrays of one number.
        single: names of the inputs that are float32 even without a copy.
        on_copy: the formula of the multi-precision operator, if it is another.
        is_direction: whether the first result is no weight but a direction, which is float32 if there is a copy.
        in_mxnet: whether MXNet 1.9.1 has these operators.

    Raises:
        FormulaError: the formula has an unknown function or parameter, branches on an array, or does not return the new
            weight and each state; the message has the name of the step, and no operator is registered.
        ParameterError: a name is registered already; no operator is registered.
    """
    ops: list[Op] = []
    if (
        len({"weight", gradient, *others, "output"}) < len(others) + 3
        or not {*numbers, *single} <= {*others}
        or (COPY in others and not {*others[others.index(COPY) + 1 :]} <= {*numbers})
        or (on_copy is not None and COPY not in others)
    ):
        raise FormulaError(
            f"step {name!r}: inputs weight, {gradient}, {', '.join(others)}, numbers={numbers}, single={single}: "
            f"expected different names, {COPY} after all states, and a copy if there is a formula on it"
        )
    choices = dict(_CHOICES[param.name] for param in params if param.name in _CHOICES)
    for mixed in (False, True) if COPY in others else (False,):
        own, kernel_rule, base, wide = name, rule, None, {*single}
        inputs = ("weight", gradient, *[other for other in others if mixed or other != COPY])
        arrays = (*inputs, "output")
        unchanged = {"weight", gradient, *numbers, *([COPY] if is_direction else [])}
        states = tuple(k for k, array in enumerate(inputs) if array not in unchanged)
        if mixed:
            own = f"_mp{name}" if name.startswith("_") else f"mp_{name}"
            base = inputs.index(COPY)
            kernel_rule = _on_copy(on_copy or rule, base - 2, is_direction=is_direction)
            wide = {*arrays} - {"weight", "grad", *([] if is_direction else ["output"])}
            doc = f"{name} on a float32 copy of the weight{'; the direction is float32' if is_direction else ''}."
        kernel = FormulaKernel(
            kernel_rule, len(inputs), states=states, overlaps=() if mixed else (0,), choices=choices,
            numbers=[inputs.index(number) for number in numbers], base=base,
        )  # fmt: skip
        op = Op(
            name=own,
            forward=kernel,
            infer_shape=_sharing(own, arrays, merge_shape, numbers, (1,)),
            infer_dtype=floats_only(own, _sharing(own, arrays, merge_dtype, wide, WIDE)),
            params=params,
            inputs=inputs,
            aux=states,
            inplace=() if mixed and is_direction else UNARY_INPLACE,
            ignored_inputs=(0,) if mixed else (),
            in_mxnet=in_mxnet,
            doc=doc,
        )
        if not is_packaged(own):  # tests compute the package's own
            _check(op, kernel)
        ops.append(op)
    register(*ops)
