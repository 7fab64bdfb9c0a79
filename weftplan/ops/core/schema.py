"""The declaration of an operator: a frozen :class:`Op` for symbol, planner, ndarray and executor.

An operator is data and a few pure functions, independent of graphs, engines and storage:

* the *kernel* computes outputs from inputs on raw arrays of one array module;
* shape and dtype inference work in both directions on partly known lists (``None``: unknown; 0: unknown dimension);
* the *gradient rule* describes backward nodes through a small builder, so that it does not import the graph package;
* planner facts (inplace pairs, ignored inputs, workspace bytes) are declared, never discovered.

Kernel contract
---------------
Authors write functions with one argument per array (:mod:`weftplan.ops.core.forms`); callers call
``kernel(ctx, params, inputs, outputs)``. A kernel writes every ``outputs[k]`` that is not None. Any subset of the
outputs may be None: a plan drops outputs that no reader needs, and recomputation can drop any output. This changes
neither the bits of the other outputs nor those of states (except that an optimizer's step without its weight leaves the
states unchanged). A kernel that computes one output from another gets memory for an unwanted output by
:meth:`OpContext.memory_of`. The caller omits a call that changes nothing (:meth:`Op.has_work`), so the output of a
kernel with one output and no state is never None.

Inputs and outputs are contiguous. ``outputs[o]`` may be the same memory as ``inputs[i]`` only for a declared inplace
pair (i, o), and the kernel must then be correct. Kernels always *overwrite*; the caller accumulates (grad_req add,
gradient sums) in workspace that the planner counts. Scratch comes only from ``ctx.take`` (never ``np.empty`` of
activation size), and :attr:`Op.workspace` is the upper bound of its bytes. A kernel uses ``ctx.xp`` (numpy or cupy),
never ``numpy`` by name. It reads no global state except the tile sizes (:mod:`weftplan.ops.core.tiling`), which its
caller selects for the device, both for the kernel and for its workspace bytes.

Callers run kernels under ``numpy.errstate(all="ignore")``: overflow, 1 / 0 and log(0) silently give the results of
IEEE 754, as in MXNet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from weftplan.errors import MXNetError
from weftplan.support import slots
from weftplan.support.array_types import ArrayModule, DTypeLike, Generator, RawArray
from weftplan.support.tensor_types import DType as DType
from weftplan.support.tensor_types import InplacePair as InplacePair
from weftplan.support.tensor_types import Req as Req
from weftplan.support.tensor_types import Shape as Shape
from weftplan.support.tensor_types import aligned as aligned

Params = Mapping[str, Any]
"""Parsed parameters of one node, with every declared name."""
Arrays = Sequence[Any]
"""Inputs or outputs of a kernel: arrays of one array module, None for an ignored input or an unwanted output."""


class TensorSpec(NamedTuple):
    """The known shape and dtype of an input or output."""

    shape: Shape
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous array with this shape and dtype."""
        size = self.dtype.itemsize
        for dim in self.shape:
            size *= dim
        return size


class SpecLike(Protocol):
    """An object with a shape and a dtype: a :class:`TensorSpec` during planning, an array in a call."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> DType: ...


class _Required:
    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = _Required()


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of an operator: name, parser of its text or Python value, and default (REQUIRED: none).

    The order of an operator's parameters is that of MXNet's declaration. A parameter that MXNet's operator lacks is
    given ``by_name`` only.
    """

    name: str
    parse: Callable[[Any], Any]
    default: Any = REQUIRED
    doc: str = ""
    by_name: bool = False


class EntryRef(Protocol):
    """An opaque reference to an output of a node."""


