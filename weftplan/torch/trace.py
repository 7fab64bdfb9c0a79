"""A step run on fake tensors: every storage with its bytes, its first moment and its last, and which operator it met.

PyTorch's own autograd engine runs the step, so storages die exactly when they do in eager execution. Two rules correct
the changes of tracing: sums of gradients, which the engine adds in place when no mode is on, and bytes inside kernels.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weftplan.errors import PlanError
from weftplan.torch.private import FakeTensor, TorchDispatchMode, backward_node, is_view, storage_key, tensors_in
from weftplan.torch.probe import Probes


@dataclass(slots=True)
class Call:
    """A call of an operator; storages are numbers."""

    name: str
    reads: Sequence[int]
    makes: Sequence[int]
    scratch: int = 0
    sums_in_place: bool = False


@dataclass
class Trace:
    """All calls of a step, in order."""

    calls: list[Call] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    """Call that makes each storage; -1: it exists before."""
    died: list[int | None] = field(default_factory=list)
    """First call at which it is gone; None: alive at the end."""
    names: list[str] = field(default_factory=list)
    """The purpose or maker of each storage."""

    def spans(self) -> list[tuple[int, int]]:
        """Per storage the calls [first, last) during which it is alive, sums of gradients as the engine makes them."""
        end = len(self.calls)
        spans = [(max(b, 0), end if d is None else d) for b, d in zip(self.born, self.died, strict=True)]
        for k, call in enumerate(self.calls):
            # The engine adds to the old sum when nothing else refers to it: then no second storage exists.
            if call.sums_in_place and call.makes and self.died[call.reads[0]] == k + 1:
                old, new = call.reads[0], call.makes[0]
                if self.nbytes[old] == self.nbytes[new]:
                    spans[new] = (k + 1, max(spans[new][1], k + 1))
        return spans

    def live(self) -> list[int]:
        """Return the bytes alive during each call, those inside its kernel included."""
        change = [0] * (len(self.calls) + 1)
        for nbytes, (first, last) in zip(self.nbytes, self.spans(), strict=True):
            change[first] += nbytes
            change[last] -= nbytes
        total, out = 0, []
        for k, call in enumerate(self.calls):
            total += change[k]
            out.append(total + call.scratch)
        return out

    @property
    def peak(self) -> int:
        """Most bytes alive during any call."""
        return max(self.live(), default=self.before)

    @property
    def before(self) -> int:
        """Bytes that exist before the step."""
        return sum(n for n, born in zip(self.nbytes, self.born, strict=True) if born < 0)


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records a trace of every operator that is called while it is on."""

    def __init__(self, probes: Probes | None = None) -> None:
        super().__init__()
        self.trace = Trace()
        self._number: dict[int, int] = {}
        self._node: tuple[tuple[str, int], int] | None = None
        """The backward node that runs, and the call at which it began."""
        self._probes = probes

    def storage(self, tensor: torch.Tensor, born: int, name: str = "") -> int:
        """The number of a tensor's storage; a new number when it has none."""
        store = tensor.untyped_storage()
        key = storage_key(tensor)
        if key not in self._number:
            trace = self.trace
            self._number[key] = n = len(trace.nbytes)
            trace.nbytes.append(store.nbytes())
            trace.born.append(born)
            trace.died.append(None)
            trace.names.append(name)
            weakref.finalize(store, self._gone, key, n).atexit = False
        return self._number[key]

    def _gone(self, key: int, n: int) -> None:
        self.trace.died[n] = len(self.trace.calls)
        self._number.pop(key, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)  # questions about tensors and marks in time, which allocate nothing
        self._check_copied(func, args, kwargs)
        now, name = len(self.trace.calls), str(func)
        reads = [self.storage(t, -1) for t in tensors_in((args, kwargs))]
        scratch = self._probes.scratch(func, args, kwargs) if self._probes is not None else 0
        out = func(*args, **kwargs)
        count = len(self.trace.nbytes)
        storages = [self.storage(t, now, name) for t in tensors_in(out)]
        call = Call(name, reads, [m for m in dict.fromkeys(storages) if m >= count], scratch)
        began = self._node_began(now)
        if began is not None and func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
            # A sum of the node's own makes both terms; the engine adds the node's result to an older sum. A view
            # keeps its base, so that the engine does not own the sum.
            call.sums_in_place = self.trace.born[reads[0]] < began and not is_view(args[0])
        self.trace.calls.append(call)
        return out

    def _node_began(self, now: int) -> int | None:
        """The first call while the current backward node runs; None outside a backward pass."""
        node = backward_node()
        if node is None:
            self._node = None
            return None
        name = (type(node).__name__, node._sequence_nr())
        if self._node is None or self._node[0] != name:
            self._node = (name, now)
        return self._node[1]

    def _check_copied(self, func: Any, args: Any, kwargs: Any) -> None:
        for t in tensors_in((args, kwargs)):
            if t.requires_grad and not isinstance(t, FakeTensor):
                raise PlanError(
                    f"the step reaches a tensor of shape {tuple(t.shape)} in {func} that is in none of its arguments, "
                    f"closures or globals: pass the module that owns it as an argument of the step"
                )
