"""Gradients of binary operators, elementwise and broadcasting.

Both forms share one pair of formulas per operator. The broadcasting form computes a block of rows of the full gradient
in scratch and sums it into the smaller input's gradient, so scratch stays far below the size of the output.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from weftplan.ops.core.expression import Expr
from weftplan.ops.core.forms import BoundKernel, Call, kernel
from weftplan.ops.core.formula_kernel import FormulaKernel, Integers
from weftplan.ops.core.kernels import block_bytes, blocks, bound_blocks, collapse, reduce_to, rows_per_block
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, DType, Kernel, Params, TensorSpec, Workspace
from weftplan.support.array_types import ArrayModule, RawArray

Side = Callable[[Any, Any, Any], Any]
"""``side(ograd, lhs, rhs)`` is an input's gradient before sums, a formula."""


class _Step:
    """The gradient formula of one input for one dtype: ``step(xp, g, a, b, out, scratch)``."""

    def __init__(self, side: Side, integers: Integers, dtype: DType) -> None:
        array = np.empty((), dtype)
        formula = FormulaKernel(lambda p, g, a, b: side(g, a, b), 3, overlaps=(0,), integers=integers)
        self.program, self.used = formula.program({}, [array] * 3, array)
        self.dtypes = [dtype for dtype, _ in self.program.scratch]
        self.scratch_indices: list[int] = []
        """For each scratch array of the formula its index in the scratch that both formulas share."""
        self.bound: dict[str, Callable[..., None]] = {}

    def __call__(
        self, xp: ArrayModule, g: RawArray, a: RawArray, b: RawArray, out: RawArray, scratch: Sequence[RawArray]
    ) -> None:
        step = self.bound.get(xp.__name__) if xp is np else None
        if step is None:
            step = self.program.step(xp, {})
            if xp is np:
                self.bound[xp.__name__] = step
        arrays = (g, a, b)
        step(*[arrays[k] for k in self.used], out, *[scratch[k] for k in self.scratch_indices])


