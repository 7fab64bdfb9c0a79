"""Kernels that prepare a call once and replay it: the first call computes all that depends on sizes.

To find out how a convolution is cut, and to fill the words of its functions, takes Python a tenth of a millisecond,
which is more than small layers take to compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from weftplan.ops.core.schema import Arrays, OpContext, Params

Call = Callable[[], object]
Maker = Callable[[OpContext, Params, Arrays, Arrays], Call]
"""Takes scratch and returns the work of every call on these arrays, for runs like the context's."""


class RepeatedKernel:
    """The kernel that does what ``make`` says."""

    __slots__ = ("make",)

    def __init__(self, make: Maker) -> None:
        self.make = make

    def __call__(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> None:
        self.make(ctx, params, inputs, outputs)()

    def on(self, ctx: OpContext, params: Params, inputs: Arrays, outputs: Arrays) -> Call:
        """A call that settles everything when it is made first; one thread at a time may make it."""
        return _Later(partial(self.make, ctx, params, inputs, outputs))


class _Later:
    """A call that is not known before it is made."""

    __slots__ = ("call", "make")

    def __init__(self, make: Callable[[], Call]) -> None:
        self.make = make
        self.call: Call | None = None

    def __call__(self) -> None:
        if self.call is None:
            self.call = self.make()
        self.call()


def nothing() -> None:
    """A call that has nothing to do."""


def holding(call: Call, *arrays: object) -> Call:
    """Return ``call``, which has only addresses of these arrays, as one that keeps them alive."""

    def held(keeps: tuple[object, ...] = arrays) -> None:
        call()

    return held


def one_after_other(*calls: Call) -> Call:
    """Return all these calls as one."""

    def every() -> None:
        for call in calls:
            call()

    return calls[0] if len(calls) == 1 else every
