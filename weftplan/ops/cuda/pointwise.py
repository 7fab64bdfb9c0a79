"""Fused pointwise nodes: one generated kernel for each tree of elementwise nodes, a thread for each element.

The formula is recorded from the members' own kernels (:mod:`weftplan.ops.elementwise.formulas`) and written as CUDA C,
one operation after the other, in the words of CuPy's elementwise kernels. Nothing is contracted, so every operation
rounds as in a kernel of its own. Constants are arguments: formulas that differ in constants alone share a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple


from weftplan.ops.core.cuda_source import each, floats
from weftplan.ops.core.implementations import Implementation, Specs, provide
from weftplan.ops.core.kernels import collapse
from weftplan.ops.core.schema import Arrays, OpContext, Params, Shape
from weftplan.ops.elementwise.formulas import FUNCTIONS, TRUTHS, Formula, Recorded, recorded
from weftplan.ops.fusion.pointwise import GROUP, NAME, Group

MOST_ARGUMENTS = 200
"""Arrays and constants of one kernel: CUDA passes at most 4 KiB."""
MOST_OPERATIONS = 600
"""Operations of one formula, which bound the time of the compiler and the registers of a thread."""
WHOLE, NUMBER, CYCLE, RUN, BAND = range(5)
"""How an input is read: every element; one number; periodically; each of its elements for a run; both."""
_TEXTS = {
    "add": "{} + {}", "subtract": "{} - {}", "multiply": "{} * {}", "divide": "{} / {}", "negative": "-{}",
    "absolute": "fabs({})", "sqrt": "sqrt({})", "not_equal": "{} != {}", "equal": "{} == {}", "less": "{} < {}",
    "less_equal": "{} <= {}", "greater": "{} > {}", "greater_equal": "{} >= {}", "number": "(T){}",
    "at_least": "{0} < {1} ? {1} : {0}", "at_most": "{0} > {1} ? {1} : {0}",
    "maximum": "isnan({0}) ? {0} : fmax({0}, {1})", "minimum": "isnan({0}) ? {0} : fmin({0}, {1})",
    "isnan": "isnan({})", "logical_and": "{} && {}", "logical_or": "{} || {}", "logical_not": "!{}",
    "select": "{} ? {} : {}", "copysign": "copysign({}, {})", **{name: f"{name}({{}})" for name in FUNCTIONS if name != "copysign"},
}  # fmt: skip
"""CUDA C of each operation. Of two operands ``maximum`` and ``minimum`` take a constant second, which is no NaN."""
_TRUTHS = TRUTHS | {"isnan", "logical_and", "logical_or", "logical_not"}


class Kernel(NamedTuple):
    """A generated kernel with its numbers."""

    code: str
    arguments: tuple[object, ...]
    """The constants, then the extents of broadcast inputs."""


def formula_of(group: Group, wanted: Sequence[bool]) -> Recorded | None:
    """Return what a group computes of one element, for the outputs that are wanted; None if that cannot be recorded."""
    calls = [(op.forward, params, reads, writes) for op, params, reads, writes in group.members]
    count = len(group.inputs)
    results = [value for value, one in zip(group.results, wanted, strict=True) if one]
    return recorded(calls, group.num_values, group.dtype, given=range(count), results=results, functions=True)


def operations(group: Group) -> int:
    """Return how many operations an element takes with every output wanted; 0 if they cannot be generated."""
    found = formula_of(group, [True] * len(group.results))
    if found is None:
        return 0
    names = [one.name for one in found.formula.operations]
    if any(name not in _TEXTS and name != "constant" for name in names):
        return 0
    return max(1, sum(name not in ("constant", "number") for name in names))


def index_of(shape: Shape, own: Shape) -> tuple[int, int, int]:
    """Return how an input of shape ``own`` is broadcast to ``shape``: the kind, its elements, the length of a run.

    >>> index_of((2, 3, 4), (1, 3, 1)), index_of((5, 7), (1, 7)), index_of((5, 7), (5, 1)), index_of((5, 7), (1, 1))
    ((4, 3, 4), (2, 7, 1), (3, 5, 7), (1, 1, 1))

    Raises:
        ValueError: the broadcast axes are not of these kinds.
    """
    if own == shape:
        return WHOLE, math.prod(shape), 1
    if math.prod(own) == 1:
        return NUMBER, 1, 1
    whole, part = collapse(shape, own)
    kept = [axis for axis, size in enumerate(part) if size == whole[axis]]
    if len(kept) != 1:
        raise ValueError(f"{own} is broadcast to {shape} along axes that alternate more than once")
    (axis,) = kept
    size, run = part[axis], math.prod(whole[axis + 1 :])
    if run == 1:
        return CYCLE, size, 1
    return (RUN if axis == 0 else BAND), size, run


@lru_cache(maxsize=4096)
def kernel_of(group: Group, wanted: tuple[bool, ...]) -> Kernel:
    """Return the kernel of a group."""
    found = formula_of(group, wanted)
    assert found is not None  # or the node would not have been made
    kinds = tuple(index_of(group.shape, own) for own in group.inputs)
    extents = [extent for kind, size, run in kinds for extent in _extents(kind, size, run)]
    numbers = [group.dtype.type(value) for value in found.constants]
    return Kernel(_source(found.formula, tuple(kind for kind, _, _ in kinds), wanted), (*numbers, *extents))


def _extents(kind: int, size: int, run: int) -> list[int]:
    return {WHOLE: [], NUMBER: [], CYCLE: [size], RUN: [run], BAND: [run, size]}[kind]


@lru_cache(maxsize=1024)
def _source(formula: Formula, kinds: tuple[int, ...], wanted: tuple[bool, ...]) -> str:
    """Write a formula as CUDA C."""
    values = _reachable(formula)
    heads = [f"const T* x{k}" for k in range(len(kinds))]
    heads += [f"T* y{k}" for k, one in enumerate(wanted) if one]
    heads += [f"T c{one.operands[0]}" for one in formula.operations if one.name == "constant"]
    lines = []
    for k, kind in enumerate(kinds):
        place = {WHOLE: "i", NUMBER: "0", CYCLE: f"i % (unsigned int)n{k}", RUN: f"i / (unsigned int)r{k}",
                 BAND: f"i / (unsigned int)r{k} % (unsigned int)n{k}"}[kind]  # fmt: skip
        heads += [f"long long r{k}"] * (kind in (RUN, BAND)) + [f"long long n{k}"] * (kind in (CYCLE, BAND))
        if k in values:
            lines.append(f"T v{k} = x{k}[{place}];")
    names = {k: f"v{k}" for k in range(formula.arrays)}
    truths: set[int] = set()
    for number, (name, operands) in enumerate(formula.operations, formula.arrays):
        if name == "constant":
            names[number] = f"c{operands[0]}"
            continue
        names[number] = f"v{number}"
        of_truths = name in _TRUTHS or (name == "select" and operands[1] in truths)
        if of_truths:
            truths.add(number)
        if number in values:
            text = _TEXTS[name].format(*(names[one] for one in operands))
            lines.append(f"{'bool' if of_truths else 'T'} v{number} = {text};")
    outs = [f"y{k}" for k, one in enumerate(wanted) if one]
    lines += [f"{out}[i] = {names[value]};" for out, (_, value) in zip(outs, formula.results, strict=True)]
    body = "\n    ".join(lines)
    return f"""