class GradientBuilder(Protocol):
    """The interface by which a gradient rule reads one forward node and adds backward nodes."""

    @property
    def params(self) -> Params: ...

    @property
    def num_inputs(self) -> int: ...

    def input(self, index: int) -> EntryRef:
        """Return input ``index`` of the forward node (its recomputed copy if the planner recomputes it)."""
        ...

    def output(self, index: int) -> EntryRef:
        """Return output ``index`` of the forward node, counting hidden outputs."""
        ...

    def ograd(self, index: int = 0) -> EntryRef:
        """Return the incoming gradient of output ``index``, summed over all uses of the output."""
        ...

    def node(
        self,
        op: str | Op,
        inputs: Sequence[EntryRef],
        params: Mapping[str, object] | None = None,
        *,
        suffix: str = "backward",
    ) -> Sequence[EntryRef]:
        """Add a node of ``op`` named ``<forward name>_<suffix>`` and return all its outputs.

        ``params``: None: the forward node's :attr:`params`, if ``op`` declares the same parameters.
        """
        ...

    def showing(self, params: Params) -> GradientBuilder:
        """Return a builder for the same node that shows ``params`` as its parameters, for another operator's rule."""
        ...


GradientRule = Callable[[GradientBuilder], Sequence["EntryRef | None"]]
"""A function that returns the gradient of each forward input; None: no gradient (the planner then uses zeros)."""


