"""Kernels of gradients: a formula of several arrays that broadcast, and the gradient of each, summed to its shape.

The gradients are computed block by block in scratch and added to those of smaller arrays, so scratch stays far below
the size of the output. Blocks depend only on shapes, so every sum has one fixed order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from weftplan.ops.core.expression import dtype_of
from weftplan.ops.core.forms import Call
from weftplan.ops.core.formula_kernel import Formula, FormulaKernel
from weftplan.ops.core.kernels import accumulator, bound_blocks
from weftplan.ops.core.layout import Layout, layout
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
        axes: the axes of a block that are summed, in ``wide``.
        dtype: dtype of the terms and of the sum.
        is_apart: whether the sum has another array than the gradient.
        share: the shape of a block's sum, if several are added.
    """

    shape: Shape
    axes: tuple[int, ...]
    dtype: DType
    wide: DType
    is_apart: bool
    share: Shape | None


class _Group(NamedTuple):
    """Gradients that are computed together: the program, the indices of its inputs and outputs, and scratch.

    The scratch is, for the greatest block, for each output that is a sum its terms, and their sum if several blocks are
    added, and that of the program.
    """

    program: LoweredFormula
    used: tuple[int, ...]
    outputs: tuple[int, ...]
    scratch: tuple[Sequence[Spec | None], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the scratch."""
        return take_bytes(*[spec for specs in self.scratch for spec in specs if spec is not None])


class _Plan(NamedTuple):
    """The blocks of calls with the same shapes and dtypes, the sums by output, the groups, and the bytes of a group."""

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
        base: by default 0, the output gradient.
        limit: as for :class:`FormulaKernel`; None: blocks are whole rows.
        options: those of :class:`FormulaKernel`.
    """

    full = 0

    def __init__(
        self, formula: Formula, inputs: int, *, groups: Sequence[tuple[int, ...]] | None = None, sums: bool = False,
        base: int | DType = 0, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(formula, inputs, base=base, **options)
        self.outputs = inputs - 1
        self.groups = [(k,) for k in range(self.outputs)] if groups is None else groups
        self.sums = sums

    def bind(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return a call of the formulas and the sums on every block."""
        plan: _Plan = self.plan(params, inputs, outputs)
        count = (len(plan.groups) + len(plan.sums)) * plan.place.number
        return bound_blocks(ctx, operator.call, partial(self._calls, ctx, params, plan, inputs, outputs), count)

    def bare_form(self, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        """Return None: there is no faster form."""

    def workspace(self, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        """Return the scratch bytes of a call."""
        plan: _Plan = self.plan(params, inputs, outputs)
        totals = [(one.shape, one.dtype) for one in plan.sums.values() if one.is_apart]
        return take_bytes(*totals, ((plan.nbytes,), _BYTE))

    def _plan(
        self, params: Params, inputs: Sequence[SpecLike | None], outputs: Sequence[SpecLike | None], limit: int
    ) -> _Plan:
        specs = [spec for spec in inputs if spec is not None]
        place = layout([spec.shape for spec in (*specs[1:], specs[0])], self.align, limit, rows=self.limit is None)
        *shapes, shape = place.shapes
        dtypes = {k: spec.dtype for k, spec in enumerate(outputs) if spec is not None}
        sums: dict[int, _Sum] = {}
        for k, dtype in dtypes.items():
            own = shapes[k]
            if k == 0 if self.sums else own == shape:
                continue
            held = dtype_of(self.compute, self.base_dtype(specs, ())) if self.sums else dtype
            axes = tuple(axis for axis, dim in enumerate(own) if dim != shape[axis])
            share = None
            if self.sums or any(place.block[axis] < shape[axis] for axis in axes):
                share = tuple(min(dim, max(1, step)) for dim, step in zip(own, place.block, strict=True))
            sums[k] = _Sum(own, axes, held, accumulator(held), held != dtype, share)
        groups = []
        for members in self.groups:
            wanted = tuple(k for k in sorted(members) if k in dtypes)
            if wanted:
                kinds = [
                    (sums[k].dtype if k in sums else dtypes[k]) if k in wanted else None for k in range(len(outputs))
                ]
                program, used = self.program(params, inputs, *kinds, apart=tuple(sums))
                terms = [(place.block, sums[k].dtype) if k in sums else None for k in wanted]
                shares = [(share, sums[k].dtype) if k in sums and (share := sums[k].share) else None for k in wanted]
                scratch = program.scratch_in(place.block, {f"x{k}": own for k, own in enumerate(shapes, 1)})
                groups.append(_Group(program, used, wanted, (terms, shares, scratch)))
        return _Plan(place, sums, groups, max((group.nbytes for group in groups), default=0))

    def _calls(
        self, ctx: Workspace, params: Params, plan: _Plan, inputs: Arrays, outputs: Arrays
    ) -> Iterator[tuple[object, ...]]:
        """Yield functions with their arguments: the formulas of every group and the sums, block by block."""
        xp, place = ctx.xp, plan.place
        *shapes, shape = place.shapes
        arrays = [array.reshape(own) for array, own in zip(inputs, (shape, *shapes), strict=True)]
        targets: list[Any] = [
            None if out is None else out.reshape(own) for out, own in zip(outputs, shapes, strict=True)
        ]
        for k, one in plan.sums.items():
            if one.is_apart:
                targets[k] = ctx.take(one.shape, one.dtype)
            if self.sums:
                yield targets[k].fill, 0
        memory = ctx.take((plan.nbytes,), _BYTE)
        prepared = []
        for group in plan.groups:
            take = Workspace(xp, memory).take
            spaces = [[None if spec is None else take(*spec) for spec in specs] for specs in group.scratch]
            step = group.program.ufunc(xp) or group.program.step(xp, params)
            reads = [(k - 1, arrays[k]) for k in group.used]  # the index in ``place.shapes``; the last shape is full
            prepared.append((step, reads, [(k, targets[k], plan.sums.get(k)) for k in group.outputs], spaces))
        for block in place.blocks():
            parts = block.parts
            for step, reads, results, spaces in prepared:
                terms, shares, scratch = map(block.trimmed, spaces)
                outs = [
                    target[parts[k]] if one is None else term
                    for (k, target, one), term in zip(results, terms, strict=True)
                ]
                yield (step, *[array[parts[at]] for at, array in reads], *outs, *scratch)
                for (k, target, summed), term, share in zip(results, terms, shares, strict=True):
                    if summed is not None:
                        is_first = share is not None and not self.sums and _is_first(block.cuts, summed.shape)
                        yield _add, xp, summed, term, target[parts[k]], None if is_first else share
        for k, one in plan.sums.items():
            if one.is_apart:
                yield (partial(xp.copyto, outputs[k].reshape(one.shape), targets[k], casting="unsafe"),)


def _is_first(cuts: tuple[slice, ...], shape: Shape) -> bool:
    """Return whether a block is the first that adds to its part of a sum of this shape."""
    return all(cut.start == 0 for cut, dim in zip(cuts, shape, strict=False) if dim == 1)


def _add(xp: ArrayModule, one: _Sum, terms: RawArray, target: RawArray, share: RawArray | None) -> None:
    """Sum ``terms`` to ``target``, or sum them to ``share`` and add this to ``target``."""
    out = target if share is None else share
    if one.axes:
        xp.sum(terms, axis=one.axes, dtype=one.wide, out=out, keepdims=True)
    else:
        xp.copyto(out, terms)
    if share is not None:
        xp.add(target, share, out=target)
