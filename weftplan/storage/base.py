"""The interface of storage resources: a :class:`Resource` hands out :class:`Allocation` objects.

A resource takes each of them back exactly once. Rules that every one keeps:

* ``free`` never waits. It may be called from any thread, and even from a finalizer that runs inside ``allocate``.
* ``allocate`` either returns memory or raises with nothing changed. A signal handler or finalizer may call it.
* Nobody's code but the device's runs under a resource's lock.

:mod:`weftplan.storage.ledger` has the bookkeeping of resources that own memory, :mod:`weftplan.storage.adaptors` the
resources that stand on another one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from weftplan.device.context import Context
from weftplan.device.stream import current_stream
from weftplan.errors import MXNetError
from weftplan.support.array_types import RawArray


class Statistics(NamedTuple):
    """Bytes and counts of one resource at one moment.

    Invariant: requested_bytes <= allocated_bytes <= reserved_bytes, and each is at most its peak.
    """

    requested_bytes: int
    """What the live allocations asked for."""
    allocated_bytes: int
    """What the live allocations occupy, after rounding."""
    reserved_bytes: int
    """What the resource holds from its upstream or the system: live allocations and cached blocks."""
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    live: int
    """Allocations not yet freed."""
    allocations: int
    """Successful calls of ``allocate`` so far."""
    hits: int
    """Those of them that were served from the cache."""
    system_allocations: int
    """Blocks taken from the upstream or the system so far."""
    system_frees: int
    """Blocks given back to it so far."""
    failures: int
    """Calls of ``allocate`` that raised OutOfMemoryError."""

    @property
    def cached_bytes(self) -> int:
        """Bytes held but not in use."""
        return self.reserved_bytes - self.allocated_bytes


class Allocation:
    """Memory handed out by a resource.

    Attributes:
        raw: flat uint8 array of exactly ``nbytes`` elements; dead once freed.
        nbytes: bytes that were asked for.
        context: the device of the memory.
        name: what holds it, for reports: text, or an object whose text is made when it is asked for; may be None.
    """

    __slots__ = ("block", "context", "name", "nbytes", "raw", "size")

    def __init__(self, raw: RawArray, nbytes: int, context: Context, name: object, block: object, size: int) -> None:
        self.raw: Any = raw
        self.nbytes = nbytes
        self.context = context
        self.name = name
        self.block: Any = block
        """What the resource that made this needs to take it back; nobody else looks inside."""
        self.size = size
        """Bytes occupied, after rounding."""

    def __repr__(self) -> str:
        return (
            f"<Allocation {self.name or 'unnamed'} of {self.nbytes:,} bytes ({self.size:,} occupied) on {self.context}>"
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """A block of the system, and how it is cut: every byte of it is in one of ``parts``."""

    raw: RawArray
    """The block."""
    parts: tuple[tuple[int, int, Allocation | None], ...]
    """(offset, bytes, what is there) in the order of offsets; None: nothing is."""


class Resource(ABC):
    """The interface of a source of memory on one context."""

    context: Context
    hands_over: bool = False
    """Memory may go from one holder to the next without coming back: nothing is done about what comes and goes."""

    @abstractmethod
    def allocate(self, nbytes: int, *, name: object = None) -> Allocation:
        """Memory of ``nbytes`` >= 0 bytes, contents undefined.

        Args:
            nbytes: size in bytes; 0 is legal and takes no memory.
            name: what the memory is for, shown in out-of-memory reports.

        Raises:
            OutOfMemoryError: nothing fits; the message is a report.
            MXNetError: ``nbytes`` is negative or not an integer.
        """

    @abstractmethod
    def free(self, allocation: Allocation) -> None:
        """Take an allocation back. Never waits; legal on any thread and in a finalizer.

        Raises:
            MXNetError: it was freed before, or another resource made it.
        """

    def free_behind(self, allocation: Allocation) -> None:
        """Take an allocation back with which the current stream still works: who gets its bytes next is ordered behind
        what the stream has been given to do so far. Without a current stream, the same as :meth:`free`.

        A resource that keeps no memory, or looks at it, waits for the stream.

        Raises:
            MXNetError: as :meth:`free`.
        """
        stream = current_stream()
        if stream is not None:
            with suppress(Exception):  # an error of that work is told to those who wait for its results
                stream.record().synchronize()
        self.free(allocation)

    @abstractmethod
    def statistics(self) -> Statistics:
        """Bytes and counts now."""

    @abstractmethod
    def reset_peaks(self) -> None:
        """Let the peaks be the figures of now."""

    @abstractmethod
    def empty_cache(self) -> int:
        """Give unused blocks back to the system; returns how many bytes."""

    def relocate(self, allocation: Allocation) -> int:
        """Move an allocation that nobody looks at, and on whose device nothing is pending, to a lower place if there is
        one: its ``raw`` is another array then. Returns the bytes moved; 0 where memory is not cut into blocks."""
        del allocation
        return 0

    @abstractmethod
    def segments(self) -> list[Segment]:
        """The blocks that the resource holds from the system, and what lies in them, in no particular order."""

    @abstractmethod
    def holders(self) -> list[Allocation]:
        """Live allocations, in no particular order."""


def checked_size(nbytes: object, context: Context) -> int:
    """``nbytes`` as an int >= 0 (NumPy integers are welcome); raises MXNetError."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, int | np.integer) or nbytes < 0:
        raise MXNetError(f"{context}: the size of an allocation must be an integer >= 0, got {nbytes!r}")
    return int(nbytes)


def wrong_free(allocation: Allocation, resource: Resource) -> MXNetError:
    """The error of a free to which nobody has a right: it says what the memory was taken for, and where."""
    if allocation.raw is None:
        return MXNetError(f"{allocation!r} was freed before: free it once")
    return MXNetError(
        f"{allocation!r} does not belong to {resource!r}: free it to the resource that handed it out, even if another "
        f"one has taken its place since"
    )
