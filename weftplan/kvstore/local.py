"""The single-process store ``local``, and the public verbs of every store.

A call is checked here; ``layout.py`` lays it into buckets and pushes them. ``push`` and ``pull`` are calls without
outs and without values. The stored value never aliases a pushed array, as it may in MXNet. So a change of a gradient
after its push cannot change a pulled value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weftplan.device.context import Context, cpu
from weftplan.errors import KVStoreError
from weftplan.kvstore.base import K
from weftplan.kvstore.keys import Key, check_fits, group_pairs
from weftplan.kvstore.layout import ExchangingStore, Layout
from weftplan.kvstore.rows import copy_rows, with_rows, without_rows
from weftplan.kvstore.stages import HOST, copy
from weftplan.kvstore.summing import reads
from weftplan.kvstore.updating import UpdaterFunction
from weftplan.ndarray import NDArray, empty


class KVStoreLocal(ExchangingStore):
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

    def __init__(self, name: str = "local") -> None:
        super().__init__()
        self._name = name

    # -- data ---------------------------------------------------------------------------------------------------------

    def init(self, key: object, value: object) -> None:
        """Store a copy of each value under its key, once.

        Raises:
            KVStoreError: a key exists already, several values for one key, or a bad key or value.
        """
        with self._turn:
            new_keys = [
                (k, first, empty(first.shape, ctx=self._home(first), dtype=first.dtype))
                for k, first in self._new_values(key, value)
            ]
            for _, first, stored in new_keys:
                copy(first, stored, 0)
            for k, _, stored in new_keys:
                self._keys.add(k)
                self._stored[k] = stored
            self._version += 1

    def push(self, key: object, value: object, priority: int = 0) -> None:
        """Sum the values of each key and hand the sum to the updater, or store it when there is none.

        Args:
            key: an int or str, or a list of them.
            value: one NDArray, a list of them (one per device), or a list of either for a list of keys.
            priority: of the engine operations; a larger priority runs earlier in queues with priorities.

        Raises:
            KVStoreError: unknown key, or shapes or dtypes that differ from the stored value's.
        """
        if priority or not self._repeat(self._pushes, key, value):
            self._exchange(self._checked(key, value, "value", "push"), [], priority)

    def pull(self, key: object, out: object = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy the stored value of each key into every array of ``out``.

        Arrays of storage type ``row_sparse`` are left alone unless ``ignore_sparse`` is False, as in MXNet.

        Raises:
            KVStoreError: unknown key, ``out`` missing, or shapes or dtypes that differ from the stored value's.
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

    def pushpull(self, key: object, value: object, out: object = None, priority: int = 0) -> None:
        """``push`` then ``pull`` into ``out``, or back into ``value`` when ``out`` is None.

        Raises:
            KVStoreError: as they do, before anything is pushed.
        """
        pushed = self._checked(key, value, "value", "pushpull")
        pulled = pushed if out is None else self._checked(key, out, "out", "pushpull")
        self._exchange(pushed, pulled, priority)

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
        """Make a copy of ``value`` the stored value of ``key``, without the updater: for a new set of weights.

        A key that the store does not have is left alone.

        Raises:
            KVStoreError: the shape or dtype differs from the stored value's.
        """
        with self._turn:
            if key in self._stored:
                check_fits(key, [value], self._stored[key], "replace")
                copy(value, self._stored[key], 0)

    def buckets(self, keys: Sequence[K], ready: Sequence[K] | None = None) -> list[Sequence[K]]:
        """Return the keys of one call in the groups that are exchanged as one: in the order in which they are ready, or
        the last key first."""
        order = self._in_order({key: key for key in sorted(keys, key=self._keys.number)}, ready)
        return [*self._rule.cut([(key, self._stored[key].nbytes, self._stored[key].dtype) for key in order])]

    def set_updater(self, updater: UpdaterFunction | None) -> None:
        """As of every store with an updater."""
        with self._turn:
            super().set_updater(updater)
            self._version += 1

    _set_updater = set_updater

    # -- facts --------------------------------------------------------------------------------------------------------

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
        """What :meth:`statistics` will count, by its names: stored values, merge buffers, staging copies.

        :meta private:
        """
        by_purpose = {"stored": sum(nbytes for _, nbytes in arrays), "merged": 0, "staging": 0}
        straight = not updates and self._stores_straight(contexts)
        load: dict[Context, int] = {}
        for _, nbytes in arrays:
            where = self._least_loaded(contexts, load, nbytes)
            by_purpose["merged"] += 0 if straight else nbytes
            by_purpose["staging"] += nbytes * sum(not reads(where, context) for context in contexts)
        return by_purpose

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}: {len(self._stored)} keys{self._described_updater()}>"

    # -- how ----------------------------------------------------------------------------------------------------------

    def _home(self, value: NDArray) -> Context:
        """Return the context of a new key's stored value."""
        del value
        return cpu(0)

    def _weights(self) -> dict[Key, NDArray]:
        return dict(self._stored)

    def _new_values(self, key: object, value: object) -> list[tuple[Key, NDArray]]:
        """Return (key, its value) of a call that makes keys."""
        groups = group_pairs(self._keys, key, value, what="value")
        for k, arrays in groups:
            if k in self._stored:
                raise KVStoreError(f"key {k!r} is initialised already; push a value to replace it")
            if len(arrays) != 1:
                raise KVStoreError(f"key {k!r}: init takes one value per key, got {len(arrays)}")
        return [(k, arrays[0]) for k, arrays in groups]

    def _checked(self, key: object, value: object, what: str, verb: str) -> list[tuple[Key, list[NDArray]]]:
        """Return the groups of a call; raise unless all fit the stored values."""
        groups = group_pairs(self._keys, key, value, what=what)
        for k, arrays in groups:
            stored = self._stored.get(k)
            if stored is None:
                known = list(self._stored)[:8]
                raise KVStoreError(f"{verb}: key {k!r} doesn't exist. Did you init? Known keys: {known}")
            check_fits(k, arrays, stored, verb)
        return groups

    def prepare(
        self, key: object, value: object, out: object = None, ready: Sequence[Key] | None = None
    ) -> Callable[[], None]:
        """Return a function that does :meth:`pushpull` of these very arrays, without the checks and layout of a call.

        It keeps the arrays alive.

        Args:
            key, value, out: as for :meth:`pushpull`.
            ready: all keys in the order in which their values will be there; None: the last key first.
        """
        pushed = self._checked(key, value, "value", "pushpull")
        pulled = pushed if out is None else self._checked(key, out, "out", "pushpull")
        layouts: list[Layout] = []

        def run() -> None:
            with self._turn:
                if not layouts or layouts[0].version != self._version:
                    layouts[:] = [self._lay(pushed, pulled, 0, ready)]
                self._run(layouts[0], 0)

        return run

    def _stores_straight(self, contexts: Sequence[Context]) -> bool:
        """Return whether sums of arrays there need no merge buffer, without an updater."""
        return all(context.device_type in HOST for context in contexts)
