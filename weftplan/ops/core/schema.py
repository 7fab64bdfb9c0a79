"""The declaration of an operator: a frozen :class:`Op` for symbol, planner, ndarray and executor.

An operator is data plus a few pure functions. It knows nothing of graphs, engines or storage:

* the *kernel* computes outputs from inputs on raw arrays of one array module;
* shape and dtype inference work in both directions on lists with holes (``None`` = unknown, 0 = unknown dimension);
* the *gradient rule* describes backward nodes through a small builder, so that the graph package can stay above;
* planner facts (inplace pairs, ignored inputs, workspace bytes) are declared, never discovered.

Kernel contract
---------------
Authors write functions of single arrays (:mod:`weftplan.ops.core.forms`); callers see
``kernel(ctx, params, inputs, outputs)``. It writes every ``outputs[k]`` that is not None. Any subset of the outputs may
be None: a plan drops outputs that no reader needs, and recomputation can drop any output. The others keep their
bits, and states change as if all were wanted (only a step of an optimizer leaves the states of an unwanted weight
alone). A kernel that computes one output from another asks :meth:`OpContext.memory_of` for the memory of the latter.
The caller omits a call that changes nothing (:meth:`Op.has_work`), so the output of a kernel with one output and no
state is never None.
Outputs are contiguous; inputs are contiguous. ``outputs[o]`` may be the same memory as ``inputs[i]`` only for a
declared inplace pair (i, o), and the kernel must then be right. Kernels always *overwrite*; accumulation (grad_req add,
gradient sums) is done by the caller, in workspace that the planner counted. Scratch comes from ``ctx.take`` only
(never ``np.empty`` of activation size): :attr:`Op.workspace` is the upper bound of what a kernel may take.
A kernel uses ``ctx.xp`` (numpy or cupy), never ``numpy`` by name, and reads no global state but the tile sizes
(:mod:`weftplan.ops.core.tiling`), which its caller sets for the device, for the kernel and for its workspace alike.
Callers run kernels under ``numpy.errstate(all="ignore")``: overflow, 1 / 0 and log(0) give what IEEE 754 says,
silently, as in MXNet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
"""Parsed parameters of one node, every declared name present."""
Arrays = Sequence[Any]
"""Inputs or outputs of a kernel: arrays of one array module, None for an ignored input or an unwanted output."""


class TensorSpec(NamedTuple):
    """Shape and dtype of one input or output, both known."""

    shape: Shape
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes of the contiguous array."""
        size = self.dtype.itemsize
        for dim in self.shape:
            size *= dim
        return size


class SpecLike(Protocol):
    """An object with shape and dtype: a :class:`TensorSpec` if a plan asks, an array in a call."""

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
    """One parameter: how its text (or Python value) is parsed, and its default (REQUIRED: none)."""

    name: str
    parse: Callable[[Any], Any]
    default: Any = REQUIRED
    doc: str = ""


class EntryRef(Protocol):
    """An opaque reference to one output of one node."""


class GradientBuilder(Protocol):
    """Given to a gradient rule, for one forward node."""

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
        """Return the sum of the gradients of output ``index``."""
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

        ``params`` None means :attr:`params` (only for ops that declare the same parameters).
        """
        ...

    def showing(self, params: Params) -> GradientBuilder:
        """Return the same builder with other parameters, for the rule of a base operator."""
        ...


GradientRule = Callable[[GradientBuilder], Sequence["EntryRef | None"]]
"""Returns one entry per forward input; None where no gradient flows (the planner then makes zeros)."""


class Workspace:
    """The array module and the scratch of one call. One object per call; not shared between threads."""

    __slots__ = ("_offset", "_workspace", "xp")

    def __init__(self, xp: ArrayModule, workspace: RawArray | None = None) -> None:
        self.xp = xp
        self._workspace: Any = workspace
        self._offset = 0

    def take(self, shape: Shape, dtype: DTypeLike) -> RawArray:
        """Return an uninitialised contiguous array of ``shape`` from the workspace, 64-byte aligned, valid in this
        call."""
        nbytes = np.dtype(dtype).itemsize
        for dim in shape:
            nbytes *= dim
        if not nbytes:  # nothing was declared for it, so there may be no workspace at all
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
        """Bytes of workspace that have not been taken: at least what the operator declares."""
        return 0 if self._workspace is None else int(self._workspace.size) - self._offset

    @property
    def flat(self) -> tuple[RawArray, ...]:
        """Return all bytes of the workspace as one array; an empty tuple if there is no workspace."""
        return () if self._workspace is None else (self._workspace,)

    def repeated(self, call: Callable[[], object]) -> Callable[[], object]:
        """Return ``call``, which takes from this workspace, such that it may be called again and again."""
        if self._workspace is None:
            return call

        def again() -> None:
            self._offset = 0
            call()

        return again


class OpContext(Workspace):
    """Everything that a kernel may use in addition to its arrays: its workspace and facts about the run."""

    __slots__ = ("is_train", "output_shapes", "random_key", "recompute")

    def __init__(
        self,
        xp: ArrayModule,
        *,
        is_train: bool = False,
        workspace: RawArray | None = None,
        random_key: tuple[int, int] = (0, 0),
        recompute: bool = False,
        output_shapes: Sequence[Shape] = (),
    ) -> None:
        super().__init__(xp, workspace)
        self.is_train = is_train
        self.random_key = random_key
        self.recompute = recompute
        """True when this call repeats a forward node in the backward pass: no moving statistics are updated."""
        self.output_shapes = output_shapes
        """Shapes of all outputs, unwanted outputs (None) included; empty if every output is wanted."""

    def memory_of(self, outputs: Arrays, index: int, dtype: DType) -> RawArray:
        """Return an output; if it is unwanted but others are computed from it, new memory of its shape.

        No plan counts that memory: a kernel asks only if it has no other place for the values.
        """
        array: RawArray | None = outputs[index]
        if array is None:
            array = self.xp.empty(self.output_shapes[index], dtype)
        return array

    def generator(self) -> Generator:
        """Return a generator seeded by ``random_key`` alone, so that a recomputed node draws the same numbers."""
        seed, counter = self.random_key
        if self.xp is np:
            return np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), counter & (2**64 - 1)]))
        generator: Generator = slots.RANDOM_GENERATOR.get()(self.xp, seed, counter)
        return generator


Kernel = Callable[[OpContext, Params, Arrays, Arrays], None]
"""A kernel may have a method ``prepare(ctx, params, inputs, outputs)`` that returns a function without arguments (or
None) with the same effect on these very arrays. An executor, whose arrays keep their addresses, replays it instead of
the kernel. It may use ``ctx``'s array module and workspace, in every call.

