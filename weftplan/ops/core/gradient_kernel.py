"""Kernels of gradients: a formula of several arrays that broadcast, and the gradient of each, summed to its shape.

The gradients are computed block by block in scratch and added to those of smaller arrays, so scratch stays far below
the size of the output. Blocks depend only on shapes, so every sum has one fixed order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from weftplan.ops.core.expression import Kind, dtype_of
from weftplan.ops.core.forms import Call
from weftplan.ops.core.formula_kernel import Choices, Formula, FormulaKernel, Integers
from weftplan.ops.core.kernels import accumulator, bound_blocks
from weftplan.ops.core.layout import Align, Layout
from weftplan.ops.core.lowering import LoweredFormula
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, DType, Params, Shape, SpecLike, TensorSpec, Workspace
from weftplan.support.array_types import ArrayModule, RawArray

_BYTE = np.dtype(np.uint8)


Spec = tuple[Shape, DType]


class _Sum(NamedTuple):
    """A gradient that is a sum over blocks.

    Attributes:
        shape: its shape, as few axes as possible.
        axes: the axes of a block that are summed.
        dtype: dtype in which a block is summed.
        total: dtype of an array for its sum apart from the gradient, or None.
    """

    shape: Shape
    axes: tuple[int, ...]
    dtype: DType
    total: DType | None


class _Group(NamedTuple):
    """Gradients that are computed together, with scratch for the greatest block.

    Attributes:
        program: the formula, and ``used`` the indices of the inputs that it gets.
        outputs: indices of the gradients.
        terms: for each gradient that is a sum: the values of a block.
        shares: for each sum to which several blocks add: that of a block.
        scratch: that of the program.
    """

    program: LoweredFormula
    used: tuple[int, ...]
    outputs: tuple[int, ...]
    terms: list[Spec | None]
    shares: list[Spec | None]
    scratch: list[Spec]

    @property
    def nbytes(self) -> int:
        """Bytes of the scratch."""
        return take_bytes(*[spec for spec in (*self.terms, *self.shares, *self.scratch) if spec is not None])


class _Plan(NamedTuple):
    """The blocks, groups and sums of calls with the same shapes and dtypes, and the bytes of a group's scratch."""

    place: Layout
    sums: dict[int, _Sum]
    groups: list[_Group]
    nbytes: int


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
        align: Align | None = None,
        limit: Callable[[int], int] | None = None,
    ) -> None:
        super().__init__(
            formula, inputs, overlaps=overlaps, compute=compute, integers=integers, choices=choices, numbers=numbers,
            base=base, align=align, limit=limit,
        )  # fmt: skip
        self.outputs = inputs - 1
        self.groups = [(k,) for k in range(self.outputs)] if groups is None else groups
        self.rows = limit is None
        self.sums = sums

    def bind(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return a call of the formulas and the sums on every block."""
        plan: _Plan = self.plan(params, inputs, outputs)
        count = (len(plan.groups) + len(plan.sums)) * plan.place.count
        return bound_blocks(ctx, operator.call, partial(self._calls, ctx, params, plan, inputs, outputs), count)

    def bare_form(self, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        """Return None: there is no faster form."""

    def workspace(self, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        """Return the scratch bytes of a call."""
        plan: _Plan = self.plan(params, inputs, outputs)
        totals = [(one.shape, one.total) for one in plan.sums.values() if one.total is not None]
        return take_bytes(*totals, ((plan.nbytes,), _BYTE))

    def _plan(self, params: Params, inputs: Sequence[SpecLike | None], outputs: Sequence[SpecLike | None]) -> _Plan:
        specs = [spec for spec in inputs if spec is not None]
        place = self.layout(specs[0], specs[1:])
        *shapes, shape = place.shapes
        wide = dtype_of(self.compute, self.base_dtype(specs, ()))
        sums: dict[int, _Sum] = {}
        shares: dict[int, Spec] = {}
        dtypes: list[DType | None] = [None if spec is None else spec.dtype for spec in outputs]
        for k, (own, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            if dtype is None or (k == 0 if self.sums else own == shape):
                continue
            dtypes[k] = held = wide if self.sums else dtype
            axes = tuple(axis for axis, dim in enumerate(own) if dim != shape[axis])
            sums[k] = _Sum(own, axes, accumulator(held), None if held == dtype else held)
            if self.sums or any(place.block[axis] < shape[axis] for axis in axes):
                shares[k] = tuple(min(dim, max(1, step)) for dim, step in zip(own, place.block, strict=True)), held
        groups = []
        by_name = {f"x{k}": own for k, own in enumerate(shapes, 1)}
        for members in self.groups:
            wanted = tuple(k for k in members if dtypes[k] is not None)
            if wanted:
                kinds = [dtype if k in wanted else None for k, dtype in enumerate(dtypes)]
                program, used = self.program(params, inputs, *kinds, apart=tuple(k for k in wanted if k in sums))
                terms = [
                    (place.block, dtype) if k in sums and (dtype := dtypes[k]) is not None else None for k in wanted
                ]
                scratch = program.scratch_in(place.block, by_name)
                groups.append(_Group(program, used, wanted, terms, [shares.get(k) for k in wanted], scratch))
        return _Plan(place, sums, groups, max((group.nbytes for group in groups), default=0))

    def _calls(
        self, ctx: Workspace, params: Params, plan: _Plan, inputs: Arrays, outputs: Arrays
    ) -> Iterator[tuple[Callable[..., object], ...]]:
        """Yield functions with their arguments: the formulas of every group and the sums, block by block."""
        xp, place = ctx.xp, plan.place
        *shapes, shape = place.shapes
        arrays = [array.reshape(own) for array, own in zip(inputs, (shape, *shapes), strict=True)]
        targets = [None if out is None else out.reshape(own) for out, own in zip(outputs, shapes, strict=True)]
        for k, one in plan.sums.items():
            if one.total is not None:
                targets[k] = ctx.take(one.shape, one.total)
            if self.sums:
                yield targets[k].fill, 0
        memory = ctx.take((plan.nbytes,), _BYTE)
        prepared = []
        for group in plan.groups:
            take = Workspace(xp, memory).take
            spaces = [
                [None if spec is None else take(*spec) for spec in specs]
                for specs in (group.terms, group.shares, group.scratch)
            ]
            step = group.program.ufunc(xp) or group.program.step(xp, params)
            results = [(k, targets[k], plan.sums.get(k)) for k in group.outputs]
            prepared.append((step, [(k - 1, arrays[k]) for k in group.used], results, *spaces))
        for block in place.blocks():
            parts = block.parts
            for step, reads, results, *spaces in prepared:
                terms, shares, scratch = spaces if block.is_whole else map(block.trimmed, spaces)
                outs = [
                    target[parts[at]] if one is None else term
                    for (at, target, one), term in zip(results, terms, strict=True)
                ]
                yield (step, *[array[parts[at]] for at, array in reads], *outs, *scratch)
                for (at, target, one), term, share in zip(results, terms, shares, strict=True):
                    if one is not None:
                        if share is not None and not self.sums and _is_first(block.cuts, one.shape):
                            share = None
                        yield _add, xp, one, term, target[parts[at]], share
        for k, one in plan.sums.items():
            if one.total is not None:
                yield (partial(xp.copyto, outputs[k].reshape(one.shape), targets[k], casting="unsafe"),)


def _is_first(cuts: tuple[slice, ...], shape: Shape) -> bool:
    """Return whether a block is the first that adds to its part of a sum of this shape."""
    return all(cut.start == 0 for cut, dim in zip(cuts, shape, strict=False) if dim == 1)


def _add(xp: ArrayModule, one: _Sum, terms: RawArray, target: RawArray, share: RawArray | None) -> None:
    """Sum ``terms`` to ``target``, or sum them to ``share`` and add this to ``target``."""
    out = target if share is None else share
    if one.axes:
        xp.sum(terms, axis=one.axes, dtype=one.dtype, out=out, keepdims=True)
    else:
        xp.copyto(out, terms)
    if share is not None:
        xp.add(target, share, out=target)