class Workspace:
    """The array module and the scratch of one call, for one thread."""

    __slots__ = ("_offset", "_workspace", "xp")

    def __init__(self, xp: ArrayModule, workspace: RawArray | None = None) -> None:
        self.xp = xp
        self._workspace: Any = workspace
        self._offset = 0

    def take(self, shape: Shape, dtype: DTypeLike) -> RawArray:
        """Return an uninitialised contiguous array from the workspace, aligned to 64 bytes and valid in this call."""
        nbytes = np.dtype(dtype).itemsize
        for dim in shape:
            nbytes *= dim
        if not nbytes:  # operators declare no bytes for empty arrays, so there may be no workspace
            empty: RawArray = self.xp.empty(shape, dtype)
            return empty
        start = self._offset
        end = start + aligned(nbytes)
        have = 0 if self._workspace is None else self._workspace.size
        if end > have:
            raise MXNetError(
                f"kernel took {end} bytes of workspace but its operator declared {have}: mend the operator's workspace"
            )
        self._offset = end
        scratch: RawArray = self._workspace[start : start + nbytes].view(dtype).reshape(shape)
        return scratch

    @property
    def room(self) -> int:
        """Bytes of the workspace that have not been taken; at first, at least the bytes that the operator declares."""
        return 0 if self._workspace is None else int(self._workspace.size) - self._offset

    @property
    def flat(self) -> tuple[RawArray, ...]:
        """A tuple with all bytes of the workspace as one array; an empty tuple if there is no workspace."""
        return () if self._workspace is None else (self._workspace,)

    def repeated(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return a repeatable form of ``call``: each run takes scratch from what is free in this workspace now."""
        if self._workspace is None:
            return call
        start = self._offset

        def rerun() -> None:
            self._offset = start
            call()

        return rerun


class OpContext(Workspace):
    """The workspace of a call and facts about the run: everything that a kernel may use in addition to its arrays."""

    __slots__ = ("executor_state", "is_train", "output_shapes", "random_key", "recompute")

    def __init__(
        self,
        xp: ArrayModule,
        *,
        is_train: bool = False,
        workspace: RawArray | None = None,
        random_key: tuple[int, int] = (0, 0),
        recompute: bool = False,
        output_shapes: Sequence[Shape] = (),
        executor_state: dict[object, object] | None = None,
    ) -> None:
        super().__init__(xp, workspace)
        self.is_train = is_train
        self.random_key = random_key
        self.recompute = recompute
        """Whether this call repeats a forward node in the backward pass; it updates no moving statistics then."""
        self.output_shapes = output_shapes
        """Shapes of all outputs, unwanted outputs (None) included; empty if every output is wanted."""
        self.executor_state: dict[object, object] = {} if executor_state is None else executor_state
        """Objects that kernels keep between calls of one executor, by keys of their own; else empty in every call."""

    def memory_of(self, outputs: Arrays, index: int, dtype: DType) -> RawArray:
        """Return output ``index``, or new memory of its shape and ``dtype`` if the output is unwanted (None).

        Plans do not count new memory, so a kernel calls this only if it has no other place for the values.
        """
        array: RawArray | None = outputs[index]
        if array is None:
            array = self.xp.empty(self.output_shapes[index], dtype)
        return array

    def generator(self) -> Generator:
        """Return a generator seeded only by ``random_key``, so that a recomputed node draws the same numbers."""
        seed, counter = self.random_key
        if self.xp is np:
            return np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), counter & (2**64 - 1)]))
        generator: Generator = slots.RANDOM_GENERATOR.get()(self.xp, seed, counter)
        return generator


Kernel = Callable[[OpContext, Params, Arrays, Arrays], None]
"""A kernel; see the kernel contract of this module.

A kernel may have a method ``bind(ctx, params, inputs, outputs)`` that returns a function without arguments with the
same effect on these arrays, which may be repeated and uses the array module and workspace of ``ctx``. If the kernel's
attribute ``replayable`` is true, the function does not depend on the rest of ``ctx``: an executor, whose arrays keep
their addresses, replays it in every run.

A kernel may have a method ``bare_form(params, inputs, outputs)`` that returns a function (or None) for the specs
``inputs`` and ``outputs``. The function's arguments are NumPy arrays: inputs, outputs, and the flat workspace if the
call declares one. It replaces the kernel, with the same bits, if no array is None. It keeps no state between calls, so
threads may share it."""
WorkspaceRule = Callable[[Params, Sequence[TensorSpec], Sequence[TensorSpec]], int]
"""A function that returns the scratch bytes of a call, from the specs of its inputs and outputs."""
ShapeRule = Callable[
    [Params, list[Shape | None], list[Shape | None]], tuple[Sequence[Shape | None], Sequence[Shape | None]]
]
DTypeRule = Callable[
    [Params, list[DType | None], list[DType | None]], tuple[Sequence[DType | None], Sequence[DType | None]]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """An operator. A field that may depend on parameters is a value or a function of the parsed parameters."""

    name: str
    forward: Kernel
    infer_shape: ShapeRule
    infer_dtype: DTypeRule
    params: tuple[Param, ...] = ()
    inputs: tuple[str, ...] | Callable[[Params], tuple[str, ...]] = ("data",)
    """Names of the inputs, auxiliary states included. A variable created for an input is called ``<node>_<input>``."""
    positions: tuple[str, ...] | None = None
    """Inputs that a call may give by position; None: the inputs with default parameters. ``()``: any number of inputs,
    after which parameters are given by name."""
    variadic: str | None = None
    """Name of the parameter that is the number of inputs (``num_args``), set when the node is composed."""
    aux: tuple[int, ...] | Callable[[Params], tuple[int, ...]] = ()
    """Indices of inputs that the kernel mutates (auxiliary states), MXNet's FMutateInputs. Empty only if there are
    never any."""
    outputs: tuple[str, ...] | Callable[[Params], tuple[str, ...]] = ("output",)
    """Names of all outputs, hidden outputs included."""
    visible_outputs: int | Callable[[Params], int] | None = None
    """Number of outputs that a user sees; None: all."""
    gradient: GradientRule | None = None
    """The gradient rule. None: not differentiable, which is an error unless every incoming gradient is zero."""
    inplace: tuple[InplacePair, ...] | Callable[[Params], tuple[InplacePair, ...]] = ()
    ignored_inputs: tuple[int, ...] | Callable[[Params], tuple[int, ...]] = ()
    """Indices of inputs whose values do not matter, only shape and dtype. They need not stay alive; the kernel gets
    None."""
    workspace: WorkspaceRule | None = None
    """Scratch bytes of a call: the sum of ``aligned(nbytes)`` of all arrays that the kernel takes. None: the rule of
    the kernel, if it declares its scratch (:mod:`weftplan.ops.core.forms`), else no scratch."""
    input_init: Mapping[int, str] = field(default_factory=dict)
    """The ``__init__`` attribute of an automatically created variable, by input index (JSON text in MXNet's form)."""
    random: bool = False
    """Whether the operator draws random numbers; common-subexpression elimination then never merges its nodes."""
    needs_training: Callable[[Params], bool] | None = None
    """A function that returns whether a forward run outside training omits values that the gradient reads; None: no."""
    loss: bool = False
    """Whether the gradient ignores the incoming gradient (SoftmaxOutput, MakeLoss, …), so that head gradients are
    optional."""
    backward_of: str | None = None
    """Name of the forward operator; None: this is no backward operator."""
    grad_inputs: tuple[int, ...] | Callable[[Params], tuple[int, ...]] = ()
    """In a backward operator, for each output the index of the forward input whose gradient it is."""
    aliases: tuple[str, ...] = ()
    with_number: tuple[str, ...] = ()
    """In an operator of two arrays, the operators with a number in place of the right and of the left array."""
    saved_as: str = ""
    """Name in symbol files if it is not ``name``."""
    in_mxnet: bool = True
    """Whether MXNet 1.9.1 has an operator of this name with these parameters."""
    lenient: bool | None = None
    """Whether unknown parameters are ignored, as by MXNet's operators without parameters; None: if this is such one."""
    single: bool = False
    """Whether the operator belongs to a single node (``Custom``): it is not in the registry, and no results are cached
    under its name."""
    doc: str = ""

    def __post_init__(self) -> None:
        if self.workspace is None:
            object.__setattr__(self, "workspace", getattr(self.forward, "workspace", None))
        if self.lenient is None:
            object.__setattr__(self, "lenient", self.in_mxnet and not self.params and not self.single)

    def ignored_keys(self, attrs: Iterable[str]) -> list[str]:
        """Return the keys that a :attr:`lenient` operator ignores; attributes in underscores are no parameters."""
        if not self.lenient:
            return []
        declared = {param.name for param in self.params}
        return [key for key in attrs if key not in declared and not (key.startswith("__") and key.endswith("__"))]

    @property
    def any_number(self) -> bool:
        """Whether a call may have any number of inputs by position."""
        return self.variadic is not None or self.positions == ()

    def input_names(self, params: Params) -> tuple[str, ...]:
        """Return the names of the inputs under these parameters."""
        return self.inputs(params) if callable(self.inputs) else self.inputs

    def output_names(self, params: Params) -> tuple[str, ...]:
        """Return the names of all outputs, hidden outputs included."""
        return self.outputs(params) if callable(self.outputs) else self.outputs

    def num_outputs(self, params: Params) -> int:
        """Return the number of outputs, hidden outputs included."""
        outputs = self.outputs
        return len(outputs(params) if callable(outputs) else outputs)

    def num_visible_outputs(self, params: Params) -> int:
        """Return the number of outputs that a user sees."""
        visible = self.visible_outputs
        if visible is None:
            return self.num_outputs(params)
        return visible(params) if callable(visible) else visible

    def inplace_pairs(self, params: Params) -> tuple[InplacePair, ...]:
        """Return the inplace pairs in the planner's order of preference."""
        return self.inplace(params) if callable(self.inplace) else self.inplace

    def mutated(self, params: Params) -> tuple[int, ...]:
        """Return the indices of the inputs that the kernel mutates."""
        return self.aux(params) if callable(self.aux) else self.aux

    def ignored(self, params: Params) -> tuple[int, ...]:
        """Return the indices of the inputs whose values the kernel does not read."""
        return self.ignored_inputs(params) if callable(self.ignored_inputs) else self.ignored_inputs

    def gradient_inputs(self, params: Params) -> tuple[int, ...]:
        """For a backward operator, return for each output the forward input whose gradient it is."""
        return self.grad_inputs(params) if callable(self.grad_inputs) else self.grad_inputs

    def has_work(self, outputs: Sequence[object]) -> bool:
        """Return whether a call changes anything: an output is not None, or the operator has states."""
        return bool(self.aux) or any(out is not None for out in outputs)

    def workspace_bytes(self, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        """Return the scratch bytes of a call with these parameters, inputs and outputs."""
        return 0 if self.workspace is None else self.workspace(params, inputs, outputs)