A kernel may have a method ``bare(params, inputs, outputs)`` of specs that returns a function of NumPy arrays of those
shapes and dtypes (or None): inputs, then outputs, then the flat workspace if the call declares one. The function keeps
no state between calls, so threads may share it; it replaces the kernel, with the same bits, if no array is None."""
WorkspaceRule = Callable[[Params, Sequence[TensorSpec], Sequence[TensorSpec]], int]
"""Bytes of scratch of a call, from the specs of its inputs and outputs."""
ShapeRule = Callable[
    [Params, list[Shape | None], list[Shape | None]], tuple[Sequence[Shape | None], Sequence[Shape | None]]
]
DTypeRule = Callable[
    [Params, list[DType | None], list[DType | None]], tuple[Sequence[DType | None], Sequence[DType | None]]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator. Fields that may depend on parameters are either a value or a function of the parsed parameters."""

    name: str
    forward: Kernel
    infer_shape: ShapeRule
    infer_dtype: DTypeRule
    params: tuple[Param, ...] = ()
    inputs: tuple[str, ...] | Callable[[Params], tuple[str, ...]] = ("data",)
    """Names of the inputs (aux states included), as they appear in ``<node>_<input>``."""
    variadic: str | None = None
    """Name of the parameter that holds the number of inputs (``num_args``), filled when composing."""
    aux: tuple[int, ...] | Callable[[Params], tuple[int, ...]] = ()
    """Inputs that the kernel mutates (auxiliary states): FMutateInputs. Empty only if there are never any."""
    outputs: tuple[str, ...] | Callable[[Params], tuple[str, ...]] = ("output",)
    """Names of all outputs, hidden outputs included."""
    visible_outputs: int | Callable[[Params], int] | None = None
    """Number of outputs that a user sees (None: all)."""
    gradient: GradientRule | None = None
    """None: not differentiable (an error unless every incoming gradient is zero)."""
    inplace: tuple[InplacePair, ...] | Callable[[Params], tuple[InplacePair, ...]] = ()
    ignored_inputs: tuple[int, ...] | Callable[[Params], tuple[int, ...]] = ()
    """Ignored inputs: only their shape and dtype matter, so they need not stay alive, and the kernel gets None."""
    workspace: WorkspaceRule | None = None
    """Bytes of scratch for one call: the sum of ``aligned(nbytes)`` of everything the kernel takes. None: what the
    kernel says itself, as one does that is written with its scratch (:mod:`weftplan.ops.core.forms`)."""
    input_init: Mapping[int, str] = field(default_factory=dict)
    """``__init__`` attribute given to auto-created variables of these inputs (JSON text as MXNet writes it)."""
    random: bool = False
    """Draws random numbers: never merged by common-subexpression elimination."""
    needs_training: Callable[[Params], bool] | None = None
    """Whether a forward run outside training omits values that the gradient reads."""
    loss: bool = False
    """The gradient ignores the incoming gradient (SoftmaxOutput, MakeLoss, …), so head gradients are optional."""
    backward_of: str | None = None
    """For a backward operator: the forward operator; its output k is the gradient of forward input grad_inputs[k]."""
    grad_inputs: tuple[int, ...] | Callable[[Params], tuple[int, ...]] = ()
    aliases: tuple[str, ...] = ()
    in_mxnet: bool = True
    """MXNet 1.9.1 has an operator of this name with these parameters. False for an operator of weftplan alone."""
    single: bool = False
    """One node's own operator (``Custom``), which others of its name have nothing to do with: not in the registry, and
    nothing is remembered under its name."""
    doc: str = ""

    def __post_init__(self) -> None:
        if self.workspace is None:
            object.__setattr__(self, "workspace", getattr(self.forward, "workspace", None))

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
        """Return the indices of inputs whose values are not read."""
        return self.ignored_inputs(params) if callable(self.ignored_inputs) else self.ignored_inputs

    def gradient_inputs(self, params: Params) -> tuple[int, ...]:
        """For a backward operator, return for each output the forward input whose gradient it is."""
        return self.grad_inputs(params) if callable(self.grad_inputs) else self.grad_inputs

    def has_work(self, outputs: Sequence[object]) -> bool:
        """Return False for a call that would change nothing: all outputs are None, and there is no state."""
        return bool(self.aux) or any(out is not None for out in outputs)

    def workspace_bytes(self, params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
        """Return the scratch bytes of one call."""
        return 0 if self.workspace is None else self.workspace(params, inputs, outputs)
