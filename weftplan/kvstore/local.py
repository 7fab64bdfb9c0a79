"""The single-process store ``local``, and the public methods that all stores of this package share.

This module checks the arguments; ``layout.py`` divides a call's keys into buckets and pushes their operations.
Internally, every call is a ``pushpull``: ``push`` has no outs, and ``pull`` has no values. A stored value never shares
memory with a pushed array, as it may in MXNet. So changing a gradient after its push cannot change pulled values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan.device.context import Context, cpu
from weftplan.errors import KVStoreError
from weftplan.kvstore.base import K
from weftplan.kvstore.keys import Key, check_fits, group_pairs
from weftplan.kvstore.layout import BucketLayout, ExchangingStore
from weftplan.kvstore.rows import copy_rows, with_rows, without_rows
from weftplan.kvstore.stages import HOST, copy
from weftplan.kvstore.updating import UpdaterFunction
from weftplan.kvstore.ways_of_summing import reads
from weftplan.ndarray import NDArray, empty
from weftplan.support.rollback import rollback


class KVStoreLocal(ExchangingStore):
    """A store that sums on the CPU in MXNet's ``local`` order; stored values stay on ``cpu(0)``.

    >>> import weftplan as mx
    >>> kv = mx.kv.create("local")
    >>> kv.init("w", mx.nd.zeros((2,)))
    >>> kv.push("w", [mx.nd.ones((2,)), mx.nd.ones((2,))])
    >>> out = mx.nd.empty((2,))
    >>> kv.pull("w", out=out)
    >>> out.asnumpy().tolist()
    [2.0, 2.0]
    """

    def __init__(self, name: str = "local") -> None:
        super().__init__()
        self._name = name

    # -- data ---------------------------------------------------------------------------------------------------------

    def init(self, key: object, value: object) -> None:
        """Store a copy of each value as the initial value of its key.

        Raises:
            KVStoreError: a key exists already or has several values, or a key or value has a wrong type.
        """
        with self._turn:
            new_keys = [
                (k, value, empty(value.shape, ctx=self._home(value), dtype=value.np_dtype))
                for k, value in self._new_values(key, value)
            ]
            for _, initial, stored in new_keys:
                copy(initial, stored, 0)
            self._keys = self._keys.including([k for k, _, _ in new_keys])
            self._stored.update((k, stored) for k, _, stored in new_keys)
            self._version += 1

    def push(self, key: object, value: object, priority: int = 0) -> None:
        """Sum the values of each key; pass the sum to the updater, or store it if there is no updater.

        Args:
            key: an int or str, or a list of keys.
            value: an NDArray or a list of NDArrays (one for each device); for a list of keys a list of either.
            priority: priority of the engine operations; a higher priority runs earlier.

        Raises:
            KVStoreError: a key is unknown, or a shape or dtype differs from the stored value's.
        """
        if priority or not self._repeat(self._pushes, key, value):
            self._exchange(self._checked(key, value, "value", "push"), [], priority)

    def pull(self, key: object, out: object = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy the stored value of each key into every array of ``out``.

        Arrays of storage type ``row_sparse`` stay unchanged unless ``ignore_sparse`` is False, as in MXNet.

        Raises:
            KVStoreError: a key is unknown, ``out`` is missing, or a shape or dtype differs from the stored value's.
        """
        if not priority and self._repeat(self._pulls, key, out):
            return
        if out is None:
            raise KVStoreError("pull needs out=: the array or arrays to fill")
        groups = self._checked(key, out, "out", "pull")
        if ignore_sparse:
            groups = [(k, dense) for k, arrays in groups if (dense := without_rows(arrays))]
        self._exchange([], groups, priority)

    def row_sparse_pull(self, key: object, out: object = None, priority: int = 0, row_ids: object = None) -> None:
        """Copy selected rows of the stored value of each key into ``row_sparse`` arrays; other rows become 0.

        Args:
            key: a key, or a list of keys.
            out: arrays of storage type ``row_sparse`` to fill, as for :meth:`pull`.
            priority: ignored.
            row_ids: row numbers: an array for each array of ``out``, or one array for all of them.

        Raises:
            KVStoreError: a key is unknown, ``out`` or ``row_ids`` is missing, or an array is not ``row_sparse``.
        """
        if out is None or row_ids is None:
            raise KVStoreError("row_sparse_pull needs out= and row_ids=: the arrays to fill, and numbers of rows")
        for k, array, rows in with_rows(self._checked(key, out, "out", "row_sparse_pull"), row_ids):
            copy_rows(self._stored[k], array, rows)

    def pushpull(self, key: object, value: object, out: object = None, priority: int = 0) -> None:
        """Do :meth:`push`, then :meth:`pull` into ``out``, or into the arrays of ``value`` if ``out`` is None.

        Raises:
            KVStoreError: an argument is wrong for :meth:`push` or :meth:`pull`; nothing is pushed then.
        """
        pushed = self._checked(key, value, "value", "pushpull")
        pulled = pushed if out is None else self._checked(key, out, "out", "pushpull")
        self._exchange(pushed, pulled, priority)

    def broadcast(self, key: object, value: object, out: object, priority: int = 0) -> None:
        """Do :meth:`init`, then :meth:`pull` into ``out``.

        Raises:
            KVStoreError: an argument is wrong for :meth:`init` or :meth:`pull`; no key is created then.
        """
        with self._turn:
            values = dict(self._new_values(key, value))
            for k, arrays in group_pairs(self._keys, key, out, what="out"):
                check_fits(k, arrays, values[k], "broadcast")
            with rollback(self):
                self.init(key, value)
                self.pull(key, out, priority)

    def replace(self, key: object, value: NDArray) -> None:
        """Copy ``value`` to the stored value of ``key`` without calling the updater, to replace weights.

        Do nothing if the store does not have the key.

        Raises:
            KVStoreError: the shape or dtype differs from the stored value's.
        """
        with self._turn:
            if key in self._stored:
                check_fits(key, [value], self._stored[key], "replace")
                copy(value, self._stored[key], 0)

    def buckets(self, keys: Sequence[K], ready: Sequence[K] | None = None) -> list[Sequence[K]]:
        """Return the buckets of a call: groups of keys that are exchanged together, in the order of exchange.

        The order is ``ready``; if that is None, the last key is first.
        """
        order = self._in_order({key: key for key in sorted(keys, key=self._keys.number)}, ready)
        return [*self._rule.cut([(key, self._stored[key].nbytes, self._stored[key].np_dtype) for key in order])]

    def set_updater(self, updater: UpdaterFunction | None) -> None:
        """Set the function ``updater(key, merged, stored)`` that updates stored values; None: sums replace them."""
        with self._turn:
            super().set_updater(updater)
            self._version += 1

    _set_updater = set_updater

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        """The name of the store, as passed to ``create``, in lower case."""
        return self._name

    @property
    def rank(self) -> int:
        """Return 0: there is one worker."""
        return 0

    @property
    def num_workers(self) -> int:
        """Return 1: there is one worker."""
        return 1

    def barrier(self) -> None:
        """Do nothing: one process has no other worker to wait for."""

    _barrier = barrier

    def statistics(self) -> dict[str, int]:
        """Return the number of keys and the bytes of stored values, merge buffers and staging copies."""
        return {
            "keys": len(self._stored),
            "stored_bytes": sum(a.nbytes for a in list(self._stored.values())),
            "merged_bytes": sum(a.nbytes for a in list(self._merged.values())),
            "staging_bytes": sum(a.nbytes for a in list(self._staging.values())),
        }

    def buffer_bytes(
        self, arrays: Sequence[tuple[int, int]], contexts: Sequence[Context], *, updates: bool
    ) -> dict[str, int]:
        """Return the bytes of ``stored`` values, ``merged`` (merge buffers) and ``staging`` copies.

        :meta private:
        """
        by_purpose = {"stored": sum(nbytes for _, nbytes in arrays), "merged": 0, "staging": 0}
        straight = not updates and self._stores_straight(contexts)
        load: dict[Context, int] = {}
        for _, nbytes in arrays:
            target = self._least_loaded(contexts, load, nbytes)
            by_purpose["merged"] += 0 if straight else nbytes
            by_purpose["staging"] += nbytes * sum(not reads(target, context) for context in contexts)
        return by_purpose

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}: {len(self._stored)} keys{self._described_updater()}>"

    # -- how ----------------------------------------------------------------------------------------------------------

    def _home(self, value: NDArray) -> Context:
        """Return the context for the stored value of a new key."""
        del value
        return cpu(0)

    def _weights(self) -> dict[Key, NDArray]:
        return dict(self._stored)

    def _new_values(self, key: object, value: object) -> list[tuple[Key, NDArray]]:
        """Return (key, value) pairs for :meth:`init`; raise if a key exists or has several values."""
        groups = group_pairs(self._keys, key, value, what="value")
        for k, arrays in groups:
            if k in self._stored:
                raise KVStoreError(f"key {k!r} is initialised already; push a value to replace it")
            if len(arrays) != 1:
                raise KVStoreError(f"key {k!r}: init takes one value per key, got {len(arrays)}")
        return [(k, arrays[0]) for k, arrays in groups]

    def _checked(self, key: object, value: object, what: str, verb: str) -> list[tuple[Key, list[NDArray]]]:
        """Return (key, arrays) pairs of a call; raise if a key is unknown or an array does not fit its stored value.

        ``what`` and ``verb`` name the argument and the method in errors.
        """
        groups = group_pairs(self._keys, key, value, what=what)
        for k, arrays in groups:
            stored = self._stored.get(k)
            if stored is None:
                examples = list(self._stored)[:8]
                raise KVStoreError(f"{verb}: key {k!r} doesn't exist. Did you init? Known keys: {examples}")
            check_fits(k, arrays, stored, verb)
        return groups

    def prepare(
        self, key: object, value: object, out: object = None, ready: Sequence[Key] | None = None
    ) -> Callable[[], None]:
        """Return a function that does :meth:`pushpull` with these arrays, with checks and layout done once.

        The function keeps the arrays alive.

        Args:
            key: a key, or a list of keys.
            value: arrays to push, as for :meth:`push`.
            out: arrays to fill, as for :meth:`pull`; None: the pushed arrays.
            ready: all keys in the order of their values' readiness; None: the last key first.
        """
        pushed = self._checked(key, value, "value", "pushpull")
        pulled = pushed if out is None else self._checked(key, out, "out", "pushpull")
        layouts: list[BucketLayout] = []

        def run() -> None:
            with self._turn:
                # A layout refers to stored arrays and ways of summing, so it is valid for one version only.
                if not layouts or layouts[0].version != self._version:
                    layouts[:] = [self._lay(pushed, pulled, 0, ready)]
                self._run(layouts[0], 0)

        return run

    def _stores_straight(self, contexts: Sequence[Context]) -> bool:
        """Return whether a store without an updater sums arrays of these contexts directly into the stored value."""
        return all(context.device_type in HOST for context in contexts)
