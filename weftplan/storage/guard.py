"""Guard mode: detection of writes outside an allocation, reported with its allocation site.

Every allocation gets a margin on both sides, filled with a byte. The margins are checked when the memory is freed, and
by :meth:`GuardResource.check`. Results inside the slab of a planned executor have no margins of their own; with
``WEFTPLAN_EXECUTOR_STRATEGY=dynamic`` they have.

Margins in host memory are accessed directly. On other devices the current stream of the thread fills them, and a check
waits for its answer.
"""

from __future__ import annotations

from functools import partial

from weftplan import device
from weftplan.errors import GuardError, OutOfMemoryError
from weftplan.storage.adaptors import Adaptor, StatisticsResource
from weftplan.storage.base import Allocation, Resource, Statistics, checked_size, wrong_free
from weftplan.support.array_types import RawArray

MARGIN = 256
"""Bytes of a margin: the largest alignment of a device, so that the user's memory stays aligned."""
FILL = 0xFD
"""Byte of an untouched margin: as a float it is a huge negative number, as an index out of range."""


class GuardResource(StatisticsResource):
    """Detects out-of-bounds writes. Its statistics are those of users, without the margins.

    Raises:
        GuardError: on ``free`` and ``check``, if a margin has changed. The memory is freed all the same.

    >>> from weftplan.device import cpu, get
    >>> from weftplan.storage import RawResource
    >>> guard = GuardResource(RawResource(get(cpu())))
    >>> held = guard.allocate(100, name="weights")
    >>> held.raw.base[:] = 0  # the memory and both margins
    >>> guard.check()
    Traceback (most recent call last):
        ...
    weftplan.errors.GuardError: 256 bytes before the start and 256 bytes past the end of <Allocation weights of 100 \
bytes (612 occupied) on cpu(0)> were overwritten: an operation wrote outside of its memory
    """

    def __init__(self, upstream: Resource) -> None:
        super().__init__(_Margins(upstream))

    def allocate(self, nbytes: int, *, name: object = None) -> Allocation:
        try:
            return super().allocate(nbytes, name=name)
        except OutOfMemoryError as error:
            cause = f"Guards take {2 * MARGIN} bytes more: " + str(error).partition("\n")[0]
            raise self._refusal(nbytes, cause) from error

    def check(self) -> None:
        """Check the margins of all live allocations. Call it when no operation is pending."""
        for allocation in self.holders():
            if (error := damage(allocation)) is not None:
                raise error

    def statistics(self) -> Statistics:
        below = self.upstream.statistics()
        return (
            super()
            .statistics()
            ._replace(
                reserved_bytes=below.reserved_bytes,
                peak_reserved_bytes=below.peak_reserved_bytes,
                hits=below.hits,
                system_allocations=below.system_allocations,
                system_frees=below.system_frees,
            )
        )


class _Margins(Adaptor):
    """Hands out the middle of an upstream allocation."""

    def allocate(self, nbytes: int, *, name: object = None) -> Allocation:
        nbytes = checked_size(nbytes, self.context)
        outer = self.upstream.allocate(nbytes + 2 * MARGIN if nbytes else 0, name=name)
        middle = outer.raw[MARGIN : MARGIN + nbytes] if nbytes else outer.raw
        allocation = Allocation(middle, nbytes, self.context, name, outer, outer.size)
        for margin in _margins(allocation):
            if self.context.is_host:
                margin.fill(FILL)
            else:
                device.get(self.context).launch(partial(margin.fill, FILL))
        return allocation

    def free_behind(self, allocation: Allocation) -> None:
        super(Adaptor, self).free_behind(allocation)  # the margins are checked

    def free(self, allocation: Allocation) -> None:
        outer, error = allocation.block, damage(allocation)
        if outer.raw is None:
            raise wrong_free(allocation, self)
        self.upstream.free(outer)
        allocation.raw = None
        if error is not None:
            raise error

    def relocate(self, allocation: Allocation) -> int:
        """Move nothing: the margins would stay in place."""
        return 0

    def holders(self) -> list[Allocation]:
        return self.upstream.holders()


def damage(allocation: Allocation) -> GuardError | None:
    """Return the error of an allocation whose margins have changed."""
    changes = []
    if not allocation.context.is_host:  # earlier writes of any stream must be visible
        device.get(allocation.context).synchronize()
    for margin, side in zip(_margins(allocation), ("before the start", "past the end"), strict=False):
        if changed := int((margin != FILL).sum()):
            changes.append(f"{changed} bytes {side}")
    if not changes:
        return None
    return GuardError(
        f"{' and '.join(changes)} of {allocation!r} were overwritten: an operation wrote outside of its memory"
    )


def _margins(allocation: Allocation) -> tuple[RawArray, ...]:
    """Return both margins; none around an empty allocation."""
    if not allocation.nbytes:
        return ()
    raw = allocation.block.raw
    return () if raw is None else (raw[:MARGIN], raw[MARGIN + allocation.nbytes :])
