"""Kernel forms: decorators that make kernels of functions with one argument per array.

:func:`kernel` is the usual form. The function gets the array module, the parameters, the inputs, the outputs (None if
unwanted) and its scratch arrays, each as one argument, and can always be replayed::

    @kernel
    def _double(xp: ArrayModule, p: Params, x: RawArray, out: RawArray) -> None:
        xp.add(x, x, out=out)

:func:`workspace_kernel` is for kernels whose helper functions take scratch themselves: its function gets a
:class:`~weftplan.ops.core.schema.Workspace` in place of the array module. :func:`context_kernel` is for kernels that
depend on the run, through random numbers or the training flag: its function gets the whole
:class:`~weftplan.ops.core.schema.OpContext`, and cannot be replayed. Elementwise formulas are a
:class:`~weftplan.ops.core.formula_kernel.FormulaKernel`, which cuts large arrays into blocks.

Each form satisfies the protocol :data:`~weftplan.ops.core.schema.Kernel`. Kernels keep no state between calls, so any
number of threads may share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, overload

import numpy as np

from weftplan.ops.core.schema import Arrays, DType, Kernel, OpContext, Params, Shape, TensorSpec, Workspace, aligned
from weftplan.support.array_types import RawArray

Call = Callable[[], object]
Function = Callable[..., None]
ScratchSpecs = Sequence[tuple[Shape, DType]]
Scratch = Callable[..., ScratchSpecs]
"""``scratch(p, *inputs, *outputs)`` returns the shape and dtype of every scratch array. It may read only ``shape`` and
``dtype`` of its arguments: the planner passes specs, and a call passes its arrays (None for an ignored input or an
unwanted output)."""
Specs = Sequence[TensorSpec]


BareForm = Callable[[Params, Specs, Specs], "Callable[..., object] | None"]
"""A function that returns the bare form of a kernel for a call, or None (:data:`weftplan.ops.core.schema.Kernel`)."""
Formula = Callable[..., "tuple[Any, ...]"]


class BoundKernel:
    """A kernel whose calls are those of :meth:`bind`, and may be repeated in every run."""

    __slots__ = ()
    replayable = True

    def bind(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return a call on these arrays, which may be repeated."""
        raise NotImplementedError

    def __call__(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        self.bind(ctx, params, inputs, outputs)()


class ArrayKernel(BoundKernel):
    """A kernel that calls ``function(xp, p, *inputs, *outputs, *scratch)``; see :func:`kernel`."""

    __slots__ = ("elementwise", "expressions", "function", "scratch", "special", "workspace")

    def __init__(
        self,
        function: Function,
        scratch: Scratch | None = None,
        formula: Formula | None = None,
        special: BareForm | None = None,
    ) -> None:
        self.function = function
        self.elementwise = formula is not None
        self.expressions = None if formula is None else lambda params, dtype, operands: formula(params, *operands)
        self.scratch = scratch
        self.special = special
        self.workspace = None if scratch is None else self._bytes
        """The ``Op.workspace`` of this kernel; None: it takes no scratch."""

    def bind(self, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return the function with all arguments bound, or the special bare form."""
        special = _special_call(self.special, ctx, params, inputs, outputs, () if self.scratch is None else ctx.flat)
        if special is not None:
            return special
        specs = () if self.scratch is None else self.scratch(params, *inputs, *outputs)
        return partial(self.function, ctx.xp, params, *inputs, *outputs, *[ctx.take(*spec) for spec in specs])

    def bare_form(self, params: Params, inputs: Specs, outputs: Specs) -> Callable[..., object]:
        """Return the function with NumPy and ``params`` bound; it gets the arrays, then the flat workspace if any."""
        special = None if self.special is None else self.special(params, inputs, outputs)
        if special is not None:
            return special
        function = partial(self.function, np, params)
        return function if self.scratch is None else with_views(function, self.scratch(params, *inputs, *outputs))

    @property
    def __wrapped__(self) -> Function:
        return self.function

    def _bytes(self, params: Params, inputs: Specs, outputs: Specs) -> int:
        assert self.scratch is not None
        return sum(aligned(TensorSpec(*spec).nbytes) for spec in self.scratch(params, *inputs, *outputs))


def _special_call(
    special: BareForm | None, ctx: Workspace, params: Params, inputs: Arrays, outputs: Arrays, flat: Sequence[RawArray]
) -> Call | None:
    """Return the call of a special bare form, if there is one for NumPy arrays of which none is None."""
    arrays = (*inputs, *outputs)
    if special is None or ctx.xp is not np or any(array is None for array in arrays):
        return None
    specs = [TensorSpec(array.shape, array.dtype) for array in arrays]
    function = special(params, specs[: len(inputs)], specs[len(inputs) :])
    return None if function is None else partial(function, *arrays, *flat)


def with_views(function: Callable[..., object], specs: ScratchSpecs) -> Callable[..., object]:
    """Return a function that calls ``function(*arrays, *scratch)`` with scratch arrays of the specs in ``specs``.

    Its arguments are the arrays, and a flat workspace that contains the scratch arrays unless these have no bytes.
    """
    ranges, end = [], 0
    for shape, dtype in specs:
        nbytes = TensorSpec(shape, dtype).nbytes
        ranges.append((end, end + nbytes, dtype, shape))
        end += aligned(nbytes)
    if not end:
        return lambda *arrays: function(*arrays, *(np.empty(shape, dtype) for shape, dtype in specs))

    def call(*arrays: RawArray) -> None:
        workspace = arrays[-1]
        function(
            *arrays[:-1], *[workspace[start:stop].view(kind).reshape(shape) for start, stop, kind, shape in ranges]
        )

    return call


class ContextKernel:
    """A kernel that calls ``function(ctx, p, *inputs, *outputs)``; see :func:`context_kernel`."""

    __slots__ = ("function", "special")
    replayable = False

    def __init__(self, function: Function, special: BareForm | None = None) -> None:
        self.function = function
        self.special = special

    def __call__(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        self.function(ctx, params, *inputs, *outputs)

    @property
    def __wrapped__(self) -> Function:
        return self.function

    def bind(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return the function with all arguments bound, for calls in a run like that of ``ctx``."""
        special = _special_call(self.special, ctx, params, inputs, outputs, ctx.flat)
        return special or ctx.repeated(partial(self.function, ctx, params, *inputs, *outputs))

    def bare_form(self, params: Params, inputs: Specs, outputs: Specs) -> Callable[..., object] | None:
        """Return the special bare form if there is one."""
        return None if self.special is None else self.special(params, inputs, outputs)


class WorkspaceKernel(ContextKernel):
    """A kernel that calls ``function(ctx, p, *inputs, *outputs)``, which uses only the workspace of ``ctx``."""

    __slots__ = ()
    replayable = True
    workspace = None  # the operator declares it


class ChosenKernel:
    """A kernel that delegates to another kernel, which depends on the parameters.

    Args:
        choose: returns the chosen kernel and its parameters, from the parameters of the call.
        elementwise: whether every kernel that ``choose`` may return works elementwise on arrays of one shape.
    """

    __slots__ = ("choose", "elementwise")

    def __init__(self, choose: Callable[[Params], tuple[Kernel, Params]], *, elementwise: bool = False) -> None:
        self.choose = choose
        self.elementwise = elementwise

    @property
    def __wrapped__(self) -> Callable[..., object]:
        return self.choose

    def __call__(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        chosen, values = self.choose(params)
        chosen(ctx, values, inputs, outputs)

    def workspace(self, params: Params, inputs: Specs, outputs: Specs) -> int:
        """Return the scratch bytes that the chosen kernel declares."""
        chosen, values = resolved(self, params)
        rule = getattr(chosen, "workspace", None)
        return rule(values, inputs, outputs) if rule else 0


@overload
def kernel(function: Function, /) -> ArrayKernel: ...


@overload
def kernel(
    *, scratch: Scratch | None = None, formula: Formula | None = None, bare_form: BareForm | None = None
) -> Callable[[Function], ArrayKernel]: ...


def kernel(
    function: Function | None = None,
    /,
    *,
    scratch: Scratch | None = None,
    formula: Formula | None = None,
    bare_form: BareForm | None = None,
) -> ArrayKernel | Callable[[Function], ArrayKernel]:
    """Decorator: make a kernel of ``function(xp, p, *inputs, *outputs, *scratch)``.

    Args:
        scratch: returns the shapes and dtypes of the scratch arrays; the operator's workspace follows from them.
        formula: ``formula(p, *inputs)`` returns the outputs as expressions, for calls on arrays of one shape, which
            may then be fused.
        bare_form: returns a faster form for NumPy arrays.

    >>> @kernel(scratch=lambda p, x, out: [(x.shape, x.dtype)])
    ... def cube(xp, p, x, out, square):
    ...     xp.multiply(x, x, out=square)
    ...     xp.multiply(square, x, out=out)
    >>> cube.workspace({}, [TensorSpec((3,), np.dtype("float32"))], [TensorSpec((3,), np.dtype("float32"))])
    64
    """
    if function is None:
        return lambda decorated: ArrayKernel(decorated, scratch, formula, bare_form)
    return ArrayKernel(function)


def context_kernel(function: Function) -> ContextKernel:
    """Decorator: make a kernel of ``function(ctx, p, *inputs, *outputs)``, which cannot be replayed."""
    return ContextKernel(function)


def workspace_kernel(function: Function) -> WorkspaceKernel:
    """Decorator: make a kernel of ``function(ctx, p, *inputs, *outputs)``, whose ``ctx`` is a workspace."""
    return WorkspaceKernel(function)


def resolved(kernel: Kernel, params: Params) -> tuple[Kernel, Params]:
    """Return the kernel that computes a call with these parameters, and its own parameters."""
    while isinstance(kernel, ChosenKernel):
        kernel, params = kernel.choose(params)
    return kernel, params


def bind(kernel: Kernel, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
    """Return a call of any kernel on these arrays, which may be repeated in a run like that of ``ctx``."""
    kernel, params = resolved(kernel, params)
    method: Callable[..., Call] | None = getattr(kernel, "bind", None)
    if method is None:
        return ctx.repeated(partial(kernel, ctx, params, inputs, outputs))
    return method(ctx, params, inputs, outputs)
