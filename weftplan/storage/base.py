"""Interface of storage resources: a :class:`Resource` hands out :class:`Allocation` objects.

Each allocation is freed exactly once. Rules of every resource:

* ``free`` never blocks. Any thread may call it, and even a finalizer that runs inside ``allocate``.
* ``allocate`` returns memory or raises with nothing changed. A signal handler or finalizer may call it.
* Only device code, no user code, runs under a resource's lock.

Resources that own memory are in :mod:`weftplan.storage.ledger`, those that wrap another in
:mod:`weftplan.storage.adaptors`.
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
    """Bytes requested by live allocations."""
    allocated_bytes: int
    """Bytes occupied by live allocations, after rounding."""
    reserved_bytes: int
    """Bytes held from the upstream or the system: live allocations and cached blocks."""
    peak_requested_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    live: int
    """Allocations not yet freed."""
    allocations: int
    """Successful calls of ``allocate``."""
    hits: int
    """Calls served from the cache."""
    system_allocations: int
    """Blocks taken from the upstream or the system."""
    system_frees: int
    """Blocks returned to it."""
    failures: int
    """Calls of ``allocate`` that raised OutOfMemoryError."""

    @property
    def cached_bytes(self) -> int:
        """Bytes held but not in use."""
        return self.reserved_bytes - self.allocated_bytes


class Allocation:
    """Memory handed out by a resource.

    Attributes:
        raw: flat uint8 array of exactly ``nbytes`` elements; invalid once freed.
        nbytes: requested bytes.
        context: the device of the memory.
        name: holder, for reports: text, or an object converted to text on demand; may be None.
    """

    __slots__ = ("block", "context", "name", "nbytes", "raw", "size")

    def __init__(self, raw: RawArray, nbytes: int, context: Context, name: object, block: object, size: int) -> None:
        self.raw: Any = raw
        self.nbytes = nbytes
        self.context = context
        self.name = name
        self.block: Any = block
        """State of the resource that made this; opaque to others."""
        self.size = size
        """Occupied bytes, after rounding."""

    def __repr__(self) -> str:
        return (
            f"<Allocation {self.name or 'unnamed'} of {self.nbytes:,} bytes ({self.size:,} occupied) on {self.context}>"
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """A system block and its division: ``parts`` cover every byte."""

    raw: RawArray
    """The block."""
    parts: tuple[tuple[int, int, Allocation | None], ...]
    """(offset, bytes, allocation or None if free), in order of offsets."""


class Resource(ABC):
    """Interface of a source of memory on one context."""

    context: Context
    hands_over: bool = False
    """Whether a dead array's memory may pass to a new array without :meth:`free` and :meth:`allocate`. False for a
    resource that must see each of these calls."""

    @abstractmethod
    def allocate(self, nbytes: int, *, name: object = None) -> Allocation:
        """Allocate ``nbytes`` >= 0 bytes with undefined contents.

        Args:
            nbytes: size in bytes; 0 is legal and takes no memory.
            name: purpose of the memory, shown in out-of-memory reports.

        Raises:
            OutOfMemoryError: nothing fits; the message is a report.
            MXNetError: ``nbytes`` is negative or not an integer.
        """

    @abstractmethod
    def free(self, allocation: Allocation) -> None:
        """Free an allocation. Never blocks; legal on any thread and in a finalizer.

        Raises:
            MXNetError: it is already free, or another resource made it.
        """

    def free_behind(self, allocation: Allocation) -> None:
        """Free an allocation in stream order: its next use is ordered after the current stream's work so far.

        Without a current stream this equals :meth:`free`. A resource that caches nothing, or inspects the memory, waits
        for the stream.

        Raises:
            MXNetError: as :meth:`free`.
        """
        stream = current_stream()
        if stream is not None:
            with suppress(Exception):  # a wait for the results of that work raises its error
                stream.record().synchronize()
        self.free(allocation)

    @abstractmethod
    def statistics(self) -> Statistics:
        """Return the present bytes and counts."""

    @abstractmethod
    def reset_peaks(self) -> None:
        """Reset the peaks to the present figures."""

    @abstractmethod
    def empty_cache(self) -> int:
        """Return unused blocks to the system; return the bytes."""

    def relocate(self, allocation: Allocation) -> int:
        """Move an allocation without live views or pending work to a lower position; ``raw`` is then another array.

        Returns:
            The bytes moved; 0 if there is no lower position or memory is not cut into blocks.
        """
        del allocation
        return 0

    @abstractmethod
    def segments(self) -> list[Segment]:
        """Return the system blocks that the resource holds, with their contents, in no particular order."""

    @abstractmethod
    def holders(self) -> list[Allocation]:
        """Return live allocations, in no particular order."""


def checked_size(nbytes: object, context: Context) -> int:
    """Return ``nbytes`` as an int >= 0 (NumPy integers are accepted), or raise MXNetError."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, int | np.integer) or nbytes < 0:
        raise MXNetError(f"{context}: the size of an allocation must be an integer >= 0, got {nbytes!r}")
    return int(nbytes)


def wrong_free(allocation: Allocation, resource: Resource) -> MXNetError:
    """Return the error of an invalid free, with the purpose and origin of the memory."""
    if allocation.raw is None:
        return MXNetError(f"{allocation!r} was freed before: free it once")
    return MXNetError(
        f"{allocation!r} does not belong to {resource!r}: free it to the resource that handed it out, even if another "
        f"one has taken its place since"
    )
