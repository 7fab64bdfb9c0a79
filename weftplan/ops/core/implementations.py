"""Alternative implementations of an operator: the default kernel, written for NumPy, and registered others.

The default kernel also runs on CuPy. A GPU implementation needs fewer launches, does not synchronize, or adds in a
fixed order.

An :class:`Implementation` states which calls it can compute, their scratch bytes, and when NumPy is faster.
:func:`choose` selects one before memory is allocated, from the operator, its parameters, shapes, dtypes, the device
type and a mode. So its choice is always the same on one machine. Autotuning may replace this choice by the fastest
implementation in a measurement (:mod:`weftplan.ops.autotune`).

The package's own implementations are imported when a choice first considers them, by the name of their operator
(:mod:`weftplan.ops.core.operator_modules`). Compiled loops that other rooms call without an
operator are slots (:mod:`weftplan.support.slots`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from weftplan.ops.core.operator_modules import GPU, HOST
from weftplan.ops.core.schema import Kernel, Op, Params, TensorSpec
from weftplan.support.lazy_import import late_import
from weftplan.support.slots import COMPILER

MODES = ("auto", "numpy", "native")
Specs = Sequence[TensorSpec]
Refusal = Callable[[Params, Specs, Specs], str]
"""A function of (parameters, inputs, outputs) that returns a reason against an implementation; empty: no reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """An implementation of an operator: a kernel, its scratch bytes, and the calls that it takes."""

    name: str
    """``numpy``, ``native``, ``winograd`` or ``mixed`` (on a host; the last is NumPy's convolution with the compiled
    batch norm), ``cuda`` or ``cudnn`` (on a GPU)."""
    kernel: Kernel
    workspace: Callable[[Params, Specs, Specs], int]
    """A function that returns the scratch bytes of a call."""
    refusal: Refusal = field(default=lambda params, inputs, outputs: "")
    """A function that returns the reason why the implementation cannot compute a call; empty if it can."""
    slower: Refusal = field(default=lambda params, inputs, outputs: "")
    """A function that returns the reason why NumPy is expected to be faster for a call; empty if it is not."""
    otherwise: Implementation | None = None
    """The implementation to try next if this one refuses a call, before NumPy's kernel."""

    def __hash__(self) -> int:
        return hash(self.name)  # cheap, because each bind hashes all registered implementations

    special: bool = False
    """Whether it takes only few shapes, so that the reasons for its refusals are not reported."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The implementation that computes a call, and the reason for the choice."""

    implementation: Implementation
    reason: str = ""
    """Why preferred implementations are not used, or that the choice was measured; empty if the first one is used."""
    several: bool = False
    """Whether the operator has implementations other than NumPy's."""

    @property
    def text(self) -> str:
        """The choice as text for users: ``native``, or ``numpy (reason)``."""
        return f"{self.implementation.name} ({self.reason})" if self.reason else self.implementation.name


class _Provided(Mapping[str, Implementation]):
    """The implementations for one device type, by operator; the package's own are imported when they are read."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.modules = {op: f"weftplan.{module}" for module, ops in names.items() for op in ops.split()}
        self.registered: dict[str, Implementation] = {}
        self.replaced: dict[str, Implementation] = {}
        """The registered implementations that are not the package's own."""

    def register(self, op: str, implementation: Implementation) -> None:
        if op in self.modules and self.modules[op] not in sys.modules:
            self.get(op)  # first the package's own, which this one replaces
        if op not in self.modules or op in self.registered:
            self.replaced[op] = implementation
        self.registered[op] = implementation

    def get(self, op: str, default: object = None) -> Implementation | None:  # type: ignore[override]
        if op not in self.registered and op in self.modules:
            late_import(self.modules[op])
        return self.registered.get(op)

    def __getitem__(self, op: str) -> Implementation:
        implementation = self.get(op)
        if implementation is None:
            raise KeyError(op)
        return implementation

    def __contains__(self, op: object) -> bool:
        return op in self.modules or op in self.registered

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.modules, *self.registered)))

    def __len__(self) -> int:
        return len({*self.modules, *self.registered})


_PROVIDED = {"host": _Provided(HOST), "gpu": _Provided(GPU)}
_NONE: Mapping[str, Implementation] = {}


def provide(op: str, implementation: Implementation, *, on: str = "host") -> None:
    """Register the preferred implementation of the operator called ``op``, on a ``host`` or on a ``gpu``."""
    _PROVIDED[on].register(op, implementation)


def provided(on: str = "host") -> Mapping[str, Implementation]:
    """Return the implementations by operator; empty for a device type without any."""
    return _PROVIDED.get(on, _NONE)


def replaced() -> tuple[tuple[str, str, Implementation], ...]:
    """Return (device type, operator, implementation) of each implementation that is not the package's own."""
    return tuple(
        [(on, op, implementation) for on, table in _PROVIDED.items() for op, implementation in table.replaced.items()]
    )


def choose(op: Op, params: Params, inputs: Specs, outputs: Specs, mode: str, *, on: str = "host") -> KernelChoice:
    """Return the implementation chosen for a call.

    Args:
        mode: ``numpy``: always NumPy's kernel; ``native``: a registered implementation if it can compute the call;
            ``auto``: a registered implementation if it is also expected to be faster.
        on: device type of the arrays: ``host``, ``gpu``, or another type, which has only NumPy's kernels.
    """
    candidate = provided(on).get(op.name)
    if candidate is None:
        return (
            KernelChoice(numpy_of(op), "not in host memory", several=True)
            if op.name in provided()
            else KernelChoice(numpy_of(op))
        )
    if mode == "numpy":
        return KernelChoice(numpy_of(op), "chosen by the user", several=True)
    reasons: list[str] = []
    while candidate is not None:
        reason = candidate.refusal(params, inputs, outputs)
        if not reason and mode == "auto":
            reason = candidate.slower(params, inputs, outputs)
        if not reason:
            return KernelChoice(candidate, "; ".join(reasons), several=True)
        if not candidate.special:
            reasons.append(reason)
        candidate = candidate.otherwise
    return KernelChoice(numpy_of(op), "; ".join(reasons), several=True)


def numpy_of(op: Op) -> Implementation:
    """Return the implementation by an operator's default kernel, which runs on NumPy and CuPy."""
    return Implementation(name="numpy", kernel=op.forward, workspace=op.workspace_bytes)


Array = np.ndarray[Any, np.dtype[Any]]
PACK_STEP = 16
"""Ranges of :data:`PACK` and :data:`UNPACK` begin and end at multiples of this number of elements."""
PAST = 1 << 24
"""Minimum bytes of results that compiled loops write with non-temporal stores, past the caches."""
MAX_OPERATIONS = 600
"""Maximum number of operations of a generated elementwise kernel, to bound compile time and registers."""


def compiler() -> object:
    """Return the processor and the compiler of compiled kernels, or the reason why there are none as a text."""
    return COMPILER.get()()
