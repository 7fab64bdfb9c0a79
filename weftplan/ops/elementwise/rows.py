"""Rows: an elementwise operator of one array as its formula, its gradient and its documentation.

From a row follow the operator and its backward operator: kernels for every dtype, scratch, in-place pairs, the forward
values that the gradient keeps alive, membership in fused kernels, and the compiled and CUDA forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import cast, get_args

import numpy as np

from weftplan.errors import DTypeError
from weftplan.ops.core.expression import Expr, FormulaError, Kind, Parameters, Scalar, dtype_of, f, leaves
from weftplan.ops.core.formula_kernel import Choices, Formula, FormulaKernel, Integers
from weftplan.ops.core.registry import is_packaged, register
from weftplan.ops.core.rules import UNARY_INPLACE, backward, same_dtype, same_shape, zero_gradient
from weftplan.ops.core.rules import grad as grad_rule
from weftplan.ops.core.schema import (
    REQUIRED,
    DTypeRule,
    GradientRule,
    InplacePair,
    Op,
    OpContext,
    Param,
    Params,
    TensorSpec,
)

ONNX: dict[str, str] = {}
"""ONNX's name of each elementwise operator that ONNX has with the same meaning, without attributes."""
_READ = {"x": ("x0", "data"), "y": ("y0", "output")}
_CHECKED = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int32))


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
) -> Op:
    """Register an elementwise operator of one array, and its backward operator if it has ``grad``; return it.

    Args:
        formula: the name of a function, or a function of the array; with ``params``, of (parameters, array).
        grad: the gradient, a function of (g, x, y): output gradient, array, output; with ``params``, these come first.
            The backward node keeps alive what the gradient reads.
        gradient: the gradient rule if there is no ``grad``.
        choices: see :data:`~weftplan.ops.core.formula_kernel.Choices`.
        examples: parameters for which the formulas are checked, other than defaults.
        compute, grad_compute: kinds of the results that do not state their own.
        integer: the formula for integers, if it is another.
        integers: how the gradient treats integers.
        onnx: ONNX's name of the operator.

    Raises:
        FormulaError: a formula has an unknown function, the gradient reads another value than g, x and y, or the dtype
            rule contradicts a formula; the message has the name of the row.

    >>> from weftplan.ops.core import registry
    >>> row("cubed", lambda x: x * x * x, lambda g, x, y: g / x).name
    Traceback (most recent call last):
    TypeError: row() missing 1 required keyword-only argument: 'doc'
    """
    if integers not in get_args(Integers) or not all(
        kind in ("float", "real") for kind in (compute, grad_compute) if isinstance(kind, str)
    ):
        raise FormulaError(f"row {name!r}: integers={integers!r}, compute={compute!r}, grad_compute={grad_compute!r}: "
                           f"expected one of {get_args(Integers)}, and 'float' or 'real'")  # fmt: skip
    kernel = FormulaKernel(_with_parameters(name, formula, 1, params), compute=compute, choices=choices,
                           integer=None if integer is None else _with_parameters(name, integer, 1, params))  # fmt: skip
    defaults = {param.name: 1.0 if param.default is REQUIRED else param.default for param in params}
    values = [{**defaults, **example} for example in examples]
    _check(name, kernel, values, infer_dtype, ("x",))
    if grad is not None:
        reverse, read = _gradient(name, grad, params, values, choices, grad_compute, integers)
        _check(name, reverse, values, infer_dtype, ("g", *read))
        gradient = grad_rule(f"_backward_{name.lstrip('_')}", "g0", *(_READ[letter][0] for letter in read))
    op = register(
        Op(
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
    )
    if grad is not None:
        backward(
            name,
            reverse,
            ("ograd", *(_READ[letter][1] for letter in read)),
            params=params,
            inplace=tuple(InplacePair(k, 0) for k in range(1 + len(read))),
        )
    if onnx:
        ONNX[name] = onnx
    return op


@contextmanager
def _named(name: str, part: object = "") -> Iterator[None]:
    """A context that turns an error into a FormulaError whose message begins with a row's name and ``part``."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, FormulaError) else f"{type(error).__name__}: "
        raise FormulaError(f"row {name!r}{f', {part}' if part else ''}: {kind}{error}") from error


def _with_parameters(name: str, formula: str | Callable[..., object], count: int, params: tuple[Param, ...]) -> Formula:
    """Return ``formula`` as a function of parameters and arrays."""
    if isinstance(formula, str):
        with _named(name):
            function = getattr(f, formula)
        return lambda p, *arrays: function(*arrays)
    expected = count + bool(params)
    reads = cast(FunctionType, formula).__code__.co_argcount
    if reads != expected:
        names = [*["p"] * bool(params), *(("x",) if count == 1 else ("g", "x", "y"))]
        raise FormulaError(
            f"row {name!r}: a formula reads {reads} values, expected {expected}: {', '.join(names)}; no other is kept"
        )
    return formula if params else lambda p, *arrays: formula(*arrays)


def _gradient(
    name: str, gradient: Callable[..., object], params: tuple[Param, ...], values: Sequence[Params],
    choices: Choices | None, compute: Kind, integers: Integers,
) -> tuple[FormulaKernel, list[str]]:  # fmt: skip
    """Return the kernel of a gradient, and which of x and y it reads."""
    formula = _with_parameters(name, gradient, 3, params)
    with _named(name, "gradient"):
        chosen = {key: choose(values[0]) for key, choose in (choices or {}).items()}
        used = leaves([formula(Parameters(chosen, _CHECKED[0]), *(Expr("input", letter) for letter in "gxy"))])
    read = [letter for letter in "xy" if letter in used]

    def on_read(p: Parameters, g: object, *arrays: object) -> object:
        by_letter = dict(zip(read, arrays, strict=True))
        return formula(p, g, by_letter.get("x"), by_letter.get("y"))

    return FormulaKernel(on_read, 1 + len(read), compute=compute, choices=choices, integers=integers), read


def _check(
    name: str, kernel: FormulaKernel, examples: Sequence[Params], infer_dtype: DTypeRule, inputs: tuple[str, ...]
) -> None:
    """Raise FormulaError, with the row's name, unless a kernel can be traced for a few dtypes.

    A row that the package does not have, whose tests run the others, is also computed on one element.
    """
    for values, dtype in [(example, dtype) for example in examples for dtype in _CHECKED]:
        try:
            _, (expected,) = infer_dtype(values, [dtype], [None])
        except DTypeError:
            if kernel.integer is not None:
                raise FormulaError(
                    f"row {name!r}: it has a formula for integers, but its dtype rule refuses {dtype}"
                ) from None
            continue
        with _named(name, dtype):
            results = kernel.expressions(values, dtype, [Expr("input", letter) for letter in inputs])
            if len(results) != 1 or not isinstance(results[0], (Expr, Scalar, int, float)):
                raise FormulaError(f"it returns {results}, expected one expression or number")
            kind = results[0].kind if isinstance(results[0], Expr) else "default"
            if kind != "default" and dtype_of(kind, dtype) != expected:
                raise FormulaError(f"its result is {dtype_of(kind, dtype)}, but its dtype rule says {expected}")
            if not is_packaged(name):
                assert expected is not None
                specs, target = [TensorSpec((1,), dtype)] * len(inputs), TensorSpec((1,), expected)
                scratch = np.empty(kernel.workspace(values, specs, [target]), np.uint8)
                arrays, out = [np.ones(*spec) for spec in specs], np.ones(*target)
                with np.errstate(all="ignore"):
                    kernel(OpContext(np, workspace=scratch), values, arrays, [out])
