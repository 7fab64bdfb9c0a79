"""Memory footprint of distributed stores, computed from sizes before a job starts.

The stores themselves are made of these classes, and so are stand-ins that never start MPI (:func:`planned_stores`), so
that a plan can say what a job will keep. The figures are those of ``statistics()``. They belong to gradients that are
pushed together, as ``Module`` does it, in the order of the keys' creation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import KVStoreError, PlanError
from weftplan.kvstore.base import KVStoreBase
from weftplan.kvstore.buckets import even_range
from weftplan.kvstore.compression import Compression
from weftplan.kvstore.distributed.server import placement
from weftplan.kvstore.distributed.transport.shared_memory import can_share
from weftplan.kvstore.distributed.transport.wire import INLINE
from weftplan.kvstore.factory import DIST_ASYNC_TYPES, DIST_DEVICE_TYPES, DIST_TYPES
from weftplan.kvstore.local import KVStoreLocal
from weftplan.kvstore.on_device import KVStoreDevice
from weftplan.kvstore.stages import HOST


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process stands among those that share a store.

    Attributes:
        position: from 0.
        shares_memory: all processes are on one host and exchange in memory that they share.
    """

    workers: int
    position: int
    shares_memory: bool

    def part(self, size: int) -> int:
        """Return how many of ``size`` elements this process adds up for all."""
        first, end = even_range(size, self.workers, self.position)
        return end - first


class SyncFootprint(KVStoreLocal):
    """Memory of a process of ``dist_sync``."""

    _dist_compression: Compression | None = None

    def _place(self) -> Place:
        raise NotImplementedError

    def _stores_straight(self, contexts: Sequence[Context]) -> bool:
        place = self._place()
        whole = place.shares_memory or place.workers == 1
        return whole and self._dist_compression is None and len(contexts) == 1 and super()._stores_straight(contexts)

    def buffer_bytes(
        self, arrays: Sequence[tuple[int, int]], contexts: Sequence[Context], *, updates: bool
    ) -> dict[str, int]:
        """As of every store; and memory for exchanges, copies in host memory of sums on devices, and residuals."""
        by_purpose = super().buffer_bytes(arrays, contexts, updates=updates)
        away = 0 if any(context.device_type in HOST for context in contexts) else 1
        wire = away * sum(nbytes for _, nbytes in arrays) if isinstance(self, KVStoreDevice) else 0
        residuals = 0 if self._dist_compression is None else sum(nbytes for _, nbytes in arrays)
        return {**by_purpose, "exchange": self._exchange_bytes(arrays), "wire": wire, "residual": residuals}

    def _exchange_bytes(self, arrays: Sequence[tuple[int, int]]) -> int:
        place, chosen = self._place(), self._dist_compression
        if place.workers == 1:
            return 0
        if chosen is not None:  # packed gradients of all processes, key by key
            packed = [chosen.packed_size(elements) for elements, _ in arrays]
            return place.workers * max((sent for sent in packed if sent > INLINE), default=0)
        sized = [((elements, nbytes // elements), nbytes) for elements, nbytes in reversed(arrays) if elements]
        buckets = self._rule.cut([(item, nbytes, np.dtype(f"V{item[1]}")) for item, nbytes in sized])
        totals = [(sum(elements for elements, _ in bucket), bucket[0][1]) for bucket in buckets]
        large = [(elements, itemsize) for elements, itemsize in totals if elements * itemsize > INLINE]
        parts = max((place.part(elements) * itemsize for elements, itemsize in large), default=0)
        if place.shares_memory:  # what the others read: shares of one bucket, and sums of another
            return parts + max((elements * itemsize for elements, itemsize in large), default=0)
        return place.workers * parts


class AsyncFootprint(KVStoreLocal):
    """Memory of a process of ``dist_async``, as a worker and as a server."""

    def _place(self) -> Place:
        raise NotImplementedError

    def buffer_bytes(
        self, arrays: Sequence[tuple[int, int]], contexts: Sequence[Context], *, updates: bool
    ) -> dict[str, int]:
        """As of every store; and the values that this process serves, with a gradient for each."""
        by_purpose = super().buffer_bytes(arrays, contexts, updates=True)
        served = sum(
            2 * self.updated_here(number, elements) * (nbytes // elements)
            for number, (elements, nbytes) in enumerate(arrays)
            if elements
        )
        return {**by_purpose, "server": served}

    def updated_here(self, number: int, elements: int) -> int:
        """Return the elements of a key that this process serves."""
        place = self._place()
        ranges = placement(number, elements, place.workers, self._bound)
        return sum(end - first for server, first, end in ranges if server == place.position)


# -- stand-ins ---------------------------------------------------------------------------------------------------------


class _PlannedSync(SyncFootprint):
    """``dist_sync`` at a place, without a job."""

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name)
        self._planned_place = place

    def _place(self) -> Place:
        return self._planned_place


class _PlannedDeviceSync(_PlannedSync, KVStoreDevice):
    """``dist_device_sync``, likewise."""


class _PlannedAsync(AsyncFootprint):
    """``dist_async``, likewise."""

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name)
        self._planned_place = place

    def _place(self) -> Place:
        return self._planned_place


def planned_stores(name: str, workers: int | None) -> list[KVStoreBase]:
    """Return stand-ins for the store of each process of a job, which answer ``buffer_bytes`` and start nothing.

    Args:
        name: of a store of several processes.
        workers: number of processes on one host; None inside a job: the job's number, with a stand-in for this process
            only.

    Raises:
        KVStoreError: an unknown name.
        PlanError: the number of processes is unknown or invalid.
    """
    kinds: dict[str, type[_PlannedSync | _PlannedAsync]] = {
        **dict.fromkeys(DIST_TYPES, _PlannedSync),
        **dict.fromkeys(DIST_DEVICE_TYPES, _PlannedDeviceSync),
        **dict.fromkeys(DIST_ASYNC_TYPES, _PlannedAsync),
    }
    kind = kinds.get(name.lower())
    if kind is None:
        raise KVStoreError(f"unknown kvstore {name!r} of several processes: known are {', '.join(kinds)}")
    if workers is None:
        job = [os.environ.get(f"OMPI_COMM_WORLD_{word}", "") for word in ("SIZE", "RANK", "LOCAL_SIZE")]
        if not all(word.isdecimal() for word in job):
            raise PlanError(
                f"what kvstore {name!r} keeps depends on how many processes share it: give workers=, such as workers=4"
            )
        count, rank, here = map(int, job)
        return [kind(name, Place(count, rank, count == here and can_share()))]
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 1 << 16:
        raise PlanError(f"workers must be a number of processes from 1 to 65,536, got {workers!r}")
    return [kind(name, Place(workers, position, can_share())) for position in range(workers)]
