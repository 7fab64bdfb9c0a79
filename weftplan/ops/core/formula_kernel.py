"""Kernels of formulas: one description that runs on arrays, is prepared for replay, and is fused and compiled.

A kernel traces its formula once for each choice of parameters and each combination of dtypes. A formula of one ufunc
is one call on whole arrays. Any other runs block by block, so its scratch has at most
:func:`weftplan.ops.core.tiling.block` elements, and on a CPU a block stays in the cache between the operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from weftplan.ops.core import tiling
from weftplan.ops.core.expression import Expr, Kind, Parameters, cast, f, leaves, value_of
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.forms import BoundKernel, Call, with_views
from weftplan.ops.core.formulas import Computation, computation
from weftplan.ops.core.kernels import bound_blocks
from weftplan.ops.core.layout import Align, Layout, layout
from weftplan.ops.core.lowering import LoweredFormula, lower
from weftplan.ops.core.rules import take_bytes
from weftplan.ops.core.schema import Arrays, DType, Params, Shape, SpecLike, TensorSpec, Workspace
from weftplan.support.array_types import ArrayModule, RawArray

Formula = Callable[..., Any]
"""``formula(p, *inputs)`` returns the output, an expression or a number; with states, the output and the new states.
``p`` has the parameters (:class:`~weftplan.ops.core.expression.Parameters`)."""
Choices = Mapping[str, Callable[[Params], Any]]
"""Values by name, computed from the parameters, on which a formula may branch; a formula is traced for each."""
Integers = Literal["formula", "slope", "zero"]
"""How a gradient treats integers, by the rule of MXNet 1.9.1. "slope": the formula, with an output gradient of 1, gives
a slope in float64, which is truncated to the integer dtype and multiplied there by the output gradient; "formula": it
runs on the integers; "zero": the gradient is 0."""


_MAX_PLANS = 1024


class _Plan(NamedTuple):
    """The program of a call, the indices of the inputs that it gets, its blocks and its scratch."""

    program: LoweredFormula
    used: tuple[int, ...]
    place: Layout
    scratch: list[tuple[Shape, DType]]


class FormulaKernel(BoundKernel):
    """The kernel of a formula with one output, whose inputs broadcast to it.

    Args:
        formula: see :data:`Formula`.
        inputs: number of inputs, those that the formula does not read included; None: any number.
        states: indices of the inputs that the formula replaces.
        overlaps: indices of the inputs whose memory the output may be.
        compute: kind of the results that do not state their own.
        integer: the formula for integers other than booleans, if it is another.
        integers: see :data:`Integers`; "slope" and "zero" are for gradients, whose input 0 is the output gradient.
        choices: see :data:`Choices`.
        numbers: indices of inputs of few elements; values that depend on them alone have scratch of their own size.
        base: the dtype of the computation, or the index of the input that has it; None: the dtype of the output.
        align: how inputs of other shapes broadcast, if not by NumPy's rule.
        limit: returns the greatest number of elements of a block, of that of the output; None: that of ``tiling``.
    """

    outputs = 1
    full = -1
    """Index in (*inputs, *outputs) of an array of the full shape."""

    def __init__(
        self,
        formula: Formula,
        inputs: int | None = 1,
        *,
        states: Sequence[int] = (),
        overlaps: Sequence[int] | None = None,
        compute: Kind = None,
        integer: Formula | None = None,
        integers: Integers = "formula",
        choices: Choices | None = None,
        numbers: Sequence[int] = (),
        base: int | DType | None = None,
        align: Align | None = None,
        limit: Callable[[int], int] | None = None,
    ) -> None:
        self.formula, self.inputs, self.states, self.overlaps = formula, inputs, tuple(states), overlaps
        self.compute, self.integer, self.integers, self.base = compute, integer, integers, base
        self.align, self.limit = align, limit
        self.choices = choices or {}
        self.numbers = frozenset(f"x{k}" for k in numbers)
        self.elementwise = not numbers
        self._programs: dict[object, tuple[LoweredFormula, tuple[int, ...]]] = {}
        self._plans: dict[object, Any] = {}
        self._computations: dict[object, Computation | None] = {}

    def chosen(self, params: Params) -> dict[str, object]:
        """Return the values of the choices."""
        return {name: choose(params) for name, choose in self.choices.items()}

    def expressions(self, params: Params, dtype: DType, operands: Sequence[Expr]) -> tuple[object, ...]:
        """Return the outputs and the new states for operands, with arrays of ``dtype``."""
        formula, traced = self.formula, Parameters(self.chosen(params), dtype)
        if not is_float(dtype):
            if self.integer is not None and dtype.kind in "iu":
                formula = self.integer
            if self.integers == "zero":
                return (0,) * self.outputs
            if self.integers == "slope":
                g, *forward_values = operands
                wide = np.dtype(np.float64)
                slopes = _as_tuple(formula(traced, 1.0, *[cast(operand, wide) for operand in forward_values]))
                return tuple([g * cast(slope, dtype) for slope in slopes])
        return _as_tuple(formula(traced, *operands))

    def computation(self, params: Params, arrays: int, dtype: DType) -> Computation | None:
        """Return the formula for compilers, which replaces array 0 and the states; None if it cannot be compiled.

        Args:
            arrays: number of inputs.
            dtype: dtype of all arrays.
        """
        key = (*self.chosen(params).values(), arrays, dtype)
        if key not in self._computations:
            self._computations[key] = computation(self, params, arrays, dtype, out=0, is_open=True)
        formula = self._computations[key]
        return None if formula is None else formula.at(params, dtype)

    def program(
        self, params: Params, inputs: Sequence[SpecLike | None], *outputs: DType | None, apart: tuple[int, ...] = ()
    ) -> tuple[LoweredFormula, tuple[int, ...]]:
        """Return the program for a call, and the indices of the inputs that it gets.

        Args:
            outputs: the dtype of each output; None: it is unwanted.
            apart: indices of outputs whose memory is certainly not that of an input.
        """
        key = (
            *self.chosen(params).values(),
            outputs,
            apart,
            *[None if spec is None else spec.dtype for spec in inputs],
        )
        lowered = self._programs.get(key)
        if lowered is None:
            lowered = self._programs[key] = self._lowered(params, inputs, outputs, apart)
        return lowered

    def base_dtype(self, inputs: Sequence[SpecLike | None], outputs: Sequence[DType | None]) -> DType:
        """Return the dtype of the computation."""
        base = self.base
        if isinstance(base, int):
            spec = inputs[base]
            assert spec is not None
            return spec.dtype
        return next(dtype for dtype in outputs if dtype is not None) if base is None else base

    def _lowered(
        self, params: Params, inputs: Sequence[SpecLike | None], outputs: Sequence[DType | None],
        apart: tuple[int, ...],
    ) -> tuple[LoweredFormula, tuple[int, ...]]:  # fmt: skip
        names = [f"x{k}" for k in range(len(inputs))]
        base = self.base_dtype(inputs, outputs)
        expressions = self.expressions(params, base, [Expr("input", name) for name in names])
        results = {names[k]: state for k, state in zip(self.states, expressions[self.outputs :], strict=True)}
        wanted = {f"out{k or ''}": k for k, dtype in enumerate(outputs) if dtype is not None}
        results.update({name: expressions[k] for name, k in wanted.items()})
        read = leaves(results.values()) | {names[k] for k in self.states}
        used = tuple(k for k, name in enumerate(names) if name in read)
        dtypes = {names[k]: spec.dtype for k in used if (spec := inputs[k]) is not None}
        dtypes.update({name: dtype for name, k in wanted.items() if (dtype := outputs[k]) is not None})
        shared = frozenset(names if self.overlaps is None else [names[k] for k in self.overlaps])
        overlaps = {name: frozenset() if k in apart else shared for name, k in wanted.items()}
        overlaps.update({names[k]: frozenset((names[k],)) for k in self.states})
        slopes = self.integers == "slope" and not is_float(base)
        program = lower(
            results, [*(names[k] for k in used), *wanted], dtypes, overlaps,
            dtype=np.dtype(np.float64) if slopes else base, compute=self.compute, numbers=self.numbers & read,
        )  # fmt: skip
        return program, used

    def bind(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return a call of the ufunc, or of the step on every block."""
        out = outputs[0]
        if out is None:  # possible if the operator has states, which then do not change either
            return nothing
        program, used = self.program(params, inputs, out.dtype)
        arrays = [inputs[k] for k in used]
        if program.single is not None:
            return self._single(program, ctx.xp, params, used, arrays, out)
        step = program.step(ctx.xp, params)
        shape = out.shape
        are_equal = all([array.shape == shape for array in arrays])  # noqa: C419 - a generator takes twice as long
        if are_equal and self.limit is None and out.size <= tiling.block():  # a plan would take 3 us, 8 % of a call
            return partial(step, *arrays, out, *[ctx.take(shape, dtype) for dtype, _ in program.scratch])
        *_, place, scratch = self.plan(params, inputs, outputs)
        views = [array.reshape(shape) for array, shape in zip((*arrays, out), place.shapes, strict=True)]
        if place.number == 1:
            return partial(step, *views, *[ctx.take(*spec) for spec in scratch])
        return bound_blocks(ctx, step, partial(_blocks, ctx, place, views, scratch), place.number)

    def bare_form(
        self, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> Callable[..., object] | None:
        """Return a function of NumPy arrays if these fit one block; None if they do not, or an input is not read."""
        out = outputs[0]
        plan: _Plan = self.plan(params, inputs, outputs)
        program, used, place, scratch = plan
        if len(used) != len(inputs):
            return None
        if program.single is not None:
            return program.ufunc(np) or program.step(np, params)
        if place.number > 1:
            return None
        step = program.step(np, params)
        if all(spec.shape == out.shape for spec in inputs):
            return with_views(step, [(out.shape, dtype) for dtype, _ in program.scratch]) if program.scratch else step
        function = with_views(step, scratch) if scratch else step
        shapes = place.shapes

        def on_views(*arrays: RawArray) -> None:
            views = [array.reshape(shape) for array, shape in zip(arrays, shapes, strict=False)]
            function(*views, *arrays[len(views) :])

        return on_views

    def function(self, xp: ArrayModule, inputs: Sequence[DType], output: DType) -> Callable[..., object]:
        """Return a function of inputs that broadcast, arrays or numbers, and the output; it allocates its scratch.

        Args:
            inputs: their dtypes; the formula reads all of them and has no parameters.
        """
        program, _ = self.program({}, [TensorSpec((), dtype) for dtype in inputs], output)
        step = program.ufunc(xp) or program.step(xp, {})
        if not program.scratch:
            return step
        empty, dtypes = xp.empty, [dtype for dtype, _ in program.scratch]
        if len(dtypes) == 1 and len(inputs) == 2:  # as below, without the time for lists of arguments
            (kind,) = dtypes
            return lambda a, b, out: step(a, b, out, empty(out.shape, kind))
        return lambda *arrays: step(*arrays, *[empty(arrays[-1].shape, dtype) for dtype in dtypes])

    def workspace(self, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        """Return the scratch bytes of a call."""
        return take_bytes(*self.plan(params, inputs, outputs).scratch)

    def plan(self, params: Params, inputs: Sequence[SpecLike | None], outputs: Sequence[SpecLike | None]) -> Any:
        """Return the plan of a call, which depends on its parameters, shapes and dtypes; plans are cached."""
        specs = [None if spec is None else (spec.shape, spec.dtype) for spec in (*inputs, *outputs)]
        full = specs[self.full]
        assert full is not None
        limit = tiling.block() if self.limit is None else self.limit(math.prod(full[0]))
        key = (*self.chosen(params).values(), limit, *specs)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._plan(params, inputs, outputs, limit)
        return plan

    def _plan(
        self, params: Params, inputs: Sequence[SpecLike | None], outputs: Sequence[SpecLike | None], limit: int
    ) -> Any:
        out = outputs[0]
        assert out is not None
        program, used = self.program(params, inputs, out.dtype)
        arrays = [spec for k in used if (spec := inputs[k]) is not None]
        place = layout([spec.shape for spec in (*arrays, out)], self.align, limit)
        scratch = program.scratch_in(place.block, dict(zip([f"x{k}" for k in used], place.shapes, strict=False)))
        return _Plan(program, used, place, scratch)

    def _single(
        self, program: LoweredFormula, xp: ArrayModule, params: Params, used: Sequence[int], arrays: Sequence[RawArray],
        out: RawArray,
    ) -> Call:  # fmt: skip
        assert program.single is not None
        name, operands, options = program.single
        named = dict(zip([f"x{k}" for k in used], arrays, strict=True))
        values: list[Any] = []
        for operand in operands:
            if isinstance(operand, str):
                values.append(named[operand])
                continue
            value = value_of(program.constants[operand], params)
            if out.dtype.kind == "f" and isinstance(value, (int, float)) and not options:
                value = np.asarray(value, dtype=out.dtype)
                value = value if xp is np else value[()]  # an array would belong to the current device and stream
            values.append(value)
        return partial(getattr(xp, name), *values, out=out, **options)


def _blocks(
    ctx: Workspace, place: Layout, views: Sequence[RawArray], scratch: Sequence[tuple[Shape, DType]]
) -> Iterator[tuple[object, ...]]:
    """Yield the arguments of a step, block by block."""
    spaces = [ctx.take(*spec) for spec in scratch]
    for block in place.blocks():
        parts = [view[part] for view, part in zip(views, block.parts, strict=True)]
        yield (*parts, *block.trimmed(spaces))


def _as_tuple(results: object) -> tuple[object, ...]:
    return results if isinstance(results, tuple) else (results,)


def nothing() -> None:
    """Do nothing."""


def ufunc_kernel(name: str, count: int) -> FormulaKernel:
    """Return the kernel that calls the function ``name`` of the array module on ``count`` inputs."""
    function = getattr(f, name)
    return FormulaKernel(lambda p, *arrays: function(*arrays), count)
