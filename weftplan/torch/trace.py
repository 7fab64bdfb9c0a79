"""Trace a step on fake tensors: its operator calls, and the bytes and lifetime of each storage.

PyTorch's own autograd engine runs the step, so storages die exactly when they do in eager execution. Two things that
tracing does not show are added: the scratch of kernels, and the engine's in-place sums of gradients.
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
    """A call of an operator, with the numbers of the storages that it reads and makes."""

    name: str
    reads: Sequence[int]
    makes: Sequence[int]
    scratch: int = 0
    sums_in_place: bool = False


@dataclass
class Trace:
    """The calls of a step in order, and lists of facts by storage number."""

    calls: list[Call] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    """Number of the call that makes the storage; -1: it exists before the step."""
    died: list[int | None] = field(default_factory=list)
    """Number of the first call after the storage was freed; None: alive at the end."""
    names: list[str] = field(default_factory=list)
    """The purpose of the storage, or the operator that makes it."""

    def spans(self) -> list[tuple[int, int]]:
        """Return for each storage the range [first, last) of calls during which it is alive."""
        end = len(self.calls)
        spans = [(max(b, 0), end if d is None else d) for b, d in zip(self.born, self.died, strict=True)]
        for k, call in enumerate(self.calls):
            # If only the engine refers to the old sum, it adds in place, so both storages are one.
            if call.sums_in_place and call.makes and self.died[call.reads[0]] == k + 1:
                old, new = call.reads[0], call.makes[0]
                if self.nbytes[old] == self.nbytes[new]:
                    spans[new] = (k + 1, max(spans[new][1], k + 1))
        return spans

    def live(self) -> list[int]:
        """Return the bytes alive during each call, including its scratch."""
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
        """Maximum of the bytes alive during any call, or :attr:`before` without calls."""
        return max(self.live(), default=self.before)

    @property
    def before(self) -> int:
        """Bytes that exist before the step."""
        return sum(n for n, born in zip(self.nbytes, self.born, strict=True) if born < 0)


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """A dispatch mode that records the calls of operators as a trace; with ``probes`` it adds their scratch."""

    def __init__(self, probes: Probes | None = None) -> None:
        super().__init__()
        self.trace = Trace()
        self._number: dict[int, int] = {}
        self._node: tuple[tuple[str, int], int] | None = None
        """Identity of the backward node that runs, and the number of its first call."""
        self._probes = probes

    def storage(self, tensor: torch.Tensor, born: int, name: str = "") -> int:
        """Return the number of a tensor's storage. If it is new, record it with ``born`` and ``name``."""
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
        """Run an operator, record its call and return its result."""
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)  # these allocate nothing
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
            # The engine adds a node's result to a sum from before the node; a sum inside the node has newer terms. A
            # view also refers to its base, so the engine does not add to it in place.
            call.sums_in_place = self.trace.born[reads[0]] < began and not is_view(args[0])
        self.trace.calls.append(call)
        return out

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

    def _check_copied(self, func: Any, args: Any, kwargs: Any) -> None:
        for t in tensors_in((args, kwargs)):
            if t.requires_grad and not isinstance(t, FakeTensor):
                raise PlanError(
                    f"the step reaches a tensor of shape {tuple(t.shape)} in {func} that is in none of its arguments, "
                    f"closures or globals: pass the module that owns it as an argument of the step"
                )
