"""A fused optimizer step on many weights: a single pass in parts that idle cores may run.

A rule is an operator of (weight, gradient, states…), or an expression of them. Every weight is computed as the rule
computes it alone, with the same bits. Where a formula can be recorded and compiled, a weight is read once and written
once; else the array module works on blocks. A formula is cached for all learning rates, since many optimizers change
theirs at every step; any thread may use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from weftplan.ops.compiled import elementwise
from weftplan.ops.core import tiling
from weftplan.ops.core.products import MOST
from weftplan.ops.core.registry import get, parse_params
from weftplan.ops.core.schema import DType, OpContext, Params, TensorSpec, aligned
from weftplan.ops.elementwise.formulas import DTYPES, Expression, Number, Recorded, expressed, recorded
from weftplan.support.array_types import RawArray
from weftplan.support.core_sharing import split_in_rooms

FEW = elementwise.FEW
BORDER = elementwise.BORDER
Rule = str | Expression
"""The name of an elementwise operator of (weight, gradient, states…) whose output is the new weight, or an
expression."""
Numbers = tuple[tuple[str, object], ...]
"""(name, value) pairs of the parameters of a rule, not parsed."""
Steps = Callable[[Sequence[Any], Any], None]
"""``steps(raws, scratch)``: raws are the arrays of each weight in turn: weight, gradient, states."""
_Range = Callable[[Sequence[Any], int, int, Any], None]
"""``compute(arrays, first, last, scratch)``: a range of one weight."""

_OPEN = frozenset(("lr",))
"""Parameters that a formula of an operator leaves open."""
_CLOSED = frozenset(("clip_gradient", "clip_weights"))
"""Parameters that a formula of an expression does not leave open, because expressions branch on them."""


@lru_cache(maxsize=64)
def work(
    rule: Rule,
    params: tuple[Numbers, ...],
    arrays: int,
    sizes: tuple[int, ...],
    dtype: DType,
    *,
    compiled: bool,
    narrow: bool = False,
    xp: Any = np,
) -> tuple[Steps, int]:
    """Return a call that applies a rule to several weights in place, and its scratch bytes.

    Args:
        rule: see :data:`Rule`.
        params: of each weight.
        arrays: number of arrays per weight.
        sizes: elements of each weight.
        dtype: of all arrays.
        compiled: whether compiled formulas may be used.
        narrow: the gradient is in half precision, and a weight in half precision after the states gets the new weight,
            rounded.
        xp: the array module; only NumPy's arrays are computed in parts, and by compiled formulas.
    """
    ends = list(accumulate(sizes))
    parts = max(1, min(MOST, ends[-1] // FEW)) if xp is np else 1
    step = -(-ends[-1] // (parts * BORDER)) * BORDER
    pieces = _pieces(ends, step)
    block = tiling.block() if xp is np else max(sizes)
    ranges: dict[Numbers, tuple[_Range, int]] = {}
    for one in params:
        if one not in ranges:
            ranges[one] = _range(rule, dict(one), arrays, dtype, block, xp, compiled=compiled)
            if narrow:
                ranges[one] = _widened(*ranges[one], dtype, block)
    kernels = [ranges[one][0] for one in params]
    arrays += narrow
    room = max(nbytes for _, nbytes in ranges.values())

    def run(raws: Sequence[RawArray], scratch: Any) -> None:
        flat = [raw.reshape(-1) for raw in raws]

        def part(number: int, place: int) -> None:
            own = scratch[place * room : (place + 1) * room] if room else None
            for which, first, last in pieces[number]:
                mine = flat[which * arrays : (which + 1) * arrays]
                kernels[which](mine, first, last, own)

        split_in_rooms(part, len(pieces))

    return run, room * len(pieces)


def formula_of(rule: Rule, numbers: Params, arrays: int, dtype: DType) -> Recorded | None:
    """Return the formula of a rule; None if only the operator's kernel can compute it.

    Args:
        rule: see :data:`Rule`.
        numbers: parameters, not parsed.
        arrays: number of arrays of a weight.
        dtype: of all arrays.
    """
    opened = numbers.keys() & _OPEN if isinstance(rule, str) else numbers.keys() - _CLOSED
    closed = tuple([(name, value) for name, value in numbers.items() if name not in opened])
    formula = _formula(rule, closed, tuple(sorted(opened)), arrays, dtype)
    return None if formula is None else formula.at(numbers)


@lru_cache(maxsize=256)
def _formula(rule: Rule, closed: Numbers, opened: tuple[str, ...], arrays: int, dtype: DType) -> Recorded | None:
    """Return a rule's formula for any values of the parameters that are open."""
    numbers = {name: Number(name) for name in opened}
    if not isinstance(rule, str):
        return expressed(rule, arrays, dtype, {**dict(closed), **numbers})
    op = get(rule)
    params = {**parse_params(op, {**dict(closed), **dict.fromkeys(opened, 0.0)}), **numbers}
    return recorded([(op.forward, params, range(arrays), [0])], arrays, dtype, given=range(arrays))


