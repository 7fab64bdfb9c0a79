"""Trace steps on fake tensors: their operator calls, and the bytes and lifetime of each storage.

PyTorch's own autograd engine runs a step, so storages die exactly when they do in eager execution. Two things that
tracing does not show are added: the bytes inside kernels, and the engine's in-place sums of gradients.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest import mock

import torch

from weftplan.errors import PlanError
from weftplan.torch.private import (
    EQUAL,
    GROUPED,
    LIFT,
    READ,
    VALUES,
    DispatchMode,
    FakeTensor,
    backward_node,
    is_mutable,
    is_view,
    storage_key,
    tensors_in,
)

TORCH = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parent)
PASSING = (OURS, *(f"{TORCH}/{name}" for name in ("_tensor.py", "overrides.py", "_ops.py", "_compile.py", "_dynamo/")))
"""Files whose functions stand between the code that reads a value and the operator that gives it."""


SUMS = ("aten.add.Tensor",)
WRITES = {"index_add", "index_copy", "index_fill", "index_put", "logical_and", "logical_or", "masked_fill", "put"}
WRITES |= {"scatter", "scatter_add"}
"""Operators that gradient formulas run in place, except on fake tensors: ``areAnyTensorSubclassLike`` in
torch/csrc/autograd/FunctionsManual.cpp."""


def _grouped_product(a: torch.Tensor, b: torch.Tensor, *more: Any, **options: Any) -> torch.Tensor:
    """Return the fake product of groups of rows, columns or matrices; PyTorch's own takes only 16-bit numbers."""
    groups = () if a.dim() != b.dim() else a.shape[:1] if a.dim() == 3 else more[0].shape
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]), dtype=options.get("out_dtype"))


FAKES = {GROUPED: _grouped_product}
"""Operators whose fake kernels refuse what the real kernels take, with the functions that replace them."""


class KernelBytes(NamedTuple):
    """The bytes of a call that its fake result does not show."""

    scratch: int = 0
    """Bytes that are allocated and freed inside the kernel."""
    results: Sequence[int] = ()
    """Bytes of the storage of each tensor in the result; 0 for the storage of an argument. Empty: as in the trace."""


class Kernels(Protocol):
    """A source of the bytes of kernels."""

    unseen: dict[str, int]
    """Number of calls of each operator whose scratch is unknown."""

    def kernel(self, target: Any, args: Any, kwargs: Any) -> KernelBytes:
        """Return the bytes of a call."""


@dataclass(slots=True)
class Call:
    """A call of an operator, with the numbers of the storages that it reads and makes."""

    name: str
    reads: Sequence[int]
    makes: Sequence[int]
    scratch: int = 0
    in_place: bool = False
    """Whether a real step writes the result into the first argument, if nothing reads that afterwards."""
    backward: bool = False


