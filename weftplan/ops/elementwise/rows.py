"""Rows: an elementwise operator of one array as its formula, its gradient and its documentation.

From a row follow the operator and its backward operator: kernels for every dtype, scratch, in-place pairs, the forward
values that the gradient keeps alive, membership in fused kernels, and the compiled and CUDA forms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from weftplan.ops.core.declaration import (
    CHECKED,
    check_gradient_rule,
    check_kernel,
    check_names,
    inferred_dtypes,
    named,
    parsed_examples,
)
from weftplan.ops.core.expression import Expr, FormulaError, Kind, Parameters, f, leaves
from weftplan.ops.core.formula_kernel import Choices, Formula, FormulaKernel, Integers
from weftplan.ops.core.registry import is_packaged, register
from weftplan.ops.core.rules import UNARY_INPLACE, backward, same_dtype, same_shape, zero_gradient
from weftplan.ops.core.rules import grad as grad_rule
from weftplan.ops.core.schema import DTypeRule, GradientRule, InplacePair, Op, Param, Params

ONNX: dict[str, str] = {}
"""ONNX's name of each elementwise operator that ONNX has with the same meaning, without attributes."""
_READ = {"x": ("x0", "data"), "y": ("y0", "output")}


def row(
    name: str,
    formula: str | Callable[..., object],
    grad: Callable[..., object] | None = None,
    *,
    gradient: GradientRule = zero_gradient,
    params: tuple[Param, ...] = (),
    choices: Choices | None = None,
    examples: Sequence[Params] = ({},),
    compute: Kind = None,
    grad_compute: Kind = None,
    integer: Callable[..., object] | None = None,
    integers: Integers = "slope",
    infer_dtype: DTypeRule = same_dtype,
    aliases: tuple[str, ...] = (),
    in_mxnet: bool = True,
    onnx: str = "",
    doc: str,
    collect: list[Op] | None = None,
) -> Op:
    """Register an elementwise operator of one array, and its backward operator if it has ``grad``; return it.

    Args:
        formula: the name of a function, or a function of the array; with ``params``, of (parameters, array).
        grad: the gradient, a function of (g, x, y): output gradient, array, output; with ``params``, these come first.
            The backward node keeps alive what the gradient reads.
        gradient: the gradient rule if there is no ``grad``.
        choices: see :data:`~weftplan.ops.core.formula_kernel.Choices`.
        examples: parameters of the checks, if the defaults do not do; each choice needs two values.
        compute, grad_compute: kinds of the results that do not state their own.
        integer: the formula for integers, if it is another.
        integers: how the gradient treats integers.
        onnx: ONNX's name of the operator.
        collect: a list that gets the operators, which its owner registers; None: they are registered.

    Raises:
        FormulaError: a formula has an unknown function, the gradient reads another value than g, x and y, or the dtype
            rule contradicts a formula; the message has the name of the row, and nothing is registered.
        ParameterError: a name is registered already.

    >>> from weftplan.ops.core import registry
    >>> row("cubed", lambda x: x * x * x, lambda g, x, y: g / x).name
    Traceback (most recent call last):
    TypeError: row() missing 1 required keyword-only argument: 'doc'
    """
    what = f"row {name!r}"
    if (
        integers not in get_args(Integers)
        or not all(isinstance(kind, np.dtype) or kind in (None, "float", "real") for kind in (compute, grad_compute))
        or (grad is not None and gradient is not zero_gradient)
    ):
        raise FormulaError(
            f"{what}: integers={integers!r}, compute={compute!r}, grad_compute={grad_compute!r}: expected one of "
            f"{get_args(Integers)}; None, 'float', 'real' or a numpy.dtype; and either grad or gradient"
        )
    arrays = (*["p"] * bool(params), "x")
    kernel = FormulaKernel(_function(what, formula, arrays), compute=compute, choices=choices,
                           integer=None if integer is None else _function(what, integer, arrays))  # fmt: skip
    op = Op(
        name=name,
        forward=kernel,
        infer_shape=same_shape,
        infer_dtype=infer_dtype,
        params=params,
        gradient=gradient,
        inplace=UNARY_INPLACE,
        aliases=aliases,
        in_mxnet=in_mxnet,
        doc=doc,
    )
    computes = not is_packaged(name)
    check_names(what, op)
    values = parsed_examples(what, op, examples)
    for key, choose in (choices or {}).items():
        with named(what, f"choice {key!r}"):
            if len({choose(example) for example in values}) == 1:
                raise FormulaError("all examples have the same value: add an example that has another")
    cases = inferred_dtypes(what, op, values)
    for example, inputs, output in cases:
        check_kernel(what, kernel, example, inputs, [output], computes=computes)
    ops = [op]
    if grad is None:
        for example in values if computes else ():
            check_gradient_rule(what, op, example)
    else:
        reverse, read = _gradient(what, grad, params, values, choices, grad_compute, integers)
        for example, (dtype,), output in cases:
            reads = [dtype if letter == "x" else output for letter in read]
            check_kernel(f"{what}, gradient", reverse, example, [output, *reads], [dtype], computes=computes)
        rule = grad_rule(f"_backward_{name.lstrip('_')}", "g0", *(_READ[letter][0] for letter in read))
        ops = [
            replace(op, gradient=rule),
            backward(
                name,
                reverse,
                ("ograd", *(_READ[letter][1] for letter in read)),
                params=params,
                inplace=tuple(InplacePair(k, 0) for k in range(1 + len(read))),
                registers=False,
            ),
        ]
    if collect is None:
        register(*ops)
    else:
        collect += ops
    if onnx:
        ONNX[name] = onnx
    return ops[0]


def _function(what: str, formula: str | Callable[..., object], arguments: Sequence[str]) -> Formula:
    """Return a formula as a function of parameters and arrays; ``arguments`` are the names of its arguments."""
    with named(what):
        if isinstance(formula, str):
            function = getattr(f, formula)
            return lambda p, *arrays: function(*arrays)
        try:
            inspect.signature(formula).bind(*arguments)
        except (TypeError, ValueError) as error:
            expected = f"the name of a function, or a function of {len(arguments)} values: {', '.join(arguments)}"
            raise FormulaError(f"{error}: expected {expected}; no other is kept") from None
    return formula if arguments[0] == "p" else lambda p, *arrays: formula(*arrays)


def _gradient(
    what: str, gradient: Callable[..., object], params: tuple[Param, ...], values: Sequence[Params],
    choices: Choices | None, compute: Kind, integers: Integers,
) -> tuple[FormulaKernel, list[str]]:  # fmt: skip
    """Return the kernel of a gradient, and which of x and y it reads with any of these parameters."""
    formula = _function(f"{what}, gradient", gradient, (*["p"] * bool(params), "g", "x", "y"))
    used: set[str] = set()
    with named(what, "gradient"):
        for example in values:
            chosen = {key: choose(example) for key, choose in (choices or {}).items()}
            for dtype in CHECKED:
                used |= leaves([formula(Parameters(chosen, dtype), *(Expr("input", letter) for letter in "gxy"))])
    read = [letter for letter in "xy" if letter in used]

    def on_read(p: Parameters, g: object, *arrays: object) -> object:
        by_letter = dict(zip(read, arrays, strict=True))
        return formula(p, g, by_letter.get("x"), by_letter.get("y"))

    return FormulaKernel(on_read, 1 + len(read), compute=compute, choices=choices, integers=integers), read
