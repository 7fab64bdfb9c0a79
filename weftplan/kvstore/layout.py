"""The layout of a call: its keys in buckets, and the engine operations that exchange each bucket.

Buckets follow the order in which gradients become ready, if the caller passes it. The default is the last key first,
since backward computes the last layers' gradients first. A way of summing (``ways_of_summing.py``) turns each bucket
into stages: the sum into merge buffers, a fused optimizer step, and copies to the caller. The stages are pushed as one
engine operation, ordered by the vars of its arrays; no function here waits for an operation.

A store's lock serialises calls of several threads: two pushes of a key share a merge buffer, and an updater need not be
thread-safe.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

from weftplan import config
from weftplan.device.context import Context, cpu
from weftplan.engine import debug_enabled
from weftplan.engine import get as get_engine
from weftplan.engine.var import Var
from weftplan.kvstore.buckets import BucketRule, order_of_exchange
from weftplan.kvstore.fixed_order_sums import BlockSum, Sharing, sum_grouped_block
from weftplan.kvstore.keys import Key, KeyTable
from weftplan.kvstore.stages import HOST, RepeatedExchange, Stage, copy, copy_to_all, has_failed, launch
from weftplan.kvstore.updater import Updater
from weftplan.kvstore.updating import UpdatingStore
from weftplan.kvstore.ways_of_summing import Item, Near, SumBatch, SumMethod
from weftplan.locks import ReentrantLock, free_in_children
from weftplan.ndarray import NDArray, empty, zeros
from weftplan.support.slots import MAKE_ROOM

T = TypeVar("T")
Groups = list[tuple[Key, list[NDArray]]]


class Bucket(NamedTuple):
    """Keys that are exchanged together (``items``), and the same keys grouped by way of summing (``lots``)."""

    items: Sequence[Item]
    batches: Sequence[SumBatch]


class BucketLayout(NamedTuple):
    """A call's keys, divided into buckets.

    Attributes:
        pushed: (key, gradients) pairs of the call.
        pulled: (key, arrays to fill) pairs of the call.
        items: all pushed keys, in ascending key number.
        buckets: the buckets, in the order of exchange.
        fuses: whether the sum, the update and the copies of a bucket are one operation.
        version: the store's version; the layout is valid for this version only.
    """

    pushed: Groups
    pulled: Groups
    items: Sequence[Item]
    buckets: Sequence[Bucket]
    fuses: bool
    version: int


class ExchangingStore(UpdatingStore):
    """Base class of stores that sum, update and copy keys; subclasses define placement and ways of summing.

    Guarantees:

    * Calls take effect in the order in which threads acquire ``_turn``; the vars of the stored arrays order their
      operations, so a pull reads the sums of all earlier pushes.
    * A key's gradients are added in one order, whatever its bucket, its priority or the number of threads.
    * A layout, or a cached call, is used only while ``_version`` is the one with which it was made.

    ``_bound``, ``_sharing`` and ``_rule`` are fixed when the store is created. A key is removed only if its
    ``init`` fails. A stored value or a merge buffer may move to another device, and its array is then a new one. The
    updater may be replaced at any time.
    """

    _block_sum: BlockSum = staticmethod(sum_grouped_block)
    _inline = 0
    """An operation that writes at most this many bytes runs on the thread that makes it ready, without a queue."""

    def __init__(self) -> None:
        super().__init__()
        self._keys = KeyTable()
        self._stored: dict[Key, NDArray] = {}
        self._merged: dict[Key, NDArray] = {}
        self._staging: dict[tuple[Key, int], NDArray] = {}
        self._load: dict[Context, int] = {}
        """Bytes of the keys summed on each context."""
        # Serialises calls, and guards the fields above. Reentrant because an updater may use the store.
        self._turn = free_in_children(ReentrantLock())
        self._bound = int(config.get("MXNET_KVSTORE_BIGARRAY_BOUND"))
        self._sharing: Sharing = {
            "threads": int(config.get("MXNET_KVSTORE_REDUCTION_NTHREADS")),
            "bound": self._bound,
            "compiled": config.get("WEFTPLAN_KERNELS") != "numpy",
        }
        self._methods: dict[Context, SumMethod] = {}
        """The way of summing on each context."""
        self._rule = BucketRule.from_environment()
        self._pushes: dict[Key, RepeatedExchange] = {}
        """Cached stages of the last push of one key, by key."""
        self._pulls: dict[Key, RepeatedExchange] = {}
        """Cached stages of the last pull of one key, by key."""
        # Incremented by every change that invalidates layouts and cached calls: of the stored arrays, of the ways of
        # summing, or of the updater.
        self._version = 0

    # -- layout -------------------------------------------------------------------------------------------------------

    def _exchange(self, pushed: Groups, pulled: Groups, priority: int) -> None:
        """Push the operations of a call: sums and updates of ``pushed``, then copies to ``pulled``."""
        with self._turn:
            if not pushed:
                self._copy_out(pulled, priority, separate=self._must_separate(pushed, pulled))
                return
            layout = self._lay(pushed, pulled, priority)
            self._run(layout, priority)
            if len(pushed) == 1 and not pulled and (self._updater is None or layout.fuses) and layout.buckets:
                self._cache_call(self._pushes, layout.buckets[0].batches[0], pushed[0])

    def _lay(self, pushed: Groups, pulled: Groups, priority: int, ready: Sequence[Key] | None = None) -> BucketLayout:
        """Return the layout of a call, valid until :attr:`_version` changes.

        Args:
            pushed: (key, gradients) pairs; at least one.
            pulled: (key, arrays to fill) pairs.
            priority: engine priority of copies of stored values to other devices.
            ready: all keys in the order of their gradients' readiness; None: the last key first.
        """
        updater = self._updater
        items = [self._item(key, arrays, priority) for key, arrays in pushed]
        fuses = _are_separate(pushed, pulled)
        if updater is not None:
            contexts = {item.total.chunk.context for item in items}
            fuses = fuses and isinstance(updater, Updater) and updater.fuses_on(contexts)
        rows = dict(pulled) if fuses else {}
        remaining = [self._still_to_do(item._replace(outs=rows.get(item.key, ())), fuses=fuses) for item in items]
        by_key = {item.key: item for item in remaining}
        buckets = []
        for bucket in self._cut(self._in_order({item.key: item for item in items}, ready)):
            batches = self._by_method([by_key[item.key] for item in bucket], updates=fuses and updater is not None)
            buckets.append(Bucket(bucket, batches))
        return BucketLayout(pushed, pulled, items, buckets, fuses, self._version)

    def _in_order(self, values: Mapping[Key, T], ready: Sequence[Key] | None) -> list[T]:
        """Return the values of a mapping in the order of exchange (:func:`order_of_exchange`)."""
        return order_of_exchange(values, ready)

    def _cut(self, items: Sequence[Item]) -> list[list[Item]]:
        """Divide keys, in the order of exchange, into buckets."""
        return self._rule.cut([(item, item.stored.nbytes, item.stored.np_dtype) for item in items])

    def _item(self, key: Key, arrays: list[NDArray], priority: int) -> Item:
        stored = self._stored[key]
        if self._updater is None and self._sums_straight(arrays, stored):
            return Item(key, arrays, stored, stored, ())
        total = self._merge_buffer(key, arrays)
        stored = self._move_stored(key, total, priority, keep_value=self._updater is not None)
        return Item(key, arrays, total, stored, ())

    def _merge_buffer(self, key: Key, arrays: Sequence[NDArray]) -> NDArray:
        """Return the array for the sum of a key, created by its first push and reused by later pushes."""
        total = self._merged.get(key)
        if total is None:
            load = self._load.copy()  # without a buffer no context gets its load, on which later placement depends
            context = self._least_loaded([array.context for array in arrays], load, arrays[0].nbytes)
            total = self._merged[key] = zeros(arrays[0].shape, ctx=context, dtype=arrays[0].np_dtype)
            self._load = load
        return total

    def _least_loaded(self, contexts: Sequence[Context], load: dict[Context, int], nbytes: int) -> Context:
        """Return the context that sums a key of ``nbytes``, and add its bytes to ``load`` of this context.

        This class always returns ``cpu(0)`` and does not change ``load``.
        """
        del contexts, load, nbytes
        return cpu(0)

    def _move_stored(self, key: Key, merged: NDArray, priority: int, *, keep_value: bool = True) -> NDArray:
        """Return the stored value, moved permanently to the context of the sum ``merged`` if it is elsewhere.

        If ``keep_value`` is false, a new array is not filled, because the sum is about to replace the value.
        """
        stored = self._stored[key]
        if stored.context != merged.context:
            moved = empty(stored.shape, ctx=merged.context, dtype=stored.np_dtype)
            if keep_value:
                copy(stored, moved, priority)
            stored = self._stored[key] = moved
            self._version += 1
        return stored

    def _sums_straight(self, arrays: Collection[NDArray], stored: NDArray) -> bool:
        """Return whether the sum may be written directly to ``stored``: all are on the host, no array is ``stored``."""
        stored_var = stored.chunk.var
        for array in arrays:
            chunk = array.chunk
            if chunk.context.device_type not in HOST or chunk.var is stored_var:
                return False
        return stored.chunk.context.device_type in HOST

    def _still_to_do(self, item: Item, *, fuses: bool) -> Item:
        """Return the item of a key as the operation of its bucket must handle it.

        If the updater is called later, the operation only sums: ``total`` also takes the role of ``stored``.
        """
        if fuses or self._updater is None:
            return item
        return item._replace(stored=item.total)

    def _by_method(self, items: Sequence[Item], *, updates: bool) -> list[SumBatch]:
        by_method: dict[SumMethod, list[Item]] = {}
        for item in items:
            by_method.setdefault(self._method(item), []).append(item)
        return [SumBatch(method, members, updates=updates) for method, members in by_method.items()]

    def _method(self, item: Item) -> SumMethod:
        """Return the way of summing a key and of copying it out."""
        context = item.total.context
        method = self._methods.get(context)
        if method is None:
            canonical = cpu(0) if context.device_type in HOST else context
            method = self._methods.get(canonical) or self._make_method(canonical)
            self._methods[canonical] = self._methods[context] = method
        return method

    def _make_method(self, context: Context) -> Near:
        """Return a new way of summing on the host or on a device."""
        return Near(context, self._block_sum, self._sharing, self._stage_copy)

    def _stage_copy(self, key: Key, index: int, array: NDArray, context: Context, priority: int) -> NDArray:
        """Push a copy of ``array`` to a staging array on ``context``, reused by later pushes, and return the copy."""
        staging = self._staging.get((key, index))
        if staging is None:
            staging = self._staging[key, index] = empty(array.shape, ctx=context, dtype=array.np_dtype)
        copy(array, staging, priority)
        return staging

    # -- operations ---------------------------------------------------------------------------------------------------

    def _run(self, layout: BucketLayout, priority: int) -> None:
        separate = self._must_separate(layout.pushed, layout.pulled)
        fuses = layout.fuses
        if separate and (fuses or len(layout.items) > 1):
            layout, fuses = self._lay_separately(layout), False
        updated: list[Key] = []
        for bucket in layout.buckets:
            self._sum_over_processes(bucket.items, priority)
            for batch in bucket.batches:
                steps: Sequence[Stage] = ()
                if fuses and self._updater is not None:
                    steps = self._steps(batch.keys, batch.totals, batch.stored, updated)
                self._launch(batch, steps, priority)
        if not fuses:
            self._update_each(layout.items)
            self._copy_out(layout.pulled, priority, separate=separate)

    def _must_separate(self, pushed: Groups, pulled: Groups) -> bool:
        """Return whether each key needs a separate operation: an array has failed, arrays may be offloaded, or the
        engine is in debug mode."""
        if MAKE_ROOM.value is not None or debug_enabled():
            return True
        if not get_engine().has_failed:
            return False
        groups = [*pushed, *pulled]
        held = [array for key, _ in groups for array in (self._stored[key], self._merged.get(key)) if array is not None]
        return has_failed([*held, *(array for _, arrays in groups for array in arrays)])

    def _lay_separately(self, layout: BucketLayout) -> BucketLayout:
        """Return a layout with one bucket for each key, so that a failure does not spread to other keys."""
        buckets = []
        for bucket in layout.buckets:
            for item in bucket.items:
                remaining = self._still_to_do(item._replace(outs=()), fuses=False)
                buckets.append(Bucket([item], self._by_method([remaining], updates=False)))
        return layout._replace(buckets=buckets)

    def _sum_over_processes(self, items: Sequence[Item], priority: int) -> None:
        """Do nothing; distributed stores push the sum of a bucket over all processes here."""

    def _launch(self, batch: SumBatch, steps: Sequence[Stage], priority: int) -> None:
        """Push the operation of a lot, then copies to the arrays that its way cannot reach."""
        stages = batch.stages(steps, priority)
        if stages:
            launch(stages, priority, inline=self._inline)
        for item in batch.later:
            method = self._method(item)
            if all(method.reaches(item.stored, out) for out in item.outs):
                launch(method.stages([item], (), priority), priority, inline=self._inline)
            else:
                copy_to_all(item.stored, item.outs, priority)

    def _steps(
        self, keys: Sequence[Key], totals: Sequence[NDArray], stored: Sequence[NDArray], updated: list[Key]
    ) -> Sequence[Stage]:
        """Return the optimizer's fused stages for the keys of a lot, and add the keys to ``updated``.

        ``updated`` lists the keys of this call updated so far, for a note on an error of the optimizer.
        """
        assert isinstance(self._updater, Updater)
        try:
            steps = self._updater.steps(keys, totals, stored)
        except Exception as error:
            error.add_note(f"{self!r} had updated {updated}; it did not update {keys} or any key after them")
            raise
        updated += keys
        return steps

    def _update_each(self, items: Sequence[Item]) -> None:
        """Call the updater for each key, in ascending key number; a note on its error names updated and other keys."""
        if self._updater is None:
            return
        for index, item in enumerate(items):
            try:
                self._updater(item.key, item.total, item.stored)
            except Exception as error:
                earlier, later = [i.key for i in items[:index]], [i.key for i in items[index + 1 :]]
                error.add_note(f"the updater failed at key {item.key!r} after {earlier}; not updated: {later}")
                raise

    def _copy_out(self, pulled: Groups, priority: int, *, separate: bool) -> None:
        """Push copies of stored values to the caller's arrays, in ascending key number; if ``separate``, key by key."""
        items = [Item(key, (), self._stored[key], self._stored[key], outs) for key, outs in pulled]
        separate = separate or not _are_separate([], pulled)
        for bucket in [[item] for item in items] if separate else self._cut(items):
            if separate and has_failed([bucket[0].stored, *bucket[0].outs]):
                copy_to_all(bucket[0].stored, bucket[0].outs, priority)  # a failed array must not fail the other copies
                continue
            for batch in self._by_method(bucket, updates=False):
                self._launch(batch, (), priority)
                if len(pulled) == 1:
                    self._cache_call(self._pulls, batch, pulled[0])

    def _cache_call(
        self, calls: dict[Key, RepeatedExchange], batch: SumBatch, group: tuple[Key, list[NDArray]]
    ) -> None:
        """Cache the stages of a call of one key, if all but the optimizer's stages are the same for every call."""
        key, arrays = group
        if batch.fixed is not None and any(batch.fixed) and all(array.__class__ is NDArray for array in arrays):
            calls[key] = RepeatedExchange(*batch.fixed, arrays, self._version, self._inline)
        else:
            calls.pop(key, None)

    def _repeat(self, calls: Mapping[Key, RepeatedExchange], key: object, arrays: object) -> bool:
        """Run the cached stages if a call has one key and the arrays of this key's last call; else return False."""
        if key.__class__ is list and len(key) == 1 and arrays.__class__ is list and len(arrays) == 1:
            key, arrays = key[0], arrays[0]
        if key.__class__ is not str and key.__class__ is not int:
            return False
        call = calls.get(key)
        if call is None or call.version != self._version:
            return False
        current = arrays if arrays.__class__ is list or arrays.__class__ is tuple else (arrays,)
        if not call.accepts(current):
            return False
        # Without the lock: the cached stages change no state of the store, and vars order the operations.
        if calls is self._pulls or self._updater is None:
            return call.run(current, None)
        with self._turn:
            # The updater must not run in two threads. Another thread may have invalidated the call before the lock.
            if call.version != self._version:
                return False
            return call.run(current, lambda: self._steps([key], [self._merged[key]], [self._stored[key]], []))


def _are_separate(pushed: Groups, pulled: Groups) -> bool:
    """Return whether each bucket may be copied out before later buckets are summed.

    No array to fill may appear twice, or be a gradient of another key, which a later bucket would read.
    """
    outs: dict[Var, Key] = {}
    for key, arrays in pulled:
        for array in arrays:
            var = array.chunk.var
            if var in outs:
                return False
            outs[var] = key
    if pushed is pulled:
        return True
    for key, arrays in pushed:
        for array in arrays:
            if outs.get(array.chunk.var, key) != key:
                return False
    return True
