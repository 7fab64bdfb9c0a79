"""Gradients of binary operators, elementwise and broadcasting.

Both forms share one pair of formulas per operator. The broadcasting form computes a block of rows of the full gradient
in scratch and sums it into the smaller input's gradient, so scratch stays far below the size of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from weftplan.ops.core.forms import Call, kernel
from weftplan.ops.core.kernels import Kind, block_bytes, blocks, collapse, reduce_to, replayed, rows_per_block
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, DType, Kernel, Params, TensorSpec, Workspace
from weftplan.ops.elementwise.integer_gradients import Integers, apply_slope, slope_scratch
from weftplan.support.array_types import ArrayModule, RawArray

Side = Callable[..., None]
"""``side(xp, ograd, lhs, rhs, out, *scratch)`` computes an input's gradient before sums; ``out`` may be ``ograd``."""


@dataclass(frozen=True, slots=True)
class Sides:
    """The two gradient formulas of an operator, the scratch that each needs, and how they treat integers."""

    lhs: Side
    rhs: Side
    scratch: tuple[Kind, ...] = ()
    integers: Integers = "slope"


def _kinds(sides: Sides, dtype: DType) -> list[DType]:
    return slope_scratch(sides.scratch, dtype, 2, sides.integers)


def _apply(
    sides: Sides,
    side: Side,
    xp: ArrayModule,
    g: RawArray,
    a: RawArray,
    b: RawArray,
    out: RawArray,
    scratch: Sequence[RawArray],
) -> None:
    apply_slope(xp, partial(side, xp), g, (a, b), out, scratch, sides.integers)


def _both_sides(
    sides: Sides,
    xp: ArrayModule,
    left: bool,
    right: bool,
    g: RawArray,
    a: RawArray,
    b: RawArray,
    da: RawArray,
    db: RawArray,
    *scratch: RawArray,
) -> None:
    """Compute the gradients of one block: that of a if ``left``, that of b if ``right``."""
    if left:
        _apply(sides, sides.lhs, xp, g, a, b, da, scratch)
    if right:
        _apply(sides, sides.rhs, xp, g, a, b, db, scratch)


def _equal_blocks(sides: Sides, ctx: Workspace, inputs: Arrays, outputs: Arrays) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments of :func:`_both_sides`, block by block, for inputs of one shape."""
    g, a, b = inputs
    da, db = outputs
    spare = g if da is None else da, g if db is None else db
    for block in blocks(ctx, (g, a, b, *spare), _kinds(sides, g.dtype)):
        yield (da is not None, db is not None, *block)


def _unequal_shapes(sides: Sides, ctx: Workspace, inputs: Arrays, outputs: Arrays) -> None:
    xp = ctx.xp
    shape, *input_shapes = collapse(inputs[0].shape, inputs[1].shape, inputs[2].shape)
    g = inputs[0].reshape(shape)
    operands = [inputs[k + 1].reshape(input_shapes[k]) for k in (0, 1)]
    rows = rows_per_block(shape)
    block = (rows, *shape[1:])
    full = ctx.take(block, g.dtype)
    scratch = [ctx.take(block, dtype) for dtype in _kinds(sides, g.dtype)]
    part_size = _part_size(shape, input_shapes, rows)
    part = ctx.take((part_size,), g.dtype)
    for k, side in ((0, sides.lhs), (1, sides.rhs)):
        if outputs[k] is None:
            continue
        target = outputs[k].reshape(input_shapes[k])
        for start in range(0, shape[0], rows):
            stop = min(start + rows, shape[0])
            bg = g[start:stop]
            ba, bb = (x if x.shape[0] == 1 else x[start:stop] for x in operands)
            temporary = [space[: stop - start] for space in scratch]
            if target.shape == shape:
                _apply(sides, side, xp, bg, ba, bb, target[start:stop], temporary)
                continue
            product = full[: stop - start]
            _apply(sides, side, xp, bg, ba, bb, product, temporary)
            if target.shape[0] != 1:
                reduce_to(xp, product, target[start:stop])
            elif start == 0:
                reduce_to(xp, product, target)
            else:
                term = part[: target.size].reshape(target.shape)
                reduce_to(xp, product, term)
                xp.add(target, term, out=target)


def _part_size(shape: Sequence[int], input_shapes: Sequence[Sequence[int]], rows: int) -> int:
    """Return the number of elements of the buffer for a block's sum; 0 unless several blocks add to one gradient."""
    if rows >= shape[0]:
        return 0
    return max((math.prod(s) for s in input_shapes if s[0] == 1), default=0)


