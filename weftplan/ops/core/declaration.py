"""Checks of operators that are declared by formulas: an error names what was declared, before anything is registered.

The tests of the package compute its own operators, so an import only traces their formulas, or skips the check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from weftplan.errors import DTypeError
from weftplan.ops.core.expression import Expr, FormulaError, Scalar, dtype_of, operations
from weftplan.ops.core.formula_kernel import FormulaKernel
from weftplan.ops.core.registry import get, parse_params
from weftplan.ops.core.schema import REQUIRED, DType, Op, OpContext, Params, TensorSpec

CHECKED = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int32))
"""Dtypes of the arrays in checks."""


@contextmanager
def named(what: str, part: object = "") -> Iterator[None]:
    """A context that turns an error into a FormulaError whose message begins with ``what`` was declared, and ``part``.

    >>> with named("row 'cubed'", "gradient"):
    ...     {}["x"]
    Traceback (most recent call last):
    weftplan.ops.core.expression.FormulaError: row 'cubed', gradient: KeyError: 'x'
    """
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, FormulaError) else f"{type(error).__name__}: "
        raise FormulaError(f"{what}{f', {part}' if part else ''}: {kind}{error}") from error


def check_names(what: str, op: Op) -> None:
    """Raise FormulaError unless an operator's arrays and parameters have different names, and defaults parse."""
    with named(what):
        names = [*op.input_names({}), *op.output_names({}), *(param.name for param in op.params)]
        if len({*names}) < len(names) or not all(name.isidentifier() for name in names):
            raise FormulaError(f"its arrays and parameters are {', '.join(names)}: expected different identifiers")
    for name, default, parse in [(param.name, param.default, param.parse) for param in op.params]:
        with named(what, f"default of {name}"):
            if default is not REQUIRED and default is not None and parse(default) != default:
                raise FormulaError(f"{default!r} is not the value that its parser returns, {parse(default)!r}")


def parsed_examples(what: str, op: Op, examples: Sequence[Params]) -> list[Params]:
    """Return complete parameters for each of ``examples``; 1 for a required parameter that an example lacks."""
    required = {param.name: 1.0 for param in op.params if param.default is REQUIRED}
    with named(what, "examples"):
        return [parse_params(op, {**required, **example}) for example in examples or ({},)]


def inferred_dtypes(what: str, op: Op, examples: Sequence[Params]) -> list[tuple[Params, list[DType], DType]]:
    """Return parameters with the dtypes of inputs and of the output, if the first input has a dtype in :data:`CHECKED`.

    Raises:
        FormulaError: the dtype rule fails, refuses all of these dtypes, or integers in spite of a formula for them.
    """
    cases = []
    for params in examples:
        others = [None] * (len(op.input_names(params)) - 1)
        for dtype in CHECKED:
            with named(what, f"dtype rule for {dtype}"):
                try:
                    inputs, (output,) = op.infer_dtype(params, [dtype, *others], [None])
                except DTypeError:
                    if dtype.kind == "i" and getattr(op.forward, "integer", None) is not None:
                        raise FormulaError("there is a formula for integers, which the rule refuses") from None
                    continue
                dtypes = [each for each in inputs if each is not None]
                if output is None or len(dtypes) < len(inputs) or dtypes[0] != dtype:
                    raise FormulaError(f"it returned {inputs}, [{output}], expected the dtypes of all arrays")
                cases.append((params, dtypes, output))
    if not cases:
        raise FormulaError(f"{what}: its dtype rule refuses {', '.join(map(str, CHECKED))}: nothing can be checked")
    return cases


class _OneArray:
    """A gradient builder for an operator with one input and one output, whose nodes are checked but not made."""

    num_inputs = 1

    def __init__(self, params: Params) -> None:
        self.params = params

    def input(self, index: int = 0) -> int:
        """Return the index of an input, an output or an output gradient, which must be 0."""
        if index:
            raise FormulaError(f"it reads x{index}, y{index} or g{index}: no other than x0, y0 and g0 is kept")
        return index

    ograd = output = input

    def node(self, name: str, inputs: Sequence[object], params: Params | None = None, **_: object) -> Sequence[object]:
        """Return a number for each output of a node of an operator."""
        op = get(name)
        values = parse_params(op, self.params if params is None else params)
        if len(inputs) != len(op.input_names(values)):
            raise FormulaError(f"it gives {name} {len(inputs)} inputs, expected {', '.join(op.input_names(values))}")
        return range(op.num_outputs(values))


def check_gradient_rule(what: str, op: Op, params: Params) -> None:
    """Raise FormulaError unless the gradient rule of an operator of one array can make its nodes."""
    rule: Any = op.gradient
    with named(what, "gradient"):
        if len(gradients := rule(_OneArray(params))) != 1:
            raise FormulaError(f"it returns {len(gradients)} gradients, expected 1")


def check_kernel(
    what: str, kernel: FormulaKernel, params: Params, inputs: Sequence[DType], outputs: Sequence[DType], *,
    computes: bool = True,
) -> None:  # fmt: skip
    """Raise FormulaError unless a formula can be traced, has a result for each output and state, and keeps its dtypes.

    Args:
        computes: whether the kernel also runs on arrays of one element.
    """
    base = kernel.base_dtype([TensorSpec((1,), dtype) for dtype in inputs], outputs)
    with named(what, base):
        results = kernel.expressions(params, base, [Expr("input", f"x{k}") for k in range(len(inputs))])
        targets = [*outputs, *(inputs[k] for k in kernel.states)]
        if len(results) != len(targets) or not all(
            isinstance(result, (Expr, Scalar, int, float)) for result in results
        ):
            count = "one expression or number" if len(targets) == 1 else f"{len(targets)} expressions or numbers"
            raise FormulaError(f"it returns {results}, expected {count}")
        for expr in operations(results):
            if not (expr.kind in (None, "default", "float", "real") or isinstance(expr.kind, np.dtype)):
                raise FormulaError(f"kind={expr.kind!r} of {expr.op}: expected None, 'float', 'real' or a numpy.dtype")
        for result, expected in zip(results, targets, strict=True):
            kind = result.kind if isinstance(result, Expr) else "default"
            if kind != "default" and dtype_of(kind, base) != expected:
                raise FormulaError(f"its result is {dtype_of(kind, base)}, but its dtype rule says {expected}")
        if computes:
            reads, writes = [[TensorSpec((1,), dtype) for dtype in dtypes] for dtypes in (inputs, outputs)]
            scratch = np.empty(kernel.workspace(params, reads, writes), np.uint8)
            arrays, outs = [np.ones(*spec) for spec in reads], [np.ones(*spec) for spec in writes]
            with np.errstate(all="ignore"):
                kernel(OpContext(np, workspace=scratch), params, arrays, outs)
