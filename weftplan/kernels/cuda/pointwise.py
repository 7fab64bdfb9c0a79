"""Fused pointwise nodes: one generated kernel for a group of elementwise nodes.

The formula of a group is made of its members' own formulas (:mod:`weftplan.ops.core.formulas`) and written as CUDA C,
with the same expressions as CuPy's elementwise kernels. Products and sums are not contracted, so every operation rounds
as in a separate kernel. Constants are arguments, so formulas that differ only in constants share a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from weftplan.ops.core.cuda_source import ALIGNMENT, are_aligned, each, floats
from weftplan.ops.core.expression import FormulaError
from weftplan.ops.core.formulas import FUNCTIONS, TRUTHS, Computation, Flattening, Formula
from weftplan.ops.core.implementations import MAX_OPERATIONS, Implementation, Specs, provide
from weftplan.ops.core.kernels import collapse
from weftplan.ops.core.schema import Arrays, OpContext, Params, Shape
from weftplan.ops.fusion.pointwise import GROUP, NAME, Group
from weftplan.support import slots

MAX_ARGUMENTS = 200
"""Maximum number of arguments of one kernel, because CUDA passes at most 4 KiB."""
MAX_VECTOR_OPERATIONS = 64
"""Each thread computes a vector of elements if the formula has at most this number of operations. Longer formulas are
bound by arithmetic."""
OWN, NUMBER, CYCLE, RUN, BAND = range(5)
"""How results read an input. ``OWN``: each result reads its own element. ``NUMBER``: all results read the same
element. ``CYCLE``: neighbouring results read neighbouring elements, and start over after the last. ``RUN``: each run of
neighbouring results reads one element. ``BAND``: as ``RUN``, but the runs start over after the last element."""
_TEXTS = {
    "add": "{} + {}", "subtract": "{} - {}", "multiply": "{} * {}", "divide": "{} / {}", "negative": "-{}",
    "absolute": "fabs({})", "sqrt": "sqrt({})", "not_equal": "{} != {}", "equal": "{} == {}", "less": "{} < {}",
    "less_equal": "{} <= {}", "greater": "{} > {}", "greater_equal": "{} >= {}", "number": "(T){}",
    "at_least": "{0} < {1} ? {1} : {0}", "at_most": "{0} > {1} ? {1} : {0}",
    "maximum": "isnan({0}) ? {0} : fmax({0}, {1})", "minimum": "isnan({0}) ? {0} : fmin({0}, {1})",
    "sign": "{0} > (T)0 ? (T)1 : ({0} < (T)0 ? (T)-1 : ({0} == (T)0 ? (T)0 : {0}))",
    "isnan": "isnan({})", "logical_and": "{} && {}", "logical_or": "{} || {}", "logical_not": "!{}",
    "select": "{} ? {} : {}",
    **{name: f"{name}({', '.join(['{}'] * count)})" for name, count in FUNCTIONS.items()},
}  # fmt: skip
"""CUDA C of each operation. The second operand of ``maximum`` and ``minimum`` is a constant other than NaN."""
_CONTRACTED = ("log", "log1p")
"""Functions whose float64 code in CUDA contracts products and sums if the compiler may. CuPy's kernels allow this and
generated kernels do not, so their bits would differ."""
_TRUTHS = TRUTHS | {"isnan", "logical_and", "logical_or", "logical_not"}


class GeneratedKernel(NamedTuple):
    """A generated kernel with its arguments other than arrays."""

    code: str
    arguments: tuple[object, ...]
    """The formula's constants, then the runs and sizes of broadcast inputs."""


def formula_of(group: Group, needed: Sequence[bool]) -> Computation | None:
    """Return a group's formula for the wanted outputs; None if a member has none that can be written."""
    values: dict[int | None, int] = {k: k for k in range(len(group.inputs))}
    try:
        flat = Flattening(len(group.inputs), group.dtype, functions=True)
        for op, params, reads, writes in group.members:
            numbers = flat.add(op.forward, params, [values.get(value) for value in reads],
                               wanted=[value is not None for value in writes])  # fmt: skip
            values.update(zip(writes, numbers, strict=True))
    except FormulaError:
        return None
    results = [values[value] for value, is_needed in zip(group.results, needed, strict=True) if is_needed]
    return flat.computation(list(enumerate(results)))


def operations(group: Group) -> int:
    """Return the number of operations per element for all outputs; 0 if no kernel can be generated."""
    computation = formula_of(group, [True] * len(group.results))
    if computation is None:
        return 0
    names = [operation.name for operation in computation.formula.operations]
    unknown = _CONTRACTED if group.dtype.itemsize == 8 else ()
    if any(name in unknown or (name not in _TEXTS and name != "constant") for name in names):
        return 0
    return max(1, sum(name not in ("constant", "number") for name in names))