class _Steps:
    """Both gradient formulas for one dtype, and the scratch that they share."""

    def __init__(self, sides: Sequence[Side], integers: Integers, dtype: DType) -> None:
        self.pair = [_Step(side, integers, dtype) for side in sides]
        counts = Counter(self.pair[0].dtypes) | Counter(self.pair[1].dtypes)
        self.scratch = list(counts.elements())
        """Dtypes of the scratch."""
        for step in self.pair:
            free = list(range(len(self.scratch)))
            for dtype_needed in step.dtypes:
                index = next(k for k in free if self.scratch[k] == dtype_needed)
                free.remove(index)
                step.scratch_indices.append(index)

    def run(
        self,
        xp: ArrayModule,
        to_lhs: bool,
        to_rhs: bool,
        g: RawArray,
        a: RawArray,
        b: RawArray,
        da: RawArray,
        db: RawArray,
        *scratch: RawArray,
    ) -> None:
        """Compute the gradients of one block: that of a if ``to_lhs``, that of b if ``to_rhs``."""
        if to_lhs:
            self.pair[0](xp, g, a, b, da, scratch)
        if to_rhs:
            self.pair[1](xp, g, a, b, db, scratch)

    def equal_blocks(self, ctx: Workspace, inputs: Arrays, outputs: Arrays) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of :meth:`run`, block by block, for inputs of one shape."""
        g, a, b = inputs
        da, db = outputs
        spare = g if da is None else da, g if db is None else db
        for block in blocks(ctx, (g, a, b, *spare), self.scratch):
            yield (da is not None, db is not None, *block)


def _unequal_shapes(steps: _Steps, ctx: Workspace, inputs: Arrays, outputs: Arrays) -> None:
    xp = ctx.xp
    shape, *input_shapes = collapse(inputs[0].shape, inputs[1].shape, inputs[2].shape)
    g = inputs[0].reshape(shape)
    operands = [inputs[k + 1].reshape(input_shapes[k]) for k in (0, 1)]
    rows = rows_per_block(shape)
    block = (rows, *shape[1:])
    product_buffer = ctx.take(block, g.dtype)
    scratch = [ctx.take(block, dtype) for dtype in steps.scratch]
    part_size = _part_size(shape, input_shapes, rows)
    part = ctx.take((part_size,), g.dtype)
    for k, step in enumerate(steps.pair):
        if outputs[k] is None:
            continue
        target = outputs[k].reshape(input_shapes[k])
        for start in range(0, shape[0], rows):
            stop = min(start + rows, shape[0])
            bg = g[start:stop]
            ba, bb = (x if x.shape[0] == 1 else x[start:stop] for x in operands)
            temporary = [space[: stop - start] for space in scratch]
            if target.shape == shape:
                step(xp, bg, ba, bb, target[start:stop], temporary)
                continue
            product = product_buffer[: stop - start]
            step(xp, bg, ba, bb, product, temporary)
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


class SidesKernel(BoundKernel):
    """The backward kernel (ograd, lhs, rhs) -> both gradients, for equal or broadcast shapes.

    Args:
        lhs, rhs: the gradient formulas; ``out`` may be the memory of the output gradient.
        integers: how they treat integers.
    """

    elementwise = True
    """For arrays of one shape."""

    def __init__(self, lhs: Side, rhs: Side, *, integers: Integers = "slope") -> None:
        self.sides = lhs, rhs
        self.integers = integers
        self._steps: dict[DType, _Steps] = {}

    def expressions(self, params: Params, dtype: DType, operands: Sequence[Expr]) -> tuple[object, ...]:
        """Return both gradients for operands of one shape."""
        return tuple(side(*operands) for side in self.sides)

    def steps(self, dtype: DType) -> _Steps:
        """Return the formulas for arrays of ``dtype``."""
        cached = self._steps.get(dtype)
        if cached is None:
            cached = self._steps[dtype] = _Steps(self.sides, self.integers, dtype)
        return cached

    def bind(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return a call of the formulas on each block, or of sums of rows for unequal shapes."""
        steps = self.steps(inputs[0].dtype)
        if inputs[1].shape != inputs[2].shape:
            return ctx.repeated(partial(_unequal_shapes, steps, ctx, inputs, outputs))
        return bound_blocks(ctx, partial(steps.run, ctx.xp), partial(steps.equal_blocks, ctx, inputs, outputs))

    def workspace(self, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        """Return the scratch bytes of a call."""
        g, a, b = inputs
        scratch = self.steps(g.dtype).scratch
        if a.shape == b.shape:
            return block_bytes(math.prod(g.shape), scratch)
        shape, *input_shapes = collapse(g.shape, a.shape, b.shape)
        rows = rows_per_block(shape)
        block = (rows, *shape[1:])
        part = (_part_size(shape, input_shapes, rows),)
        return take_bytes((block, g.dtype), (part, g.dtype), *((block, dtype) for dtype in scratch))


def sum_backward(sign: int) -> Kernel:
    """Return the backward kernel of lhs + rhs (``sign`` 1) or lhs - rhs (-1).

    It sums the output gradient to each input's shape and multiplies the right gradient by ``sign``.
    """

    @kernel(formula=lambda p, g: (g, -g if sign < 0 else g))
    def compute(xp: ArrayModule, p: Params, g: RawArray, lhs: RawArray | None, rhs: RawArray | None) -> None:
        # Left before right: a left gradient in g's memory leaves g unchanged, a right one may change it.
        if lhs is not None:
            reduce_to(xp, g, lhs)
        if rhs is not None:
            if sign < 0 and rhs.shape == g.shape:
                xp.negative(g, out=rhs)
            else:
                reduce_to(xp, g, rhs)
                if sign < 0:
                    xp.negative(rhs, out=rhs)

    return compute