def _pieces(ends: Sequence[int], step: int) -> list[list[tuple[int, int, int]]]:
    """Cut concatenated weights into parts of ``step`` elements: lists of (weight, first element, end element).

    Cuts inside a weight are at multiples of :data:`BORDER`.
    """
    found: list[list[tuple[int, int, int]]] = [[]]
    left = step
    for which, (begin, end) in enumerate(pairwise((0, *ends))):
        size, first = end - begin, 0
        while first < size:
            if left <= 0:
                found.append([])
                left = step
            last = min(size, first + -(-left // BORDER) * BORDER)
            found[-1].append((which, first, last))
            left -= last - first
            first = last
    return found


def _range(
    rule: Rule, numbers: Params, arrays: int, dtype: DType, block: int, xp: Any, *, compiled: bool
) -> tuple[_Range, int]:
    """Return a function that updates a range of one weight, and its scratch bytes."""
    formula = None
    if not isinstance(rule, str) or (compiled and xp is np):
        formula = formula_of(rule, numbers, arrays, dtype)
    if formula is not None and compiled and xp is np and dtype in DTYPES and elementwise.available():
        call = elementwise.compiled(formula, dtype)

        def compute(mine: Sequence[object], first: int, last: int, scratch: Any) -> None:
            call(mine, first, last)

        return compute, 0
    if not isinstance(rule, str):
        assert formula is not None
        return _interpreted(formula, dtype, block, xp)
    op = get(rule)
    params = parse_params(op, numbers)
    spec = TensorSpec((block,), dtype)

    def compute_blocks(mine: Sequence[RawArray], first: int, last: int, scratch: RawArray) -> None:
        some = [array[first:last] for array in mine]
        with np.errstate(all="ignore"):
            op.forward(OpContext(xp, workspace=scratch), params, some, some[:1])

    return compute_blocks, op.workspace_bytes(params, [spec] * arrays, [spec])


def _interpreted(recorded: Recorded, dtype: DType, block: int, xp: Any) -> tuple[_Range, int]:
    """Return a function that runs a formula with the array module, in blocks, and its scratch bytes."""
    formula = recorded.formula
    with np.errstate(all="ignore"):
        constants = [dtype.type(value) for value in recorded.constants]
    room = aligned(block * dtype.itemsize)

    def compute(mine: Sequence[RawArray], first: int, last: int, scratch: RawArray) -> None:
        for begin in range(first, last, block):
            end = min(last, begin + block)
            values: list[Any] = [array[begin:end] for array in mine]
            place = 0
            for name, operands in formula.operations:
                if name == "constant":
                    values.append(constants[operands[0]])
                    continue
                out = scratch[place : place + (end - begin) * dtype.itemsize].view(dtype)
                place += room
                some = [values[operand] for operand in operands]
                if name in _LIMITS:
                    xp.clip(some[0], *((some[1], None) if name == "at_least" else (None, some[1])), out=out)
                else:
                    getattr(xp, name)(*some, out=out)
                values.append(out)
            for array, value in formula.results:
                mine[array][begin:end] = values[value]

    return compute, room * sum(name != "constant" for name, _ in formula.operations)


_LIMITS = ("at_least", "at_most")


def _widened(compute: _Range, room: int, dtype: DType, block: int) -> tuple[_Range, int]:
    """Return ``compute`` in blocks, with a gradient and a second weight in half precision."""
    wide = aligned(block * dtype.itemsize)

    def compute_blocks(mine: Sequence[RawArray], first: int, last: int, scratch: RawArray) -> None:
        weight, gradient, *states, narrow = mine
        for begin in range(first, last, block):
            end = min(last, begin + block)
            widened = scratch[: (end - begin) * dtype.itemsize].view(dtype)
            widened[...] = gradient[begin:end]
            some = [weight[begin:end], widened, *(state[begin:end] for state in states)]
            compute(some, 0, end - begin, scratch[wide:])
            narrow[begin:end] = weight[begin:end]

    return compute_blocks, wide + room