@lru_cache(maxsize=4096)
def lanes_of(group: Group) -> int:
    """Return the elements per thread: as many as fit in 16 bytes, or 1 for a long formula."""
    return 1 if operations(group) > MAX_VECTOR_OPERATIONS else ALIGNMENT // group.dtype.itemsize


class Index(NamedTuple):
    """How results index an input."""

    kind: int
    """``OWN``, ``NUMBER``, ``CYCLE``, ``RUN`` or ``BAND``."""
    size: int = 1
    """Number of elements of the input."""
    run: int = 1
    """Number of neighbouring results that read the same element."""

    @property
    def extents(self) -> list[int]:
        """The arguments of the kernel for this input: run, size, both or none."""
        return [self.run] * (self.kind in (RUN, BAND)) + [self.size] * (self.kind in (CYCLE, BAND))


def index_of(shape: Shape, input_shape: Shape) -> Index | None:
    """Return how results of shape ``shape`` index an input of shape ``input_shape``.

    None if broadcast axes lie between axes along which the input varies.

    >>> index_of((2, 3, 4), (1, 3, 1)), index_of((5, 7), (1, 7)), index_of((2, 3, 4), (2, 1, 4))
    (Index(kind=4, size=3, run=4), Index(kind=2, size=7, run=1), None)
    """
    if input_shape == shape:
        return Index(OWN)
    if math.prod(input_shape) == 1:
        return Index(NUMBER)
    collapsed, part = collapse(shape, input_shape)
    varying = [axis for axis, size in enumerate(part) if size == collapsed[axis]]
    if len(varying) != 1:
        return None
    (axis,) = varying
    size, run = part[axis], math.prod(collapsed[axis + 1 :])
    if run == 1:
        return Index(CYCLE, size)
    return Index(RUN if axis == 0 else BAND, size, run)


@lru_cache(maxsize=4096)
def kernel_of(group: Group, needed: tuple[bool, ...], lanes: int) -> GeneratedKernel:
    """Return the kernel of a group for the wanted outputs; each thread computes ``lanes`` elements."""
    computation = formula_of(group, needed)
    assert computation is not None  # only groups with a formula are fused
    inputs = [index for input_shape in group.inputs if (index := index_of(group.shape, input_shape)) is not None]
    numbers = [group.dtype.type(value) for value in computation.constants]
    outputs = sum(needed)
    shapes = tuple((index.kind, index.run % lanes == 0, inputs.index(index)) for index in inputs)
    extents = [extent for index in dict.fromkeys(inputs) for extent in index.extents]
    return GeneratedKernel(_source(computation.formula, shapes, outputs, lanes), (*numbers, *extents))


def _index(kind: int, number: int, element: str) -> str:
    """Return CUDA C for the index into input ``number`` at the element ``element`` of the results."""
    run = f"{element} / (unsigned int)r{number}"
    return {NUMBER: "0", CYCLE: f"{element} % (unsigned int)n{number}", RUN: run,
            BAND: f"{run} % (unsigned int)n{number}"}[kind]  # fmt: skip


