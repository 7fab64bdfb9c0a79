"""Alternative implementations of an operator: NumPy's default kernel, and others that register.

NumPy's kernel also runs on CuPy. On a GPU another one may be provided that needs fewer launches, waits for nobody, or
whose sums have a fixed order.

An :class:`Implementation` says which calls it takes, how much scratch one needs and what it is expected to cost. Which
one computes a node is decided before anything is allocated, from the operator, its parameters, shapes, dtypes and a
mode: the same choice every time on one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weftplan.ops.core.schema import Kernel, Op, Params, TensorSpec

MODES = ("auto", "numpy", "native")
Specs = Sequence[TensorSpec]


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One way to compute an operator."""

    name: str
    """``numpy``, ``native``, ``winograd`` or ``mixed`` (on a host; the last is NumPy's convolution with the compiled
    batch norm), ``cuda`` or ``cudnn`` (on a GPU)."""
    kernel: Kernel
    workspace: Callable[[Params, Specs, Specs], int]
    """Bytes of scratch of one call."""
    refusal: Callable[[Params, Specs, Specs], str] = field(default=lambda params, inputs, outputs: "")
    """Why it cannot compute a call; empty when it can."""
    slower: Callable[[Params, Specs, Specs], str] = field(default=lambda params, inputs, outputs: "")
    """Why NumPy is expected to be faster for a call; empty when this one is."""
    otherwise: Implementation | None = None
    """What is asked next where this one refuses, before NumPy's."""

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
    """The implementations beside NumPy's, by operator; none for types of devices that nobody provides for."""
    return _PROVIDED.get(on, {})


def choose(op: Op, params: Params, inputs: Specs, outputs: Specs, mode: str, *, on: str = "host") -> Choice:
    """Which implementation computes a call.

    Args:
        mode: ``numpy``: NumPy's kernel; ``native``: a provided one wherever it can; ``auto``: where it is expected to
            be faster.
        on: where the arrays are: ``host``, ``gpu``, or another type of device, which has NumPy's alone.
    """
    other = provided(on).get(op.name)
    if other is None:
        return (
            Choice(numpy_of(op), "not in host memory", several=True) if op.name in provided() else Choice(numpy_of(op))
        )
    if mode == "numpy":
        return Choice(numpy_of(op), "chosen by the user", several=True)
    reasons: list[str] = []
    while other is not None:
        reason = other.refusal(params, inputs, outputs)
        if not reason and mode == "auto":
            reason = other.slower(params, inputs, outputs)
        if not reason:
            return Choice(other, "; ".join(reasons), several=True)
        if not other.special:
            reasons.append(reason)
        other = other.otherwise
    return Choice(numpy_of(op), "; ".join(reasons), several=True)


def numpy_of(op: Op) -> Implementation:
    """NumPy's kernel of an operator, which CuPy runs as well."""
    return Implementation(name="numpy", kernel=op.forward, workspace=op.workspace_bytes)
