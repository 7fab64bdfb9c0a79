"""The single-process store ``local``, and the base that ``device`` (``on_device.py``) shares.

A store keeps, per key, the stored value and, for an updater or a device, a merge buffer. ``push`` is one engine
operation that reads every pushed array and writes the merge buffer, then the updater (called on the pushing thread, its
work is asynchronous) or one copy; on the host without an updater it writes the stored value itself. ``pull`` is one
copy per destination, or one operation for small ones on the host. Vars order all of it, so nothing here waits for an
operation. Pushes of several threads take turns: two of one key share the merge buffer, and an updater need not know of
threads.

The stored value never aliases a pushed array (MXNet lets it): what a user does to a gradient after the push cannot
change what is pulled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from weftplan import config
from weftplan.device.context import Context, cpu
from weftplan.engine import FnProperty
from weftplan.errors import KVStoreError
from weftplan.kvstore.at_once import SmallCopies, pulled_again, sum_at_once
from weftplan.kvstore.copies import HOST, copy, copy_to_all
from weftplan.kvstore.gpu_sum import sum_in_one_launch
from weftplan.kvstore.keys import Key, KeyTable, check_fits, group_pairs
from weftplan.kvstore.reduce import (
    BlockSum,
    reduce_arrays,
    spread_array,
    sum_grouped_block,
    sum_sequential_block,
)
from weftplan.kvstore.rows import copy_rows, with_rows, without_rows
from weftplan.kvstore.updating import UpdatingStore
from weftplan.locks import ReentrantLock, free_in_children
from weftplan.ndarray import NDArray, empty, zeros
from weftplan.ndarray.errstate import quietly
from weftplan.ndarray.pushing import push_kernel
from weftplan.support.array_types import RawArray

SMALL = 1 << 18
"""Bytes: the sum of at most that many is an ordinary operation."""


class KVStoreLocal(UpdatingStore):
    """Sums on the CPU in MXNet's ``local`` order; the stored value stays on ``cpu(0)``.

    >>> import weftplan as mx
    >>> kv = mx.kv.create("local")
    >>> kv.init("w", mx.nd.zeros((2,)))
    >>> kv.push("w", [mx.nd.ones((2,)), mx.nd.ones((2,))])
    >>> out = mx.nd.empty((2,))
    >>> kv.pull("w", out=out)
    >>> out.asnumpy().tolist()
    [2.0, 2.0]
    """

    _block_sum: BlockSum = staticmethod(sum_grouped_block)
    _inline = 0
    """Bytes up to which whoever finds a copy ready makes it: where a thread has just waited for what is copied."""

    def __init__(self, name: str = "local") -> None:
        super().__init__()
        self._name = name
        self._keys = KeyTable()
        self._stored: dict[Key, NDArray] = {}
        self._merged: dict[Key, NDArray] = {}
        self._staging: dict[tuple[Key, int], NDArray] = {}
        self._copies: dict[Key, SmallCopies] = {}
        """The last pull of each key that the calling thread has made itself."""
        self._load: dict[Context, int] = {}
        """Bytes that are summed at each place."""
        self._turn = free_in_children(ReentrantLock())
        """Held by whoever changes the above; re-entrant because an updater may use the store."""
        self._bound = int(config.get("MXNET_KVSTORE_BIGARRAY_BOUND"))
        self._sharing: dict[str, Any] = {
            "threads": int(config.get("MXNET_KVSTORE_REDUCTION_NTHREADS")),
            "bound": self._bound,
            "compiled": config.get("WEFTPLAN_KERNELS") != "numpy",
        }
        self._share_cores(self._sharing["threads"])

    def _share_cores(self, most: int) -> None:
        """Sum and copy on at most so many threads."""
        self._sharing["threads"] = min(self._sharing["threads"], most)
        self._add: Callable[..., None] = partial(reduce_arrays, block_sum=self._block_sum, **self._sharing)
        self._spread = partial(spread_array, **self._sharing)

    # -- data -----------------------------------------------------------------------------------------------------

    def init(self, key: object, value: object) -> None:
        """Store a copy of each value under its key, once.

        Raises:
            KVStoreError: a key exists already, several values for one key, or a bad key or value.
        """
        with self._turn:
            made = [
                (k, first, self._new(empty(first.shape, ctx=self._home(first), dtype=first.dtype)))
                for k, first in self._new_values(key, value)
            ]
            for _, first, stored in made:
                copy(first, stored, 0)
            for k, _, stored in made:
                self._keys.add(k)
                self._stored[k] = stored

    def push(self, key: object, value: object, priority: int = 0) -> None:
        """Sum the values of each key and hand the sum to the updater, or store it when there is none.

        Args:
            key: an int or str, or a list of them.
            value: one NDArray, a list of them (one per device), or a list of either for a list of keys.
            priority: of the engine operations; larger runs earlier where the queue honours it.

        Raises:
            KVStoreError: unknown key, or shapes or dtypes that differ from the stored value's.
        """
        self._push(self._checked(key, value, "value", "push"), priority)

    def _push(self, groups: list[tuple[Key, list[NDArray]]], priority: int) -> None:
        with self._turn:
            for k, arrays in groups:
                stored = self._stored[k]
                if self._updater is not None:
                    merged = self._reduce(k, arrays, priority)
                    self._updater(k, merged, self._stored_near(k, merged, priority))
                elif self._sums_straight(arrays, stored):
                    self._store_sum(k, arrays, stored, priority)
                else:
                    merged = self._reduce(k, arrays, priority)
                    copy(merged, self._stored_near(k, merged, priority, kept=False), priority, inline=self._inline)

    def pull(self, key: object, out: object = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy the stored value of each key into every array of ``out``.

        Arrays of storage type ``row_sparse`` are left alone unless ``ignore_sparse`` is False, as in MXNet.

        Raises:
            KVStoreError: unknown key, ``out`` missing, or shapes or dtypes that differ from the stored value's.
        """
        self._before_pull()
        if not priority and pulled_again(self._copies, self._stored, key, out):
            return
        if out is None:
            raise KVStoreError("pull needs out=: the array or arrays to fill")
        groups = self._checked(key, out, "out", "pull")
        if ignore_sparse:
            groups = [(k, dense) for k, arrays in groups if (dense := without_rows(arrays))]
        self._pull(groups, priority)

    def _before_pull(self) -> None:
        """What may bring values nearer that are about to be pulled."""

    def row_sparse_pull(self, key: object, out: object = None, priority: int = 0, row_ids: object = None) -> None:
        """Copy rows of the stored value of each key into arrays of storage type ``row_sparse``; other rows become 0.

        Args:
            row_ids: numbers of the rows, an array for each array of ``out``, or one for all of them.

        Raises:
            KVStoreError: unknown key, ``out`` or ``row_ids`` missing, or an array of another storage type.
        """
        if out is None or row_ids is None:
            raise KVStoreError("row_sparse_pull needs out= and row_ids=: the arrays to fill, and numbers of rows")
        for k, array, rows in with_rows(self._checked(key, out, "out", "row_sparse_pull"), row_ids):
            copy_rows(self._stored[k], array, rows)

    def _pull(self, groups: list[tuple[Key, list[NDArray]]], priority: int) -> None:
        for k, arrays in groups:
            stored = self._stored[k]
            if not priority:
                known = self._copies.get(k)
                if known is not None and known.again(stored, arrays):
                    continue
                known = SmallCopies.settle(stored, arrays)
                if known is not None and known.make(arrays):
                    self._copies[k] = known
                    continue
            copy_to_all(stored, arrays, priority, self._spread, inline=self._inline)

    def pushpull(self, key: object, value: object, out: object = None, priority: int = 0) -> None:
        """``push`` then ``pull`` into ``out``, or back into ``value`` when ``out`` is None.

        Raises:
            KVStoreError: as they do, before anything is pushed.
        """
        pushed = self._checked(key, value, "value", "pushpull")
        pulled = pushed if out is None else self._checked(key, out, "out", "pushpull")
        self._push(pushed, priority)
        self._before_pull()
        self._pull(pulled, priority)

    def broadcast(self, key: object, value: object, out: object, priority: int = 0) -> None:
        """``init`` then ``pull`` into ``out``.

        Raises:
            KVStoreError: as they do, before any key is made.
        """
        with self._turn:
            values = dict(self._new_values(key, value))
            for k, arrays in group_pairs(self._keys, key, out, what="out"):
                check_fits(k, arrays, values[k], "broadcast")
            self.init(key, value)
        self.pull(key, out, priority)

    def replace(self, key: object, value: NDArray) -> None:
        """Make a copy of ``value`` the stored value of ``key``, past the updater: what a new set of weights needs.

        A key that the store does not have is left alone.

        Raises:
            KVStoreError: the shape or dtype differs from the stored value's.
        """
        with self._turn:
            if key in self._stored:
                check_fits(key, [value], self._stored[key], "replace")
                copy(value, self._stored[key], 0)

    # -- facts ----------------------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        """The name it was created by."""
        return self._name

    @property
    def rank(self) -> int:
        """0: one process."""
        return 0

    @property
    def num_workers(self) -> int:
        """1: one process."""
        return 1

    def barrier(self) -> None:
        """Nothing to wait for in one process."""

    _barrier = barrier

    def statistics(self) -> dict[str, int]:
        """Number of keys and the bytes of stored values, merge buffers and staging copies."""
        return {
            "keys": len(self._stored),
            "stored_bytes": sum(a.nbytes for a in list(self._stored.values())),
            "merged_bytes": sum(a.nbytes for a in list(self._merged.values())),
            "staging_bytes": sum(a.nbytes for a in list(self._staging.values())),
        }

    def buffer_bytes(
        self, arrays: Sequence[tuple[int, int]], contexts: Sequence[Context], *, updates: bool
    ) -> dict[str, int]:
        """What :meth:`statistics` will count, by its names: stored values, merge buffers, staging copies."""
        found = {"stored": sum(nbytes for _, nbytes in arrays), "merged": 0, "staging": 0}
        straight = not updates and self._stores_straight(contexts)
        load: dict[Context, int] = {}
        for _, nbytes in arrays:
            where = self._least_loaded(contexts, load, nbytes)
            found["merged"] += 0 if straight else nbytes
            found["staging"] += nbytes * sum(not reads(where, context) for context in contexts)
        return found

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}: {len(self._stored)} keys{self._described_updater()}>"

    # -- how ------------------------------------------------------------------------------------------------------

    def _new(self, stored: NDArray) -> NDArray:
        """The array for the value of a new key: this one, or one like it."""
        return stored

    def _home(self, value: NDArray) -> Context:
        """Where the stored value of a new key lives."""
        del value
        return cpu(0)

    def _least_loaded(self, contexts: Sequence[Context], load: dict[Context, int], nbytes: int) -> Context:
        """Where the sum of a key of that many bytes is made; ``load`` counts the bytes of each place so far."""
        del contexts, load, nbytes
        return cpu(0)

    def _weights(self) -> dict[Key, NDArray]:
        return dict(self._stored)

    def _stored_near(self, key: Key, merged: NDArray, priority: int, *, kept: bool = True) -> NDArray:
        """The stored value, moved for good to the device of the sum if that is another one; unless it is ``kept``, it
        is about to be replaced."""
        stored = self._stored[key]
        if stored.context != merged.context:
            moved = empty(stored.shape, ctx=merged.context, dtype=stored.dtype)
            if kept:
                copy(stored, moved, priority)
            stored = self._stored[key] = moved
        return stored

    def _new_values(self, key: object, value: object) -> list[tuple[Key, NDArray]]:
        """(key, its value) of a call that makes keys."""
        groups = group_pairs(self._keys, key, value, what="value")
        for k, arrays in groups:
            if k in self._stored:
                raise KVStoreError(f"key {k!r} is initialised already; push a value to replace it")
            if len(arrays) != 1:
                raise KVStoreError(f"key {k!r}: init takes one value per key, got {len(arrays)}")
        return [(k, arrays[0]) for k, arrays in groups]

    def _checked(self, key: object, value: object, what: str, verb: str) -> list[tuple[Key, list[NDArray]]]:
        """Groups of a call, all of which fit the stored values."""
        groups = group_pairs(self._keys, key, value, what=what)
        for k, arrays in groups:
            stored = self._stored.get(k)
            if stored is None:
                known = list(self._stored)[:8]
                raise KVStoreError(f"{verb}: key {k!r} doesn't exist. Did you init? Known keys: {known}")
            check_fits(k, arrays, stored, verb)
        return groups

    def _reduce(self, key: Key, arrays: list[NDArray], priority: int) -> NDArray:
        """The sum of ``arrays``, in a merge buffer that the next push of this key reuses."""
        merged = self._merged.get(key)
        if merged is None:
            where = self._least_loaded([array.context for array in arrays], self._load, arrays[0].nbytes)
            merged = self._merged[key] = zeros(arrays[0].shape, ctx=where, dtype=arrays[0].dtype)
        self._fill(key, arrays, merged, priority)
        return merged

    def _fill(self, key: Key, arrays: list[NDArray], merged: NDArray, priority: int) -> None:
        """Push what makes ``merged`` the sum of ``arrays``."""
        sources = [self._near(key, i, array, merged.context, priority) for i, array in enumerate(arrays)]
        if merged.context.device_type in HOST:
            self._sum(sources, merged, priority)
        else:
            _sum_on_device(sources, merged, priority)

    def _sum(self, sources: list[NDArray], target: NDArray, priority: int) -> None:
        """``target[...] = sum of sources``, all of them on the host."""
        if not priority and target.size < self._bound and sum_at_once(sources, target, self._block_sum):
            return
        # What is over before a worker is awake needs no worker of its own, and a wait may do it.
        small = target.nbytes <= SMALL and not priority
        add = self._add
        push_kernel(
            lambda *raws: add(raws[:-1], raws[-1]),
            [*sources, target],
            [source.var for source in sources],
            (target.var,),
            target.context,
            prop=FnProperty.NORMAL if small else FnProperty.CPU_PRIORITIZED,
            priority=priority,
            name="KVStoreReduce",
        )

    def _sums_straight(self, arrays: list[NDArray], stored: NDArray) -> bool:
        """True when the sum of ``arrays`` can be made in the stored value itself."""
        own = stored.chunk.var
        for array in arrays:
            chunk = array.chunk
            if chunk.context.device_type not in HOST or chunk.var is own:
                return False
        return stored.chunk.context.device_type in HOST

    def _store_sum(self, key: Key, arrays: list[NDArray], stored: NDArray, priority: int) -> None:
        """Push what makes ``stored`` the sum of ``arrays``, without a merge buffer between."""
        del key
        self._sum(arrays, stored, priority)

    def _stores_straight(self, contexts: Sequence[Context]) -> bool:
        """Whether sums of arrays there need no merge buffer, without an updater."""
        return all(context.device_type in HOST for context in contexts)

    def _near(self, key: Key, index: int, array: NDArray, where: Context, priority: int) -> NDArray:
        """``array`` itself if the sum can read it where it is, else a staging copy at ``where``."""
        if reads(where, array.context):
            return array
        staging = self._staging.get((key, index))
        if staging is None:
            staging = self._staging[key, index] = empty(array.shape, ctx=where, dtype=array.dtype)
        copy(array, staging, priority)
        return staging


def reads(where: Context, context: Context) -> bool:
    """Whether a sum at ``where`` can read what is at ``context``."""
    return context == where or (context.device_type in HOST and where.device_type in HOST)


def _sum_on_device(sources: list[NDArray], out: NDArray, priority: int) -> None:
    """Left-to-right sum on the device of ``out``, half precision in float32 and rounded once."""

    push_kernel(
        _add_on_device,
        [*sources, out],
        [source.var for source in sources],
        [out.var],
        out.context,
        prop=FnProperty.GPU_PRIORITIZED,
        priority=priority,
        name="KVStoreReduce",
    )


def _add_on_device(*raws: RawArray) -> None:
    *terms, total = raws
    if isinstance(total, np.ndarray):  # a simulated device
        quietly(sum_sequential_block, terms, total, total)
    else:
        sum_in_one_launch(terms, total)