@dataclass
class StepTrace:
    """The calls of several steps in order, and lists of facts by storage number."""

    calls: list[Call] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Number of the first call of each step."""
    start: int = 0
    """Number of the first call that a forecast is about; calls before it are those of steps that precede it."""
    nbytes: list[int] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    """Number of the call that makes the storage; -1: it exists before the first step."""
    died: list[int | None] = field(default_factory=list)
    """Number of the first call after the storage was freed; None: alive at the end."""
    names: list[str] = field(default_factory=list)
    """The operator that makes the storage."""
    purposes: list[str] = field(default_factory=list)
    """What the storage holds: parameters, gradients, ...; empty: a result of the step."""
    on_host: set[int] = field(default_factory=set)
    """Storages of scalars that stay in host memory on a card, such as step counts."""

    def spans(self) -> list[tuple[int, int]]:
        """Return for each storage the range [first, last) of calls during which it is alive."""
        end = len(self.calls)
        spans = [(max(b, 0), end if d is None else d) for b, d in zip(self.born, self.died, strict=True)]
        for k, old, new in self.replacements():
            spans[new] = (k + 1, max(spans[new][1], k + 1))
            spans[old] = (spans[old][0], k + 1)
        return spans

    def replacements(self) -> list[tuple[int, int, int]]:
        """Return (call, old storage, new storage) of each call that writes its result in place in a real step."""
        last = {r: k for k, call in enumerate(self.calls) for r in call.reads}
        return [
            (k, call.reads[0], call.makes[0])
            for k, call in enumerate(self.calls)
            if call.in_place
            and call.makes
            and self.nbytes[call.reads[0]] == self.nbytes[call.makes[0]]
            # The engine adds in place only if no other object refers to the old sum; formulas keep a local variable.
            and (last[call.reads[0]] == k if call.name not in SUMS else self.died[call.reads[0]] == k + 1)
        ]

    def live(self) -> list[int]:
        """Return the bytes alive during each call from :attr:`start`, including its scratch."""
        change = [0] * (len(self.calls) + 1)
        for nbytes, (first, last) in zip(self.nbytes, self.spans(), strict=True):
            change[first] += nbytes
            change[last] -= nbytes
        total, out = 0, []
        for k, call in enumerate(self.calls):
            total += change[k]
            out.append(total + call.scratch)
        return out[self.start :]

    @property
    def peak(self) -> int:
        """Maximum of the bytes alive during any call, or :attr:`before` without calls."""
        return max(self.live(), default=self.before)

    @property
    def before(self) -> int:
        """Bytes that exist before the forecast's first call."""
        facts = zip(self.nbytes, self.born, self.died, strict=True)
        return sum(n for n, born, died in facts if born < self.start and (died is None or died > self.start))


