"""``dist_sync`` and ``dist_device_sync``: every process has the same values, since all add the same sums.

A push sums over this process's devices as ``local`` or ``device`` does, then over the processes (``group.py``), then
every process applies the same update to its own copy of the value. There is no server: the sums are equal to the bit,
so the copies stay equal, too. Pulls are local.

Exchanges happen in the order in which the program asks for them (``sequencer.py``), so every process must make the same
calls in the same order. Within one call with several keys, or one ``together()`` block, the last key comes first, as
backward computes gradients, and keys are joined into buckets (``buckets.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from weftplan.device.context import cpu
from weftplan.engine import get as get_engine
from weftplan.engine.shield import shielded, unbroken
from weftplan.errors import MXNetError
from weftplan.kvstore.at_once import pulled_again
from weftplan.kvstore.buckets import BucketRule
from weftplan.kvstore.compression import DTYPE, Compression
from weftplan.kvstore.copies import HOST, copy_each, together_fit
from weftplan.kvstore.distributed.arrays.exchange_cache import Arrays
from weftplan.kvstore.distributed.arrays.lazy_values import may_be_late
from weftplan.kvstore.distributed.base import KVStoreDist, arrays_in, described
from weftplan.kvstore.distributed.exchange.bucket_operation import JointPart
from weftplan.kvstore.distributed.exchange.call_cache import Bucket, Call, Calls, Stored
from weftplan.kvstore.distributed.exchange.tickets import Exchange, Part, Ticket
from weftplan.kvstore.distributed.footprint import Place, SyncFootprint
from weftplan.kvstore.distributed.group.group import Group
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.transport.wire import INLINE
from weftplan.kvstore.distributed.whole_push import begun_together
from weftplan.kvstore.keys import Key
from weftplan.kvstore.on_device import KVStoreDevice
from weftplan.kvstore.reduce import Array
from weftplan.kvstore.updater import Updater
from weftplan.ndarray import NDArray
from weftplan.ndarray.memory.chunk import Chunk


class KVStoreDistSync(SyncFootprint, KVStoreDist):
    """A store of all processes of a job, synchronous; sums over this process's devices are made on the CPU.

    Start the processes with ``weftplan launch -n 4 script.py``. Alone, a process is a job of one.
    """

    def __init__(self, name: str = "dist_sync") -> None:
        super().__init__(name)
        self._stored: Stored = Stored()
        self._rule = BucketRule.from_environment()
        self._meet(f"join gradients by {self._rule}")
        self._collected: list[tuple[Key, NDArray, Part]] | None = None
        self._calls = Calls(self._keys.number, self._described)
        self._descriptions: dict[Key, str] = {}
        self._dist_residuals: dict[Key, Array] = {}

    def _new(self, stored: NDArray) -> NDArray:
        return may_be_late(stored)

    # -- data -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Pushes of this block are one call: the last key is exchanged first, and small ones are joined."""
        with self._turn:
            self._sequencer.check()
            outer = self._collected is None
            collected = self._collected = [] if self._collected is None else self._collected
            try:
                yield
            finally:
                if outer:
                    self._collected = None
                    self._put(collected)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """As of ``local``, and over all processes; keys of one call travel together."""
        with self._turn:
            call = self._calls.of(key, self._stored, self._rule)
            if call is not None:
                pushed = call.given(value, listed=_listed(key))
                if pushed is not None and self._joint(call, pushed, None, priority):
                    return
            super().push(key, value, priority)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """As of ``local``; where no updater runs, what is pulled is written by the exchange itself."""
        with self._turn:
            call, listed = self._calls.of(key, self._stored, self._rule), _listed(key)
            pushed = call and call.given(value, listed=listed)
            outs = pushed if out is None else call and call.given(out, listed=listed)
            if call and pushed and outs and self._joint(call, pushed, outs, priority):
                self._before_pull()
                return
            super().pushpull(key, value, out, priority)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """As of ``local``; what an exchange that is to come can write itself is not copied."""
        self._before_pull()
        if not priority and pulled_again(self._copies, self._stored, key, out):
            return  # what is small is copied in less time than it takes to have it written
        call = self._calls.of(key, self._stored, self._rule)
        pulled = call and call.given(out, listed=_listed(key))
        if call is None or not pulled:
            super().pull(key, out, priority, ignore_sparse)
            return
        given, outs = pulled
        left = []
        for bucket in call.pushed:
            part = bucket.part
            if part is None or part.over or not self._sequencer.meanwhile(part.take, given, bucket.of(outs)):
                left.append(bucket)
        if len(left) == len(call.pushed):
            super().pull(key, out, priority, ignore_sparse)
        elif left:
            self._pull(
                [(k, [outs[place]]) for bucket in left for k, place in zip(bucket.keys, bucket.places, strict=True)],
                priority,
            )

    def joined(self, keys: Sequence[Key]) -> list[Sequence[Key]] | None:
        call = self._calls.of(list(keys), self._stored, self._rule)
        return None if call is None else [bucket.keys for bucket in call.buckets]

    def _joint(self, call: Call, pushed: Arrays, pulled: Arrays | None, priority: int) -> bool:
        """Push an operation and an exchange for each bucket, and what follows from the sums; False: nothing is done.

        Args:
            pulled: what is pulled, too; may be ``pushed``.
        """
        if self._collected is not None or self._dist_compression is not None:
            return False
        updates = self._updater is not None
        if not (call.merges(self._merged) if updates else self._group.whole):
            return False  # merge buffers are made by the first push
        given, arrays = pushed
        if pulled is not None and pulled[0] is not given:
            taken = {array.var for array in arrays}
            if any(out.var is not array.var and out.var in taken for array, out in zip(arrays, pulled[1], strict=True)):
                return False  # it is to be read before it is written
        self._sequencer.check()
        if not updates and not priority and self._together(call, pushed, pulled):
            return True
        rounds = call.rounds(given, arrays, updates=updates)
        with shielded():
            unbroken()
            call.pushed = call.buckets
            for bucket, round in zip(call.buckets, rounds, strict=True):
                rows: Sequence[Sequence[NDArray]] = ()
                if pulled is not None and not updates:
                    rows = (bucket.of(pulled[1]),)
                    round = round.wider(pulled[0], rows[0])
                part = JointPart(round, bucket.of(arrays), self._add, rows)
                self._start(part, priority, Ticket(bucket.description, (part,), part.sum))
                bucket.part = None if updates else part
        if updates:
            for bucket in reversed(call.buckets):
                self._update(bucket, priority)
            if pulled is not None:
                outs = sorted(zip(call.keys, ([out] for out in pulled[1]), strict=True), key=self._by_number)
                self._pull(outs, priority)
        return True

    def _together(self, call: Call, pushed: Arrays, pulled: Arrays | None) -> bool:
        """Begin an operation and an exchange of all buckets, where nobody uses their arrays; False: nothing is done."""
        if not self._group.shares_memory:
            return False
        with shielded():
            unbroken()
            ticket = begun_together(call, pushed, pulled, self._add)
            if ticket is None:
                return False
            self._sequencer.put(ticket)
        return True

    def _update(self, bucket: Bucket, priority: int) -> None:
        """Let the updater have the sums of a bucket: those of an optimizer all at once."""
        assert self._updater is not None
        keys = bucket.keys[::-1]  # as they come where each is pushed alone
        merged = [self._merged[key] for key in keys]
        stored = [self._stored_near(key, array, priority) for key, array in zip(keys, merged, strict=True)]
        if len(keys) > 1 and isinstance(self._updater, Updater):
            self._updater(keys, merged, stored)
            return
        for key, array, value in zip(keys, merged, stored, strict=True):
            self._updater(key, array, value)

    def _by_number(self, group: tuple[Key, list[NDArray]]) -> int:
        return self._keys.number(group[0])

    def _push(self, groups: list[tuple[Key, list[NDArray]]], priority: int) -> None:
        with self._turn:
            self._sequencer.check()
            within = self._collected is not None
            if not self._group.whole and any(key not in self._merged for key, _ in groups):
                self._lay_out(self._stored if within else [key for key, _ in groups])
            if within:
                super()._push(groups, priority)
                return
            collected: list[tuple[Key, NDArray, Part]] = []
            self._collected = collected
            try:
                super()._push(groups, priority)
            finally:
                self._collected = None
                self._put(collected)

    def _pull(self, groups: list[tuple[Key, list[NDArray]]], priority: int) -> None:
        super()._pull(self._pull_awaited(groups, priority) if len(groups) > 1 else groups, priority)

    def _pull_awaited(self, groups: list[tuple[Key, list[NDArray]]], priority: int) -> list[tuple[Key, list[NDArray]]]:
        """Push the copies of values that are being exchanged, an operation for each bucket; returns the others."""
        awaited, others = [], []
        seen: set[Any] = set()
        for key, arrays in groups:
            stored = self._stored[key]
            if stored.var.write is not None and together_fit(stored, arrays, seen):
                awaited.append(((stored, arrays), stored.nbytes, stored.dtype))
            else:
                others.append((key, arrays))
        for bucket in self._rule.cut(awaited[::-1]):
            copy_each(bucket, priority, self._spread, inline=self._inline)
        return others

    def _lay_out(self, keys: Iterable[Key]) -> None:
        """Make the merge buffers of keys that are pushed together side by side, in the order in which they travel.

        A bucket is then one range of memory, and MPI can have its gradients without a copy. In a ``together()`` block
        the program says that its pushes belong together, and all keys are laid out with the first of them.
        """
        new = sorted((key for key in keys if key not in self._merged), key=self._keys.number, reverse=True)
        for dtype, run in groupby(new, key=lambda key: self._stored[key].dtype):
            arrays = [(key, self._stored[key]) for key in run]
            total = sum(array.nbytes for _, array in arrays)
            if len(arrays) < 2 or not total:
                continue
            room, offset = Chunk(cpu(0), total), 0
            for key, array in arrays:
                self._merged[key] = NDArray(room.part(offset, array.nbytes), array.shape, dtype)
                offset += array.nbytes

    def _sums_straight(self, arrays: list[NDArray], stored: NDArray) -> bool:
        # What is stored must not change before the sum over processes is there, and stay whole should that fail.
        return (
            self._group.whole
            and len(arrays) == 1
            and self._dist_compression is None
            and super()._sums_straight(arrays, stored)
        )

    def _place(self) -> Place:
        return Place(self.num_workers, self.rank, self._group.shares_memory)

    def _store_sum(self, key: Key, arrays: list[NDArray], stored: NDArray, priority: int) -> None:
        self._collect(key, stored, priority, arrays)

    def _fill(self, key: Key, arrays: list[NDArray], merged: NDArray, priority: int) -> None:
        on_host = all(array.context.device_type in HOST for array in (*arrays, merged))
        if on_host and (len(arrays) == 1 or merged.nbytes <= INLINE):
            self._collect(key, merged, priority, arrays)
        else:
            super()._fill(key, arrays, merged, priority)
            self._collect(key, merged, priority)

    def _collect(self, key: Key, merged: NDArray, priority: int, sources: Sequence[NDArray] = ()) -> None:
        """Push the operation of one key, whose exchange is queued with those of the other keys of the call.

        On an engine that runs operations where they are pushed, the push waits for the exchange; so each key is
        exchanged by itself, in the order of the pushes.
        """
        assert self._collected is not None, "a sum outside of a push"
        if get_engine().waits_in_push:
            self._part(key, merged, priority, sources, lambda part: self._ticket([(key, merged, part)]))
        else:
            self._collected.append((key, merged, self._part(key, merged, priority, sources)))

    def _put(self, collected: list[tuple[Key, NDArray, Part]]) -> None:
        """Queue exchanges for what a call has pushed: in an order that only depends on the calls."""
        if len(collected) == 1:
            self._sequencer.put(self._ticket(collected))
            return
        collected = [item for _, item in sorted(enumerate(collected), key=lambda pair: self._travels(*pair))]
        rule = self._rule if self._dist_compression is None else BucketRule(1, None)
        for bucket in rule.cut([(item, item[1].nbytes, item[1].dtype) for item in collected]):
            self._sequencer.put(self._ticket(bucket))

    def _ticket(self, bucket: Sequence[tuple[Key, NDArray, Part]]) -> Ticket:
        """The exchange of a bucket of (key, merge buffer, its part)."""
        what = ", ".join(self._described(key, merged) for key, merged, _ in bucket)
        exchange: Exchange = Group.sum if self._dist_compression is None else self._sum_compressed(bucket[0][0])
        return Ticket(f"sum {what}", [part for _, _, part in bucket], exchange)

    def _described(self, key: Key, merged: NDArray) -> str:
        found = self._descriptions.get(key)
        if found is None:
            found = self._descriptions[key] = described(key, merged)
        return found

    def _travels(self, index: int, item: tuple[Key, NDArray, Part]) -> tuple[int, int]:
        return -self._keys.number(item[0]), index

    # -- optimizer ------------------------------------------------------------------------------------------------

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Send two bits, or one, for each element of a float32 sum of this process; keep the rest in a residual.

        Pulls and initial values are not compressed. It cannot be switched off again.

        Raises:
            KVStoreError: see :meth:`KVStoreDevice.set_gradient_compression`; ranks that give different settings.
        """
        chosen = Compression.from_params(compression_params)
        self._meet(f"compress gradients by {chosen}")
        with self._turn:
            self._dist_compression = chosen

    def _sum_compressed(self, key: Key) -> Exchange:
        compression = self._dist_compression
        assert compression is not None

        def exchange(
            group: Group, shares: Sequence[Array], totals: Sequence[Array], what: str, failure: str | None
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

    # -- the group ------------------------------------------------------------------------------------------------

    def recover(self) -> int:
        """Go on after a :class:`~weftplan.errors.WorkerLostError`, without the dead; every survivor must call it.

        Values and optimizer states become those of the survivor that has completed most exchanges, so that all are
        equal again. A gradient whose exchange failed is gone: compute it again and push it.

        Returns:
            How many processes are left.

        Raises:
            KVStoreError: this MPI cannot go on after a death.
        """
        with self._turn:
            root = int(self._sequencer.call(Group.regroup, repairs=True))
            for key, stored in self._stored.items():
                _heal(stored)
                self._from(root, "recover", key, stored)
            if isinstance(self._updater, Updater):
                self._share_states(self._updater, root)
        return self.num_workers

    def _share_states(self, updater: Updater, root: int) -> None:
        for state in updater.states.values():
            for array in arrays_in(state):
                _heal(array)
        own = updater.get_states()
        size = np.array([len(own)], np.int64)
        self._sequencer.call(lambda group: group.broadcast(size, root, "recover the size of optimizer states"))
        data = np.frombuffer(own, np.uint8) if self._group.rank == root else np.empty(int(size[0]), np.uint8)
        data = data.copy()
        self._sequencer.call(lambda group: group.broadcast(data, root, "recover optimizer states"))
        if self._group.rank != root:
            updater.set_states(data.tobytes())

    def statistics(self) -> dict[str, int]:
        """As of ``local``, and bytes for the exchange: parts of other processes' arrays, shares in memory that the
        processes of a host have in common, copies of what a GPU holds.

        ``joined_bytes`` counts what has been copied so far to join gradients into buckets for MPI.
        """
        return {
            **super().statistics(),
            "exchange_bytes": self._group.scratch_bytes,
            "wire_bytes": sum(array.nbytes for array in list(self._wire.values())),
            "joined_bytes": self._group.joined,
            "residual_bytes": sum(array.nbytes for array in list(self._dist_residuals.values())),
        }


class KVStoreDistDeviceSync(KVStoreDistSync, KVStoreDevice):
    """As :class:`KVStoreDistSync`, with sums over this process's devices made on those devices."""

    def __init__(self, name: str = "dist_device_sync") -> None:
        super().__init__(name)

    def _lay_out(self, keys: Iterable[Key]) -> None:
        """Each sum is where its first push finds the least to do."""


def _listed(key: Any) -> bool:
    return key.__class__ is list or key.__class__ is tuple


def _heal(array: NDArray) -> None:
    """Let ``array`` be read again after a failure: what should have written it did not run, so its values are whole."""
    with contextlib.suppress(MXNetError):
        array.wait_to_read()
    get_engine().push(lambda: None, (), (array.var,), array.context, name="KVStoreRecover")
