"""A fused optimizer step on many weights: a single pass in parts that idle cores may run.

Every weight is computed as the operator computes it alone, with the same bits. Where a formula can be recorded and
compiled, a weight is read once and written once; else NumPy's kernel works on blocks. A formula is kept for all
learning rates, since many optimizers change theirs at every step; any thread may use it.
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
from weftplan.ops.core.schema import DType, OpContext, Params, TensorSpec
from weftplan.ops.elementwise.formulas import Number, Recorded, recorded
from weftplan.support.array_types import RawArray
from weftplan.support.core_sharing import split_in_rooms

FEW = elementwise.FEW
BORDER = elementwise.BORDER
Steps = Callable[[Sequence[Any], Any], None]
"""``steps(raws, scratch)``: raws are the arrays of each weight in turn: weight, gradient, states."""


@lru_cache(maxsize=64)
def work(
    name: str,
    params: tuple[tuple[tuple[str, object], ...], ...],
    arrays: int,
    sizes: tuple[int, ...],
    dtype: DType,
    *,
    compiled: bool,
    narrow: bool = False,
) -> tuple[Steps, int]:
    """Return a call that applies operator ``name`` to several weights in place, and its scratch bytes.

    Args:
        name: an elementwise operator of (weight, gradient, states…) whose output is the new weight.
        params: (name, value) pairs of the parameters of each weight, not parsed.
        arrays: number of arrays per weight.
        sizes: elements of each weight.
        dtype: of all arrays.
        compiled: whether compiled formulas may be used.
        narrow: the gradient is in half precision, and a weight in half precision after the states gets the new weight,
            rounded.
    """
    made: dict[Any, tuple[_Range, int]] = {}
    kernels = []
    for one in params:
        if one not in made:
            made[one] = _kernel(name, dict(one), arrays, dtype, compiled=compiled)
            if narrow:
                made[one] = _widened(*made[one], dtype)
        kernels.append(made[one])
    arrays += narrow
    ends = list(accumulate(sizes))
    parts = max(1, min(MOST, ends[-1] // FEW))
    step = -(-ends[-1] // (parts * BORDER)) * BORDER
    pieces = _pieces(ends, step)
    room = max(nbytes for _, nbytes in kernels)

    def run(raws: Sequence[RawArray], scratch: Any) -> None:
        flat = [raw.reshape(-1) for raw in raws]

        def part(number: int, place: int) -> None:
            own = scratch[place * room : (place + 1) * room] if room else None
            for which, first, last in pieces[number]:
                mine = flat[which * arrays : (which + 1) * arrays]
                kernels[which][0](mine, first, last, own)

        split_in_rooms(part, len(pieces))

    return run, room * len(pieces)


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


_Range = Callable[[Sequence[Any], int, int, Any], None]
"""``compute(arrays, first, last, scratch)``: a range of one weight."""


def _kernel(name: str, given: Params, arrays: int, dtype: DType, *, compiled: bool) -> tuple[_Range, int]:
    """Return a function that updates a range of one weight, and its scratch bytes."""
    if compiled and elementwise.available():
        others = tuple((key, value) for key, value in given.items() if key != _RATE)
        formula = _formula(name, others, arrays, dtype)
        if formula is not None:
            call = elementwise.compiled(formula.at(float(given[_RATE])), dtype)

            def compute(mine: Sequence[object], first: int, last: int, scratch: RawArray | None) -> None:
                call([*mine, mine[0]], first, last)

            return compute, 0
    op = get(name)
    params = parse_params(op, given)
    block = TensorSpec((tiling.block(),), dtype)

    def compute_blocks(mine: Sequence[RawArray], first: int, last: int, scratch: RawArray) -> None:
        some = [array[first:last] for array in mine]
        with np.errstate(all="ignore"):
            op.forward(OpContext(np, workspace=scratch), params, some, some[:1])

    return compute_blocks, op.workspace_bytes(params, [block] * arrays, [block])


def _widened(compute: _Range, room: int, dtype: DType) -> tuple[_Range, int]:
    """``compute`` in blocks, with a gradient and a second weight in half precision."""
    block = tiling.block()
    wide = block * dtype.itemsize

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


_RATE = "lr"
"""The parameter that a formula leaves open."""


@lru_cache(maxsize=256)
def _formula(name: str, others: tuple[tuple[str, object], ...], arrays: int, dtype: DType) -> Recorded | None:
    """Return a step's formula for any learning rate; None if only NumPy can compute it."""
    op = get(name)
    params = {**parse_params(op, {**dict(others), _RATE: 0.0}), _RATE: Number()}
    return recorded([(op.forward, params, range(arrays), [arrays])], arrays + 1, dtype, given=range(arrays))