@lru_cache(maxsize=1024)
def _source(formula: Formula, inputs: tuple[tuple[int, bool, int], ...], outputs: int, lanes: int) -> str:
    """Return a formula as CUDA C.

    Args:
        formula: the formula of one element.
        inputs: for each input its kind, whether all elements of a thread read the same element of the input, and the
            first input with the same index.
        outputs: number of arrays that are written.
        lanes: elements of a thread. If there are several, pointers are declared as aligned, so that the compiler loads
            and stores whole vectors.
    """
    values = reachable(formula)
    heads = [f"const T* x{k}" for k in range(len(inputs))] + [f"T* y{k}" for k in range(outputs)]
    heads += [f"T c{operation.operands[0]}" for operation in formula.operations if operation.name == "constant"]
    for k, (kind, _, like) in enumerate(inputs):
        if like < k:
            continue
        heads += [f"long long r{k}"] * (kind in (RUN, BAND)) + [f"long long n{k}"] * (kind in (CYCLE, BAND))

    def element(position: str, *, lane: int | None) -> tuple[list[str], list[str], list[str]]:
        """Return the loads, operations and stores of one element; None for ``lane``: outside a vector."""
        end = "" if lane is None else f"_{lane}"
        loads, stores = [], []
        names = {k: f"v{k}{end}" for k in range(formula.arrays)}
        indexed = set()
        for k, (kind, even, like) in enumerate(inputs):
            if k not in values:
                continue
            if kind == OWN:
                loads.append(f"T {names[k]} = {'x' if lane is None else 'a'}{k}[{position}];")
            elif lane and (even or kind == NUMBER):
                names[k] = f"v{k}_0"
            else:
                if like not in indexed:
                    indexed.add(like)
                    loads.append(f"unsigned int t{like}{end} = {_index(kind, like, position)};")
                loads.append(f"T {names[k]} = x{k}[t{like}{end}];")
        lines = lines_of(formula, values, names, end)
        for k, (_, value) in enumerate(formula.results):
            stores.append(f"{'y' if lane is None else 'b'}{k}[{position}] = {names[value]};")
        return loads, lines, stores

    scalar = "\n    ".join(line for part in element("i", lane=None) for line in part)
    head = f"""
extern "C" __global__ void pointwise({", ".join([*heads, "long long count"])}) {{
    unsigned int size = (unsigned int)count;"""
    if lanes == 1:
        return f"""{head}
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    {scalar}
}}
"""
    pointers = [f"const T* a{k} = (const T*)__builtin_assume_aligned(x{k}, {ALIGNMENT});"
                for k, (kind, _, _) in enumerate(inputs) if k in values and kind == OWN]  # fmt: skip
    pointers += [f"T* b{k} = (T*)__builtin_assume_aligned(y{k}, {ALIGNMENT});" for k in range(outputs)]
    elements = [element(f"(first + {lane})" if lane else "first", lane=lane) for lane in range(lanes)]
    vector = "\n        ".join(
        [*pointers, *(line for part in zip(*elements, strict=True) for lines in part for line in lines)]
    )
    return f"""{head}
    unsigned int first = (blockIdx.x * blockDim.x + threadIdx.x) * {lanes};
    if (first + {lanes} <= size) {{
        {vector}
        return;
    }}
    #pragma unroll 1
    for (unsigned int i = first; i < size; ++i) {{
    {scalar}
    }}
}}
"""


def lines_of(formula: Formula, values: set[int], names: dict[int, str], end: str) -> list[str]:
    """Return CUDA C for the operations of one element.

    Args:
        formula: the formula.
        values: the values that are needed; operations for others are left out.
        names: names of the input values; this function adds the names of all other values.
        end: suffix of the new names.
    """
    lines = []
    truths: set[int] = set()
    for number, (name, operands) in enumerate(formula.operations, formula.arrays):
        if name == "constant":
            names[number] = f"c{operands[0]}"
            continue
        names[number] = f"v{number}{end}"
        of_truths = name in _TRUTHS or (name == "select" and operands[1] in truths)
        if of_truths:
            truths.add(number)
        if number in values:
            text = _TEXTS[name].format(*(names[operand] for operand in operands))
            lines.append(f"{'bool' if of_truths else 'T'} {names[number]} = {text};")
    return lines


def reachable(formula: Formula) -> set[int]:
    """Return the numbers of the values that the results depend on."""
    values = {value for _, value in formula.results}
    for number in reversed(range(len(formula.operations))):
        operation = formula.operations[number]
        if formula.arrays + number in values and operation.name != "constant":
            values.update(operation.operands)
    return values


def refusal(params: Params, inputs: Specs, outputs: Specs) -> str:
    """Return the reason why no kernel can be generated for a call; empty if one can be."""
    group: Group = params[GROUP]
    count, computation = operations(group), formula_of(group, [True] * len(group.results))
    if not count or computation is None:
        return "an operation of the members is not written"
    if count > MAX_OPERATIONS:
        return f"written for formulas of at most {MAX_OPERATIONS} operations"
    if 3 * len(group.inputs) + len(group.results) + len(computation.constants) > MAX_ARGUMENTS:
        return f"written for at most {MAX_ARGUMENTS} arrays and constants"
    if any(index_of(group.shape, input_shape) is None for input_shape in group.inputs):
        return "an input is broadcast along axes that alternate more than once"
    return str(floats(*range(len(inputs)))(params, inputs, outputs))


def _forward(ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
    group: Group = params[GROUP]
    needed = tuple(out is not None for out in outputs)
    written: list[Any] = [out for out in outputs if out is not None]
    unbroadcast = [array for k, array in enumerate(inputs) if not group.broadcasts(k)]
    lanes = lanes_of(group) if are_aligned(*unbroadcast, *written) else 1
    kernel = kernel_of(group, needed, lanes)
    arguments = (*inputs, *written, *kernel.arguments)
    each(ctx.xp, kernel.code, "pointwise", math.prod(group.shape), arguments, lanes=lanes, T=group.dtype)


provide(
    NAME,
    Implementation(name="cuda", kernel=_forward, workspace=lambda params, inputs, outputs: 0, refusal=refusal),
    on="gpu",
)
slots.CUDA_BROADCAST_INDEX.fill(index_of)
slots.CUDA_OPERATIONS.fill(operations)
