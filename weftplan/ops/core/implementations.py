"""Alternative implementations of an operator: NumPy's default kernel, and others that register.

NumPy's kernel also runs on CuPy. A GPU implementation needs fewer launches, does not synchronize, or adds in a fixed
order.

An :class:`Implementation` states which calls it takes, their scratch bytes and their expected cost. The choice for a
node is made before anything is allocated, from the operator, its parameters, shapes, dtypes and a mode: it is the same
every time on one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weftplan.ops.core.schema import Kernel, Op, Params, TensorSpec

MODES = ("auto", "numpy", "native")
Specs = Sequence[TensorSpec]
Refusal = Callable[[Params, Specs, Specs], str]
"""Says why an implementation cannot compute a call, or is expected to be slower; empty if neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One way to compute an operator."""

    name: str
    """``numpy``, ``native``, ``winograd`` or ``mixed`` (on a host; the last is NumPy's convolution with the compiled
    batch norm), ``cuda`` or ``cudnn`` (on a GPU)."""
    kernel: Kernel
    workspace: Callable[[Params, Specs, Specs], int]
    """Bytes of scratch of one call."""
    refusal: Refusal = field(default=lambda params, inputs, outputs: "")
    """Why it cannot compute a call; empty when it can."""
    slower: Refusal = field(default=lambda params, inputs, outputs: "")
    """Why NumPy is expected to be faster for a call; empty if this implementation is."""
    otherwise: Implementation | None = None
    """The implementation to try next if this one refuses a call, before NumPy's kernel."""

    def __hash__(self) -> int:
        return hash(self.name)  # each bind hashes all that are provided

    special: bool = False
    """For some shapes alone: why it refuses others is not worth telling."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which implementation computes a call, and why not another."""

    implementation: Implementation
    reason: str = ""
    """Why those before it are not used; empty when there is none or the first is. Of a choice by measuring, that it
    is."""
    several: bool = False
    """Whether there was a choice: the operator has other implementations than NumPy's."""

    @property
    def text(self) -> str:
        """For readers: ``native``, ``numpy (why)``."""
        return f"{self.implementation.name} ({self.reason})" if self.reason else self.implementation.name


_PROVIDED: dict[str, dict[str, Implementation]] = {"host": {}, "gpu": {}}


def provide(op: str, implementation: Implementation, *, on: str = "host") -> None:
    """Offer another implementation of the operator called ``op``, on a ``host`` or on a ``gpu``."""
    _PROVIDED[on][op] = implementation


def provided(on: str = "host") -> Mapping[str, Implementation]:
    """Return the implementations other than NumPy's, by operator; empty for a device type without any."""
    return _PROVIDED.get(on, {})


def choose(op: Op, params: Params, inputs: Specs, outputs: Specs, mode: str, *, on: str = "host") -> Choice:
    """Choose the implementation for a call.

    Args:
        mode: ``numpy``: NumPy's kernel; ``native``: a provided implementation for every call that it takes; ``auto``:
            for every call that it is expected to speed up.
        on: device type of the arrays: ``host``, ``gpu``, or another type, which has only NumPy's kernels.
    """
    candidate = provided(on).get(op.name)
    if candidate is None:
        return (
            Choice(numpy_of(op), "not in host memory", several=True) if op.name in provided() else Choice(numpy_of(op))
        )
    if mode == "numpy":
        return Choice(numpy_of(op), "chosen by the user", several=True)
    reasons: list[str] = []
    while candidate is not None:
        reason = candidate.refusal(params, inputs, outputs)
        if not reason and mode == "auto":
            reason = candidate.slower(params, inputs, outputs)
        if not reason:
            return Choice(candidate, "; ".join(reasons), several=True)
        if not candidate.special:
            reasons.append(reason)
        candidate = candidate.otherwise
    return Choice(numpy_of(op), "; ".join(reasons), several=True)


def numpy_of(op: Op) -> Implementation:
    """Return an operator's kernel written for NumPy, which CuPy runs as well."""
    return Implementation(name="numpy", kernel=op.forward, workspace=op.workspace_bytes)
