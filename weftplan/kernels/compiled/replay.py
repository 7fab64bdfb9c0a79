"""Kernels that prepare a call once and replay it: the first call computes everything that depends on sizes.

In Python, choosing the partition of a convolution and filling its argument words takes a tenth of a millisecond, longer
than the computation of a small layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from weftplan.ops.core.schema import Arrays, OpContext, Params

Call = Callable[[], object]
Maker = Callable[[OpContext, Params, Arrays, Arrays], Call]
"""A function that reserves scratch and returns a call on these arrays; runs with the same settings may replay it."""


class RepeatedKernel:
    """A kernel whose calls are prepared by ``make`` and can be repeated in runs with the same settings."""

    __slots__ = ("make",)

    def __init__(self, make: Maker) -> None:
        self.make = make

    def __call__(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        self.make(ctx, params, inputs, outputs)()

    def bind(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """Return a call that is prepared on its first run; one thread at a time may run it."""
        return _Later(partial(self.make, ctx, params, inputs, outputs))


class _Later:
    """A call that ``make`` prepares on its first run."""

    __slots__ = ("call", "make")

    def __init__(self, make: Callable[[], Call]) -> None:
        self.make = make
        self.call: Call | None = None

    def __call__(self) -> None:
        if self.call is None:
            self.call = self.make()
        self.call()


def nothing() -> None:
    """Do nothing."""


def holding(call: Call, *arrays: object) -> Call:
    """Return ``call`` with references that keep ``arrays`` alive, since the call itself stores only their addresses."""

    def held(keeps: tuple[object, ...] = arrays) -> None:
        call()

    return held


def in_sequence(*calls: Call) -> Call:
    """Return one call that makes these calls in order."""

    def every() -> None:
        for call in calls:
            call()

    return calls[0] if len(calls) == 1 else every
