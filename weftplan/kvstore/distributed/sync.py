"""``dist_sync`` and ``dist_device_sync``: stores whose processes sum gradients and have equal copies of all values.

A push sums over this process's devices as ``local`` or ``device`` does, then over the processes (``group.py``). Each
process then applies the same update to its own copy of the value. There is no server: the sums are bitwise equal, so
the copies stay equal, too. A pull copies from this process's values.

Exchanges run in program order (``sequencer.py``), so every process must make the same calls in the same order. A call
exchanges its keys in buckets (``buckets.py``), last key first, since backward computes gradients in this order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np

from weftplan.device.context import cpu
from weftplan.errors import KVStoreError
from weftplan.kvstore.compression import DTYPE, Compression
from weftplan.kvstore.distributed.base import described
from weftplan.kvstore.distributed.exchange.tickets import Exchange, Ticket
from weftplan.kvstore.distributed.footprint import JobPosition, SyncFootprint
from weftplan.kvstore.distributed.group.group import RankGroup
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.recovery import RecoveringStore
from weftplan.kvstore.fixed_order_sums import Array
from weftplan.kvstore.keys import Key
from weftplan.kvstore.layout import Bucket, BucketLayout, Groups, T
from weftplan.kvstore.on_device import KVStoreDevice
from weftplan.kvstore.stages import HOST
from weftplan.kvstore.ways_of_summing import Item
from weftplan.ndarray import NDArray
from weftplan.ndarray.memory.chunk import Chunk


class KVStoreDistSync(SyncFootprint, RecoveringStore):
    """A synchronous store of all processes of a job, which sums over each process's devices on the CPU.

    Start the processes with ``weftplan launch -n 4 script.py``. A process without the launcher is a job of one.
    """

    def __init__(self, name: str = "dist_sync") -> None:
        super().__init__(name)
        self._meet(f"join gradients by {self._rule}")
        self._dist_residuals: dict[Key, Array] = {}

    # -- data -----------------------------------------------------------------------------------------------------

    def _lay(self, pushed: Groups, pulled: Groups, priority: int, ready: Sequence[Key] | None = None) -> BucketLayout:
        if not self._group.is_atomic:
            self._lay_out([key for key, _ in pushed])
        return super()._lay(pushed, pulled, priority, ready)

    def _run(self, layout: BucketLayout, priority: int) -> None:
        self._check_sums()
        super()._run(layout, priority)
        if layout.pulled:
            self._sequencer.hurry()

    @property
    def _is_alone(self) -> bool:
        """Whether this process's own sums are the result: it is the only member, and nothing is compressed."""
        return self.num_workers == 1 and self._dist_compression is None

    def _lay_separately(self, layout: BucketLayout) -> BucketLayout:
        if self._is_alone:
            return super()._lay_separately(layout)
        # Keep the buckets: processes without the failure make the same exchanges as before, and so must this process.
        buckets = []
        for bucket in layout.buckets:
            partial_item = [self._still_to_do(item._replace(outs=()), fuses=False) for item in bucket.items]
            buckets.append(Bucket(bucket.items, self._by_method(partial_item, updates=False)))
        return layout._replace(buckets=buckets)

    def _cut(self, items: Sequence[Item]) -> list[list[Item]]:
        if self._dist_compression is not None and items and items[0].arrays:
            return [[item] for item in items]
        return super()._cut(items)

    def _in_order(self, values: Mapping[Key, T], ready: Sequence[Key] | None) -> list[T]:
        # Every process needs the same buckets, and plans of other batch sizes may have another order.
        return super()._in_order(values, ready if self._is_alone else None)

    def _still_to_do(self, item: Item, *, fuses: bool) -> Item:
        return super()._still_to_do(item if self._is_alone else item._replace(arrays=()), fuses=fuses)

    def _sum_over_processes(self, items: Sequence[Item], priority: int) -> None:
        if self._is_alone:
            return
        straight = all(len(i.arrays) == 1 and _on_host(i.arrays[0]) and _on_host(i.total) for i in items)
        if not straight:
            for batch in self._by_method([i._replace(stored=i.total, outs=()) for i in items], updates=False):
                self._launch(batch, (), priority)
        parts = [(item.key, item.arrays[0] if straight else item.total, item.total) for item in items]
        what = ", ".join([described(item.key, item.total) for item in items])
        exchange = RankGroup.sum if self._dist_compression is None else self._sum_compressed(items[0].key)
        self._exchange_bucket(lambda part: Ticket(f"sum {what}", [part], exchange), parts, priority)

    def _lay_out(self, keys: Iterable[Key]) -> None:
        """Allocate the merge buffers of new keys of a push contiguously, in exchange order.

        A bucket is then one range of memory, which MPI can send without a copy.
        """
        new = sorted((key for key in keys if key not in self._merged), key=self._keys.number, reverse=True)
        for dtype, run in groupby(new, key=lambda key: self._stored[key].np_dtype):
            arrays = [(key, self._stored[key]) for key in run]
            total = sum(array.nbytes for _, array in arrays)
            if len(arrays) < 2 or not total:
                continue
            chunk, offset = Chunk(cpu(0), total), 0
            for key, array in arrays:
                self._merged[key] = NDArray(chunk.part(offset, array.nbytes), array.shape, dtype)
                offset += array.nbytes

    def _sums_straight(self, arrays: Collection[NDArray], stored: NDArray) -> bool:
        # A failed exchange must not leave a half-written stored value. Only an atomic group changes results last.
        return (
            self._group.is_atomic
            and len(arrays) == 1
            and self._dist_compression is None
            and super()._sums_straight(arrays, stored)
        )

    def _job_position(self) -> JobPosition:
        return JobPosition(self.num_workers, self.rank, self._group.shares_memory)

    # -- optimizer ------------------------------------------------------------------------------------------------

    def set_gradient_compression(self, compression_params: Mapping[str, object]) -> None:
        """Compress this process's float32 sums to two bits or one bit per element for the exchange.

        The unsent difference is stored in a residual for each key. Pulls and initial values are not compressed.
        Compression cannot be turned off. Every rank calls this with the same settings and waits.

        Raises:
            KVStoreError: the settings are not legal, as for :meth:`KVStoreDevice.set_gradient_compression`, or differ
                between ranks, or the job is elastic.
        """
        chosen = Compression.from_params(compression_params)
        if self.is_elastic:
            raise KVStoreError(
                "gradient compression keeps residuals on each rank, which a replacement cannot have: do not compress "
                "in a job of weftplan launch --elastic"
            )
        self._meet(f"compress gradients by {chosen}")
        with self._turn:
            self._dist_compression = chosen
            self._version += 1

    def _sum_compressed(self, key: Key) -> Exchange:
        compression = self._dist_compression
        assert compression is not None

        def exchange(
            group: RankGroup, shares: Sequence[Array], totals: Sequence[Array], what: str, failure: str | None
        ) -> Steps[None]:
            share, values = (shares[0], totals[0]) if failure is None else (np.empty(0, DTYPE), np.empty(0, DTYPE))
            if values.dtype != DTYPE:
                failure = failure or f"only {DTYPE} gradients are compressed, got {values.dtype}"
            packed = np.empty(compression.packed_size(values.size), np.uint8)
            if failure is None:
                residual = self._dist_residuals.setdefault(key, np.zeros(values.size, DTYPE))
                compression.pack(share.reshape(-1), residual, packed, **self._sharing)
            compression.unpack_sum((yield from group.gather(packed, what, failure)), values, **self._sharing)

        return exchange

    def statistics(self) -> dict[str, int]:
        """Return the statistics of ``local`` and of exchanges, in bytes.

        ``exchange_bytes``: buffers for other processes' data, and shared memory; ``wire_bytes``: copies in host memory
        of arrays on devices; ``joined_bytes``: copied so far to make buckets contiguous for MPI; ``residual_bytes``:
        residuals of compression.
        """
        return {
            **super().statistics(),
            "exchange_bytes": self._group.scratch_bytes,
            "wire_bytes": sum(array.nbytes for array in list(self._wire.values())),
            "joined_bytes": self._group.joined,
            "residual_bytes": sum(array.nbytes for array in list(self._dist_residuals.values())),
        }


class KVStoreDistDeviceSync(KVStoreDistSync, KVStoreDevice):
    """A synchronous store of all processes of a job, which sums over each process's devices on these devices."""

    def __init__(self, name: str = "dist_device_sync") -> None:
        super().__init__(name)

    def _lay_out(self, keys: Iterable[Key]) -> None:
        """Do nothing: the first push of a key chooses the device of its merge buffer."""


def _on_host(array: NDArray) -> bool:
    return array.chunk.context.device_type in HOST