extern "C" __global__ void pointwise({", ".join([*heads, "long long count"])}) {{
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (unsigned int)count) return;
    {body}
}}
"""


def _reachable(formula: Formula) -> set[int]:
    """Return the values that the results need."""
    values = {value for _, value in formula.results}
    for number in reversed(range(len(formula.operations))):
        operation = formula.operations[number]
        if formula.arrays + number in values and operation.name != "constant":
            values.update(operation.operands)
    return values


def refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
    """Say why no kernel can be generated; empty if one can."""
    group: Group = params[GROUP]
    count, found = operations(group), formula_of(group, [True] * len(group.results))
    if not count or found is None:
        return "an operation of the members is not written"
    if count > MOST_OPERATIONS:
        return f"written for formulas of at most {MOST_OPERATIONS} operations"
    if 3 * len(group.inputs) + len(group.results) + len(found.constants) > MOST_ARGUMENTS:
        return f"written for at most {MOST_ARGUMENTS} arrays and constants"
    try:
        for own in group.inputs:
            index_of(group.shape, own)
    except ValueError as error:
        return str(error)
    return str(floats(*range(len(inputs)))(params, inputs, outputs))


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    group: Group = params[GROUP]
    kernel = kernel_of(group, tuple(out is not None for out in outputs))
    arrays: list[Any] = [*inputs, *(out for out in outputs if out is not None)]
    each(ctx.xp, kernel.code, "pointwise", math.prod(group.shape), (*arrays, *kernel.arguments), T=group.dtype)


provide(
    NAME,
    Implementation(name="cuda", kernel=_forward, workspace=lambda params, inputs, outputs: 0, refusal=refusal),
    on="gpu",
)