def usual_value(dtype: torch.dtype, reads: int, comparison: tuple[Any, Any]) -> complex | None:
    """Return the usual value of a tensor that PyTorch's own code reads; None if the caller's code reads it.

    PyTorch reads values to find rare cases: an infinite gradient, a negative variance, a loss that no longer falls.

    Args:
        dtype: the dtype of the tensor.
        reads: the number of the read, for values that differ.
        comparison: the last operator and its arguments.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PASSING):
        frame = frame.f_back
    if not frame.f_code.co_filename.startswith(TORCH):
        return None
    if dtype is torch.bool:
        # LBFGS keeps a direction if its curvature is above a small positive number, which is the usual case.
        return comparison[0] is torch.ops.aten.gt.Scalar and comparison[1][1] > 0
    name = Path(frame.f_code.co_filename).name
    number = {"grad_scaler.py": 0.0, "lbfgs.py": 1.0 / reads}.get(name, 1.0)
    return number if dtype.is_floating_point else int(number > 0)


class Recorder(DispatchMode):
    """A dispatch mode that records the calls of operators as a trace; ``kernels`` adds the bytes inside them."""

    def __init__(self, kernels: Kernels | None = None) -> None:
        super().__init__()
        self.trace = StepTrace()
        self.kernels = kernels
        self._number: dict[int, int] = {}
        self._node: tuple[tuple[str, int], int] | None = None
        """Identity of the backward node that runs, and the number of its first call."""
        self._reads, self._last, self._measuring = 0, (None, ()), False

    def storage(self, tensor: torch.Tensor, born: int, *, name: str = "", purpose: str = "") -> int:
        """Return the number of a tensor's storage. If it is new, record it; a ``purpose`` is recorded in any case."""
        if tensor.layout is not torch.strided:
            raise PlanError(
                f"the step makes a sparse tensor of shape {tuple(tensor.shape)}, whose bytes depend on values: use "
                f"dense gradients, such as those of nn.Embedding(..., sparse=False)"
            )
        store = tensor.untyped_storage()
        key, trace = storage_key(tensor), self.trace
        if key not in self._number:
            self._number[key] = n = len(trace.nbytes)
            trace.nbytes.append(store.nbytes())
            trace.born.append(born)
            trace.died.append(None)
            trace.names.append(name)
            trace.purposes.append(purpose)
            if getattr(tensor, "constant", None) is not None:
                trace.on_host.add(n)
            weakref.finalize(store, self._gone, key, n).atexit = False
        if purpose and not trace.purposes[self._number[key]]:
            trace.purposes[self._number[key]] = purpose
        return self._number[key]

    def _gone(self, key: int, n: int) -> None:
        self.trace.died[n] = len(self.trace.calls)
        self._number.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, record its call and return its result."""
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)  # these allocate nothing
        tensors = tensors_in((args, kwargs))
        self._check_copied(func, tensors)
        trace = self.trace
        now, name = len(trace.calls), str(func)
        reads = [] if func is LIFT else [self.storage(t, -1) for t in tensors]
        self._measuring = True
        kernel = (
            self.kernels.kernel(func, args, kwargs) if self.kernels is not None and func is not LIFT else KernelBytes()
        )
        self._measuring = False
        try:
            out = FAKES.get(func, func)(*args, **kwargs)
        except VALUES:
            self._reads += 1
            value: complex | None = None
            if func is READ:
                value = usual_value(args[0].dtype, self._reads, self._last)
            elif func is EQUAL and all(t.dtype is torch.bool and not t.dim() for t in tensors):
                value = True  # PyTorch's C++ compares the result of a check with True
            if value is None:
                raise
            return value
        self._last = func, args if func is torch.ops.aten.gt.Scalar else ()
        count, made = len(trace.nbytes), tensors_in(out)
        storages = [self.storage(t, now, name=name) for t in made]
        for n, nbytes in zip(storages, kernel.results, strict=len(kernel.results) == len(made)):
            if n >= count:
                trace.nbytes[n] = nbytes
        call = Call(name, reads, [m for m in dict.fromkeys(storages) if m >= count], kernel.scratch)
        began = self._node_began(now)
        call.backward = began is not None
        if began is not None and not torch.is_grad_enabled():
            # The engine adds a node's result to a sum from before the node; a sum inside the node has newer terms. A
            # view also refers to its base, so the engine does not add to it in place.
            if name in SUMS:
                call.in_place = trace.born[reads[0]] < began and not is_view(args[0])
            elif func.overloadpacket.__name__ in WRITES and self._node is not None:
                # Gradients of scatter_reduce are the only ones that need both the old and the new tensor.
                call.in_place = trace.born[reads[0]] >= began and "ScatterReduce" not in self._node[0][0]
        trace.calls.append(call)
        return out

    @contextmanager
    def random_states(self) -> Iterator[None]:
        """Record the states of the CPU's generator that this thread saves, as checkpoints do; no mode sees them."""
        original, thread = torch.get_rng_state, threading.get_ident()

        def saved() -> torch.Tensor:
            state = original()
            if threading.get_ident() == thread and not self._measuring:
                n = self.storage(state, len(self.trace.calls), name="torch.get_rng_state")
                self.trace.on_host.add(n)
                self.trace.calls.append(Call("torch.get_rng_state", [], [n]))
            return state

        with mock.patch.object(torch, "get_rng_state", saved):
            yield

    def _node_began(self, now: int) -> int | None:
        """Return the number of the running backward node's first call, ``now`` if it is new; None outside backward."""
        node = backward_node()
        if node is None:
            self._node = None
            return None
        name = (type(node).__name__, node._sequence_nr())
        if self._node is None or self._node[0] != name:
            self._node = (name, now)
        return self._node[1]

    def _check_copied(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        for t in tensors:
            # A real operator would run on a tensor of the caller, and the copy of a parameter would get no gradient.
            if not isinstance(t, FakeTensor) and (t.requires_grad or (is_mutable(func) and t is tensors[0])):
                raise PlanError(
                    f"the step reaches a tensor of shape {tuple(t.shape)} in {func} that is in none of its arguments, "
                    f"closures or globals: pass the object that owns it as an argument of the step"
                )
