"""Kernels of gradients: a formula of several arrays that broadcast, and the gradient of each, summed to its shape.

The gradients are computed block by block in scratch and added to those of smaller arrays, so scratch stays far below
the size of the output. Blocks depend only on shapes, so every sum has one fixed order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from weftplan.ops.core.expression import Kind, dtype_of
from weftplan.ops.core.forms import Call
from weftplan.ops.core.formula_kernel import Choices, Formula, FormulaKernel, Integers
from weftplan.ops.core.kernels import (
    bound_blocks,
    first_part,
    part,
    reduce_to,
    rows_per_block,
    tile_shape,
    tiles,
)
from weftplan.ops.core.lowering import LoweredFormula
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, DType, Params, Shape, SpecLike, TensorSpec, Workspace
from weftplan.support.array_types import ArrayModule, RawArray

_BYTE = np.dtype(np.uint8)


class _Sum(NamedTuple):
    """A gradient that is a sum over blocks.

    Attributes:
        shape: its shape, as few axes as possible.
        total: dtype of an array for its sum apart from the gradient, or None.
        share: dtype and greatest shape of a block's sum that is added to it; None: a block writes its sum.
    """

    shape: Shape
    total: DType | None
    share: tuple[Shape, DType] | None


class _Group(NamedTuple):
    """Gradients that are computed together: the program and its arguments, in scratch for the greatest block."""

    program: LoweredFormula
    used: tuple[int, ...]
    outputs: tuple[int, ...]
    products: dict[int, tuple[Shape, DType]]
    """By index of an output that is a sum: the terms of a block."""
    scratch: list[tuple[Shape, DType]]


class _Plan(NamedTuple):
    """The blocks, groups and sums of a call."""

    shapes: tuple[Shape, ...]
    block: Shape
    sums: dict[int, _Sum]
    groups: list[_Group]
    scratch_bytes: int


class GradientKernel(FormulaKernel):
    """The backward kernel of a formula: from (output gradient, *inputs) the gradient of each input.

    The inputs broadcast to the output gradient, and each gradient is summed to the shape of its input.

    Args:
        formula: ``formula(p, g, *inputs)`` returns all gradients before the sums.
        inputs: number of arrays that the kernel gets, ``g`` included.
        groups: indices of the gradients that are computed together, in order: the memory of a gradient may be that of
            an input that no later group reads. None: one after another.
        sums: how gradients are summed: False: each block's sum is added to the gradient. True: for all gradients but
            the first, which has the full shape, sums begin at 0 in the dtype of the computation, and are then rounded.
        overlaps, compute, integers, choices, numbers, base, align: as for :class:`FormulaKernel`; ``base`` is by
            default the dtype of the output gradient.
        limit: as for :class:`FormulaKernel`; None: blocks are whole rows.
    """

    def __init__(
        self,
        formula: Formula,
        inputs: int,
        *,
        groups: Sequence[tuple[int, ...]] | None = None,
        sums: bool = False,
        overlaps: Sequence[int] | None = None,
        compute: Kind = None,
        integers: Integers = "formula",
        choices: Choices | None = None,
        numbers: Sequence[int] = (),
        base: int | DType = 0,
        align: Callable[[Shape, Shape], Shape] | None = None,
        limit: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(
            formula, inputs, overlaps=overlaps, compute=compute, integers=integers, choices=choices, numbers=numbers,
            base=base, align=align, limit=limit,
        )  # fmt: skip
        self.outputs = inputs - 1
        self.groups = [(k,) for k in range(self.outputs)] if groups is None else groups
        self.sums = sums

    def bind(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return a call of the formulas and the sums on every block."""
        plan = self._plan(params, inputs, outputs)
        return bound_blocks(ctx, operator.call, partial(self._calls, ctx, params, plan, inputs, outputs))

    def bare_form(self, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        """Return None: there is no faster form."""

    def workspace(self, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        """Return the scratch bytes of a call."""
        plan = self._plan(params, inputs, outputs)
        totals = [(one.shape, one.total) for one in plan.sums.values() if one.total is not None]
        return take_bytes(*totals, ((plan.scratch_bytes,), _BYTE))

    def _plan(self, params: Params, inputs: Sequence[SpecLike | None], outputs: Sequence[SpecLike | None]) -> _Plan:
        specs = [spec for spec in inputs if spec is not None]
        shape, *shapes = self.broadcast(specs[0].shape, specs)
        if self.limit is None:
            block = (rows_per_block(shape), *shape[1:])
        else:
            block = tile_shape(shape, self.limit(math.prod(shape)))
        wide = dtype_of(self.compute, self.base_dtype(specs, ()))
        sums: dict[int, _Sum] = {}
        dtypes: list[DType | None] = [None if spec is None else spec.dtype for spec in outputs]
        for k, (own, dtype) in enumerate(zip(shapes[1:], dtypes, strict=True)):
            if dtype is None or (k == 0 if self.sums else own == shape):
                continue
            held = wide if self.sums else dtype
            is_shared = self.sums or any(
                dim == 1 and step < full for dim, step, full in zip(own, block, shape, strict=True)
            )
            share = (tuple(map(min, own, block)), held) if is_shared else None
            sums[k] = _Sum(own, None if held == dtype else held, share)
            dtypes[k] = held
        groups = []
        by_name = {f"x{k}": own for k, own in enumerate(shapes)}
        for members in self.groups:
            wanted = tuple(k for k in members if dtypes[k] is not None)
            if wanted:
                kinds = [dtype if k in wanted else None for k, dtype in enumerate(dtypes)]
                program, used = self.program(params, inputs, *kinds, apart=tuple(k for k in wanted if k in sums))
                products = {k: (block, dtype) for k in wanted if k in sums and (dtype := dtypes[k]) is not None}
                groups.append(_Group(program, used, wanted, products, program.scratch_in(block, by_name)))
        nbytes = max((take_bytes(*_specs(group, sums)) for group in groups), default=0)
        return _Plan((shape, *shapes), block, sums, groups, nbytes)

    def _calls(
        self, ctx: Workspace, params: Params, plan: _Plan, inputs: Arrays, outputs: Arrays
    ) -> Iterator[tuple[Callable[..., object], ...]]:
        """Yield functions with their arguments: the formulas of every group and the sums, block by block."""
        xp, (shape, *shapes) = ctx.xp, plan.shapes
        arrays = [array.reshape(own) for array, own in zip(inputs, shapes, strict=True)]
        targets = [None if out is None else out.reshape(own) for out, own in zip(outputs, shapes[1:], strict=True)]
        for k, one in plan.sums.items():
            if one.total is not None:
                targets[k] = ctx.take(one.shape, one.total)
            if self.sums or not math.prod(shape):
                yield targets[k].fill, 0
        memory = ctx.take((plan.scratch_bytes,), _BYTE)
        prepared = []
        for group in plan.groups:
            step = group.program.ufunc(xp) or group.program.step(xp, params)
            space = Workspace(xp, memory)
            prepared.append((group, step, [space.take(*spec) for spec in _specs(group, plan.sums)]))
        for tile in tiles(shape, plan.block):
            for group, step, spaces in prepared:
                free = iter([first_part(space, tile) for space in spaces])
                terms = {k: next(free) for k in group.products}
                shares = {k: next(free) for k in terms if plan.sums[k].share is not None}
                results = [terms[k] if k in terms else part(targets[k], tile) for k in group.outputs]
                yield (step, *[part(arrays[k], tile) for k in group.used], *results, *free)
                for k, term in terms.items():
                    cuts = zip(tile, plan.sums[k].shape, strict=False)
                    is_first = not self.sums and all(cut.start == 0 for cut, dim in cuts if dim == 1)
                    yield _add, xp, term, part(targets[k], tile), None if is_first else shares.get(k)
        for k, one in plan.sums.items():
            if one.total is not None:
                yield (partial(xp.copyto, outputs[k].reshape(one.shape), targets[k], casting="unsafe"),)


def _specs(group: _Group, sums: dict[int, _Sum]) -> list[tuple[Shape, DType]]:
    """Return the scratch of a group: terms of sums, the sums of a block, and that of the program."""
    shares = [share for k in group.products if (share := sums[k].share) is not None]
    return [*group.products.values(), *shares, *group.scratch]


def _add(xp: ArrayModule, terms: RawArray, target: RawArray, share: RawArray | None) -> None:
    """Sum ``terms`` to ``target``, or sum them to ``share`` and add this to ``target``."""
    if share is None:
        reduce_to(xp, terms, target)
    else:
        reduce_to(xp, terms, share)
        xp.add(target, share, out=target)