class _BackwardKernel:
    """The backward kernel (ograd, lhs, rhs) -> both gradients, for equal or broadcast shapes."""

    __slots__ = ("sides",)

    def __init__(self, sides: Sides) -> None:
        self.sides = sides

    def __call__(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        if inputs[1].shape != inputs[2].shape:
            _unequal_shapes(self.sides, ctx, inputs, outputs)
            return
        for block in _equal_blocks(self.sides, ctx, inputs, outputs):
            _both_sides(self.sides, ctx.xp, *block)

    def prepare(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return a call that applies the formulas to each block, with the blocks' views already built.

        For unequal shapes or very many blocks, return a call of the unprepared kernel.
        """
        whole = ctx.repeated(partial(self, ctx, params, inputs, outputs))
        if inputs[1].shape != inputs[2].shape:
            return whole
        steps = _equal_blocks(self.sides, ctx, inputs, outputs)
        return replayed(partial(_both_sides, self.sides, ctx.xp), steps) or whole


def backward_kernel(sides: Sides) -> Kernel:
    """Return the backward kernel (ograd, lhs, rhs) -> both gradients, for equal or broadcast shapes."""
    return _BackwardKernel(sides)


def backward_workspace(sides: Sides) -> Callable[[Params, Sequence[TensorSpec], Sequence[TensorSpec]], int]:
    """Return the workspace rule of :func:`backward_kernel`."""

    def workspace(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        g, a, b = inputs
        kinds = _kinds(sides, g.dtype)
        if a.shape == b.shape:
            return block_bytes(math.prod(g.shape), kinds)
        shape, *input_shapes = collapse(g.shape, a.shape, b.shape)
        rows = rows_per_block(shape)
        block = (rows, *shape[1:])
        part = (_part_size(shape, input_shapes, rows),)
        return take_bytes((block, g.dtype), (part, g.dtype), *((block, kind) for kind in kinds))

    return workspace


def sum_backward(sign: int) -> Kernel:
    """Return the backward kernel of lhs + rhs (``sign`` 1) or lhs - rhs (-1).

    It sums the output gradient to each input's shape and multiplies the right gradient by ``sign``.
    """

    @kernel
    def compute(xp: ArrayModule, p: Params, g: RawArray, left: RawArray | None, right: RawArray | None) -> None:
        # Left before right: a left gradient in g's memory leaves g unchanged, a right one may change it.
        if left is not None:
            reduce_to(xp, g, left)
        if right is not None:
            if sign < 0 and right.shape == g.shape:
                xp.negative(g, out=right)
            else:
                reduce_to(xp, g, right)
                if sign < 0:
                    xp.negative(right, out=right)

    return compute


# -------------------------------------------------------------------------------- gradients: (xp, ograd, a, b, out, t…)


def mul_l(xp: ArrayModule, g: RawArray, a: RawArray, b: RawArray, out: RawArray) -> None:
    """Compute the gradient of a in a · b: g · b."""
    xp.multiply(g, b, out=out)


def mul_r(xp: ArrayModule, g: RawArray, a: RawArray, b: RawArray, out: RawArray) -> None:
    """Compute the gradient of b in a · b: g · a."""
    xp.multiply(g, a, out=out)


def div_l(xp: ArrayModule, g: RawArray, a: RawArray, b: RawArray, out: RawArray) -> None:
    """Compute the gradient of a in a / b: g / b."""
    xp.divide(g, b, out=out)


def div_r(xp: ArrayModule, g: RawArray, a: RawArray, b: RawArray, out: RawArray) -> None:
    """Compute the gradient of b in a / b: -g · a / b²."""
    xp.divide(g, b, out=out)
    xp.multiply(out, a, out=out)
    xp.divide(out, b, out=out)
    xp.negative(out, out=out)


def power_l(xp: ArrayModule, g: RawArray, a: RawArray, b: RawArray, out: RawArray, t: RawArray) -> None:
    """Compute the gradient of a in a^b: g · b · a^(b - 1)."""
    xp.subtract(b, 1, out=t)
    xp.power(a, t, out=t)
    xp.multiply(t, b, out=t)
    xp.multiply(t, g, out=out)


def power_r(xp: ArrayModule, g: RawArray, a: RawArray, b: RawArray, out: RawArray, t: RawArray) -> None:
    """Compute the gradient of b in a^b: g · a^b · log(a)."""
    xp.power(a, b, out=t)
    xp.multiply(t, g, out=out)
    xp.log(a, out=t)
    xp.multiply(out, t, out=out)


def mod_l(xp: ArrayModule, g: RawArray, a: RawArray, b: RawArray, out: RawArray, t: RawArray) -> None:
    """Compute the gradient of a in a mod b: g."""
    xp.copyto(out, g)


def mod_r(xp: ArrayModule, g: RawArray, a: RawArray, b: RawArray, out: RawArray, t: RawArray) -> None:
    """Compute the gradient of b in a mod b: -g · floor(a / b)."""
    xp.divide(a, b, out=t)
    xp.floor(t, out=t)
    xp.negative(t, out=t)
    xp.multiply(t, g, out=out)


def masked(compare: str) -> Side:
    """Return a formula that computes g if ``compare(a, b)`` is true, else 0."""

    def side(xp: ArrayModule, g: RawArray, a: RawArray, b: RawArray, out: RawArray, t: RawArray) -> None:
        getattr(xp, compare)(a, b, out=t)
        xp.multiply(g, t, out=out)

    return side


def hypot_side(right: bool) -> Side:
    """Return the formula of a gradient of hypot: g · a / hypot(a, b), or g · b / hypot(a, b) if ``right``."""

    def side(xp: ArrayModule, g: RawArray, a: RawArray, b: RawArray, out: RawArray, t: RawArray) -> None:
        xp.hypot(a, b, out=t)
        xp.divide(b if right else a, t, out=t)
        xp.multiply(t, g, out=out)

    return side
