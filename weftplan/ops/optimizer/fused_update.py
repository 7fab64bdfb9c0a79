"""A fused optimizer step: update many weights in a single pass, which is cut into parts for idle cores.

An update rule is an operator of (weight, gradient, states…), or an expression of them. The fused step gives each weight
the same bits as the rule alone. If the rule's formula can be compiled, a weight is read once and written once;
otherwise the array module computes it in blocks. Formulas are cached without the values of parameters, because many
optimizers change the learning rate at every step. Any thread may use a cached formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any

import numpy as np

from weftplan.ops.core import implementations, tiling
from weftplan.ops.core.formula_kernel import FormulaKernel
from weftplan.ops.core.formulas import Computation
from weftplan.ops.core.products import MOST
from weftplan.ops.core.registry import get, parse_params
from weftplan.ops.core.schema import DType, Kernel, OpContext, Params, TensorSpec, aligned
from weftplan.support import slots
from weftplan.support.array_types import RawArray
from weftplan.support.core_sharing import split_in_rooms

FEW = 1 << 17
"""Minimum elements of a part."""
BORDER = 64
"""Parts begin at multiples of this number of elements, so at cache lines."""
Expression = Callable[..., tuple[Any, ...]]
"""``expression(weight, gradient, *states, **numbers)`` returns the new weight and the new states, written with ``+``,
``-``, ``*``, ``/`` of arrays and numbers and the methods ``square``, ``sqrt``, ``clip``. It runs on NDArrays, too."""
Rule = str | Expression
"""The name of an operator of (weight, gradient, states…) whose output is the new weight, or an expression. Weights are
cut into parts if the operator is elementwise."""
Numbers = tuple[tuple[str, object], ...]
"""(name, unparsed value) pairs of the parameters of a rule."""
Steps = Callable[[Sequence[Any], Any], None]
"""``steps(raws, scratch)`` updates all weights; ``raws`` lists weight, gradient and states of each weight in turn."""
_Range = Callable[[Sequence[Any], int, int, Any], None]
"""``compute(arrays, first, last, scratch)`` updates the elements [first, last) of one weight."""

_CLOSED = frozenset(("clip_gradient", "clip_weights"))
"""Parameters on which expressions branch."""


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
    """Return a function that applies a rule to several weights in place, and the scratch bytes that it needs.

    Args:
        rule: see :data:`Rule`.
        params: the parameters of the rule for each weight.
        arrays: number of arrays per weight, without the low-precision weight of ``narrow``.
        sizes: elements of each weight.
        dtype: dtype of all arrays but those of ``narrow``.
        compiled: whether compiled formulas may be used.
        narrow: whether gradients have low precision, and the last array of each weight is a low-precision weight, to
            which the new weight is rounded.
        xp: the array module; only NumPy arrays are updated in parallel parts or by compiled formulas.
    """
    ends = list(accumulate(sizes))
    if isinstance(rule, str) and not getattr(get(rule).forward, "elementwise", False):
        parts = min(MOST, len(sizes)) if xp is np else 1
        pieces = [[(which, 0, sizes[which]) for which in range(part, len(sizes), parts)] for part in range(parts)]
        block = max(sizes)
    else:
        parts = max(1, min(MOST, ends[-1] // FEW)) if xp is np else 1
        pieces = _pieces(ends, -(-ends[-1] // (parts * BORDER)) * BORDER)
        block = tiling.block() if xp is np else max(sizes)
    ranges: dict[Numbers, tuple[_Range, int]] = {}
    for numbers in params:
        if numbers not in ranges:
            ranges[numbers] = _range(rule, dict(numbers), arrays, dtype, block, xp, compiled=compiled)
            if narrow:
                ranges[numbers] = _widened(*ranges[numbers], dtype, block)
    kernels = [ranges[numbers][0] for numbers in params]
    arrays += narrow
    part_nbytes = max(nbytes for _, nbytes in ranges.values())

    def run(raws: Sequence[RawArray], scratch: Any) -> None:
        flat = [raw.reshape(-1) for raw in raws]

        def part(number: int, slot: int) -> None:
            buffer = scratch[slot * part_nbytes : (slot + 1) * part_nbytes] if part_nbytes else None
            for which, start, stop in pieces[number]:
                mine = flat[which * arrays : (which + 1) * arrays]
                kernels[which](mine, start, stop, buffer)

        split_in_rooms(part, len(pieces))

    return run, part_nbytes * len(pieces)


def formula_of(rule: Rule, numbers: Params, arrays: int, dtype: DType) -> Computation | None:
    """Return the formula of a rule; None if the rule is an operator whose kernel has none that can be compiled.

    Args:
        rule: see :data:`Rule`.
        numbers: unparsed parameters of the rule.
        arrays: number of arrays per weight.
        dtype: dtype of all arrays.
    """
    kernel, params = _kernel_of(rule, numbers, arrays)
    return kernel.computation(params, arrays, dtype) if isinstance(kernel, FormulaKernel) else None


def _kernel_of(rule: Rule, numbers: Params, arrays: int) -> tuple[Kernel, Params]:
    """Return the kernel of a rule and its parameters."""
    if isinstance(rule, str):
        op = get(rule)
        return op.forward, parse_params(op, numbers)
    return _expression_kernel(rule, tuple(numbers), arrays), numbers


@lru_cache(maxsize=256)
def _expression_kernel(expression: Expression, names: tuple[str, ...], arrays: int) -> FormulaKernel:
    """Return the kernel of an expression with parameters ``names``."""
    return FormulaKernel(
        lambda p, *operands: expression(*operands, **{name: getattr(p, name) for name in names}),
        arrays, states=range(2, arrays), overlaps=(0,),
        choices={name: itemgetter(name) for name in names if name in _CLOSED},
    )  # fmt: skip


def _pieces(ends: Sequence[int], step: int) -> list[list[tuple[int, int, int]]]:
    """Cut weights into parts of about ``step`` elements; a part is a list of (weight, first element, end element).

    Cuts inside a weight are at multiples of :data:`BORDER`.

    Args:
        ends: cumulative numbers of elements of the weights.
        step: elements of a part. A part may have up to ``BORDER`` - 1 more, because its last cut is rounded up.
    """
    parts: list[list[tuple[int, int, int]]] = [[]]
    free = step
    for which, (begin, end) in enumerate(pairwise((0, *ends))):
        size, start = end - begin, 0
        while start < size:
            if free <= 0:
                parts.append([])
                free = step
            stop = min(size, start + -(-free // BORDER) * BORDER)
            parts[-1].append((which, start, stop))
            free -= stop - start
            start = stop
    return parts


def _range(
    rule: Rule, numbers: Params, arrays: int, dtype: DType, block: int, xp: Any, *, compiled: bool
) -> tuple[_Range, int]:
    """Return a function that updates a range of one weight, and the scratch bytes that it needs."""
    if compiled and xp is np and not isinstance(implementations.compiler(), str):
        formula = formula_of(rule, numbers, arrays, dtype)
        if formula is not None:
            call = slots.COMPILED_FORMULA.get()(formula, dtype)
            return lambda arrays, start, stop, scratch: call(arrays, start, stop), 0
    kernel, params = _kernel_of(rule, numbers, arrays)
    spec = TensorSpec((block,), dtype)
    workspace = get(rule).workspace_bytes if isinstance(rule, str) else kernel.workspace  # type: ignore[attr-defined]

    def compute_blocks(mine: Sequence[RawArray], start: int, stop: int, scratch: RawArray) -> None:
        views = [array[start:stop] for array in mine]
        with np.errstate(all="ignore"):
            kernel(OpContext(xp, workspace=scratch), params, views, views[:1])

    return compute_blocks, workspace(params, [spec] * arrays, [spec])


def _widened(compute: _Range, nbytes: int, dtype: DType, block: int) -> tuple[_Range, int]:
    """Return a function that updates a range of one weight from a low-precision gradient, and its scratch bytes.

    For each block, the function casts the gradient to ``dtype``, calls ``compute``, and rounds the new weight into its
    last array. ``nbytes`` is the scratch bytes of ``compute``.
    """
    wide = aligned(block * dtype.itemsize)

    def compute_blocks(mine: Sequence[RawArray], start: int, stop: int, scratch: RawArray) -> None:
        weight, gradient, *states, narrow = mine
        for begin in range(start, stop, block):
            end = min(stop, begin + block)
            widened = scratch[: (end - begin) * dtype.itemsize].view(dtype)
            widened[...] = gradient[begin:end]
            views = [weight[begin:end], widened, *(state[begin:end] for state in states)]
            compute(views, 0, end - begin, scratch[wide:])
            narrow[begin:end] = weight[begin:end]

    return compute_blocks, wide + nbytes
