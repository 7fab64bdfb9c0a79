"""Memory footprint of distributed stores, computed from the sizes of arrays.

The stores derive from these classes. So do stand-ins that never start MPI (:func:`planned_stores`), which give the
footprint before a job starts. The figures match ``statistics()`` if all gradients are pushed in one call, in the order
of the keys' creation, as ``Module`` does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import KVStoreError, PlanError
from weftplan.kvstore.base import KVStoreBase
from weftplan.kvstore.compression import Compression
from weftplan.kvstore.distributed.transport.shared_memory import can_share
from weftplan.kvstore.distributed.transport.wire import INLINE
from weftplan.kvstore.factory import DIST_ASYNC_TYPES, DIST_DEVICE_TYPES, DIST_TYPES
from weftplan.kvstore.local import KVStoreLocal
from weftplan.kvstore.on_device import KVStoreDevice
from weftplan.kvstore.partition import even_range, placement
from weftplan.kvstore.stages import HOST


@dataclass(frozen=True, slots=True)
class JobPosition:
    """The position of a process among the processes that share a store.

    Attributes:
        workers: number of processes.
        position: index of this process, from 0.
        shares_memory: whether all processes run on one host and exchange data in shared memory.
    """

    workers: int
    position: int
    shares_memory: bool

    def part(self, size: int) -> int:
        """Return how many of ``size`` elements this process sums on behalf of all processes."""
        begin, end = even_range(size, self.workers, self.position)
        return end - begin


class SyncFootprint(KVStoreLocal):
    """Base class that computes the memory footprint of a process of ``dist_sync``."""

    _dist_compression: Compression | None = None

    def _job_position(self) -> JobPosition:
        raise NotImplementedError

    def _stores_straight(self, contexts: Sequence[Context]) -> bool:
        job = self._job_position()
        is_atomic = job.shares_memory or job.workers == 1
        return (
            is_atomic and self._dist_compression is None and len(contexts) == 1 and super()._stores_straight(contexts)
        )

    def buffer_bytes(
        self, arrays: Sequence[tuple[int, int]], contexts: Sequence[Context], *, updates: bool
    ) -> dict[str, int]:
        """Return the bytes of the base store's buffers, and of ``exchange``, ``wire`` and ``residual`` buffers.

        ``exchange``: buffers for other processes' data, and shared memory; ``wire``: copies in host memory of sums on
        devices; ``residual``: residuals of compression.
        """
        by_purpose = super().buffer_bytes(arrays, contexts, updates=updates)
        on_devices = 0 if any(context.device_type in HOST for context in contexts) else 1
        wire = on_devices * sum(nbytes for _, nbytes in arrays) if isinstance(self, KVStoreDevice) else 0
        residuals = 0 if self._dist_compression is None else sum(nbytes for _, nbytes in arrays)
        return {**by_purpose, "exchange": self._exchange_bytes(arrays), "wire": wire, "residual": residuals}

    def _exchange_bytes(self, arrays: Sequence[tuple[int, int]]) -> int:
        job, chosen = self._job_position(), self._dist_compression
        if job.workers == 1:
            return 0
        if chosen is not None:  # one key at a time, the compressed gradients of all processes
            packed = [chosen.packed_size(elements) for elements, _ in arrays]
            return job.workers * max((sent for sent in packed if sent > INLINE), default=0)
        sized = [((elements, nbytes // elements), nbytes) for elements, nbytes in reversed(arrays) if elements]
        buckets = self._rule.cut([(item, nbytes, np.dtype(f"V{item[1]}")) for item, nbytes in sized])
        totals = [(sum(elements for elements, _ in bucket), bucket[0][1]) for bucket in buckets]
        large = [(elements, itemsize) for elements, itemsize in totals if elements * itemsize > INLINE]
        parts = max((job.part(elements) * itemsize for elements, itemsize in large), default=0)
        # Shared memory has an area for the shares of one bucket, without the range that this process sums, and an area
        # for two sums of this range. By MPI, this process receives its range from each process.
        if job.shares_memory:
            return parts + max((elements * itemsize for elements, itemsize in large), default=0)
        return job.workers * parts


class AsyncFootprint(KVStoreLocal):
    """Base class that computes the memory footprint of a process of ``dist_async``, a worker and a server."""

    def _job_position(self) -> JobPosition:
        raise NotImplementedError

    def buffer_bytes(
        self, arrays: Sequence[tuple[int, int]], contexts: Sequence[Context], *, updates: bool
    ) -> dict[str, int]:
        """Return the bytes of the base store's buffers, and of ``server``: its values, and a gradient for each."""
        by_purpose = super().buffer_bytes(arrays, contexts, updates=True)
        served = sum(
            2 * self.local_elements(number, elements) * (nbytes // elements)
            for number, (elements, nbytes) in enumerate(arrays)
            if elements
        )
        return {**by_purpose, "server": served}

    def local_elements(self, number: int, elements: int) -> int:
        """Return the number of elements of key ``number`` whose optimizer state is on this process's server."""
        job = self._job_position()
        ranges = placement(number, elements, job.workers, self._bound)
        return sum(end - begin for server, begin, end in ranges if server == job.position)


# -- stand-ins ---------------------------------------------------------------------------------------------------------


class _PlannedSync(SyncFootprint):
    """Stand-in for ``dist_sync`` at a given place, without a job."""

    def __init__(self, name: str, position: JobPosition) -> None:
        super().__init__(name)
        self._planned_position = position

    def _job_position(self) -> JobPosition:
        return self._planned_position


class _PlannedDeviceSync(_PlannedSync, KVStoreDevice):
    """Stand-in for ``dist_device_sync`` at a given place, without a job."""


class _PlannedAsync(AsyncFootprint):
    """Stand-in for ``dist_async`` at a given place, without a job."""

    def __init__(self, name: str, position: JobPosition) -> None:
        super().__init__(name)
        self._planned_position = position

    def _job_position(self) -> JobPosition:
        return self._planned_position


def planned_stores(name: str, workers: int | None) -> list[KVStoreBase]:
    """Return a stand-in for the store of each process of a job, for ``buffer_bytes``; no MPI is started.

    Args:
        name: name of a distributed store.
        workers: number of processes, all on one host; None inside a job: return one stand-in, for this process.

    Raises:
        KVStoreError: the name is unknown.
        PlanError: the number of processes is invalid, or None outside a job.
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
        count, rank, local_size = map(int, job)
        return [kind(name, JobPosition(count, rank, count == local_size and can_share()))]
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 1 << 16:
        raise PlanError(f"workers must be a number of processes from 1 to 65,536, got {workers!r}")
    return [kind(name, JobPosition(workers, position, can_share())) for position in range(workers)]
