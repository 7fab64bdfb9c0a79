"""Optimizer states of a ``dist_async`` store: collecting them from the servers, and restoring them.

A server has flat states for its ranges. This module concatenates them into states of whole values, as other stores have
them. A file can therefore be loaded by another store, or by a job with another number of processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import cast

import numpy as np

from weftplan.errors import FormatError, KVStoreError
from weftplan.kvstore.distributed.server import Header, Verb
from weftplan.kvstore.distributed.transport.mpi_types import JobRank
from weftplan.kvstore.fixed_order_sums import Array
from weftplan.kvstore.keys import Key
from weftplan.kvstore.mxnet_states import State
from weftplan.kvstore.updater import OptimizerProtocol, Updater, read_states
from weftplan.ndarray import NDArray, array

Request = tuple[JobRank, Header, Array]
Ask = Callable[[Sequence[Request], str], "list[tuple[Header, Array]]"]
"""Function of requests and a description for errors; it returns (header of the answer, its data) for each request."""


class ServerStates(Updater):
    """An updater that represents the states on all servers: getting and replacing states sends requests to them.

    Args:
        optimizer: the workers' optimizer, which is copied.
        values: function that returns (shape, key number, [(server, first element, end) of each range]) by key.
        ask: function that sends requests to servers and returns their answers.
    """

    def __init__(
        self,
        optimizer: OptimizerProtocol,
        values: Callable[[], dict[Key, tuple[tuple[int, ...], int, list[tuple[JobRank, int, int]]]]],
        ask: Ask,
    ) -> None:
        super().__init__(copy.copy(optimizer))
        self._values, self._ask = values, ask

    def get_states(self, dump_optimizer: bool = False, keys: Collection[Key] | None = None) -> bytes:
        """Return the states on all servers as bytes, as :meth:`Updater.get_states` does.

        Call ``barrier`` on all ranks before: otherwise a concurrent push may be included in only part of the states.
        """
        if not dump_optimizer:
            self._gather()
        return super().get_states(dump_optimizer, keys)

    def _gather(self) -> None:
        values = self._values()
        requests = [
            (server, Header(Verb.STATES, number), np.empty(0, np.uint8))
            for _, number, ranges in values.values()
            for server, _, _ in ranges
        ]
        answers = iter(self._ask(requests, "gather optimizer states"))
        self.states, counted = {}, {}
        for key, (shape, _, ranges) in values.items():
            parts = [read_states(next(answers)[1].tobytes())[:2] for _ in ranges]
            trees = [states[key] for states, _ in parts if key in states]
            if not trees:
                continue  # never pushed
            if len(trees) < len(parts):
                raise KVStoreError(f"pushes of {key!r} are under way: call barrier() before states are saved")
            self.states[key] = _joined(trees, shape, key)
            count = max(counts.get(key, 0) for _, counts in parts)
            if count:
                counted[key] = count
        self.optimizer._index_update_count = counted  # type: ignore[attr-defined]

    def replace_states(
        self,
        states: dict[Key, State],
        version: int = 2,
        weights: Mapping[Key, NDArray] = MappingProxyType({}),
        counts: Mapping[Key, int] = MappingProxyType({}),
    ) -> None:
        """Replace the states as :meth:`Updater.replace_states` does, and send those of the store's keys to servers."""
        super().replace_states(states, version, weights, counts)
        requests: list[Request] = []
        for key, (shape, number, ranges) in self._values().items():
            if key not in states:
                continue
            for server, begin, end in ranges:
                updater = Updater(SimpleNamespace(_index_update_count={key: counts.get(key, 0)}))
                updater.states = {key: _cut(states[key], shape, slice(begin, end), key)}
                data = np.frombuffer(updater.get_states(), np.uint8)
                requests.append((server, Header(Verb.RESTORE, number, 0, data.nbytes), data))
        self._ask(requests, "restore optimizer states")


def _joined(trees: Sequence[State], shape: tuple[int, ...], key: Key) -> State:
    """Return the state of a value of this shape, concatenated from the states of its ranges."""
    head = trees[0]
    if isinstance(head, tuple | list):
        return tuple(_joined(items, shape, key) for items in zip(*trees, strict=True))
    if not isinstance(head, NDArray):
        return head
    flat = np.concatenate([tree.asnumpy().reshape(-1) for tree in cast("Sequence[NDArray]", trees)])
    if flat.size == np.prod(shape, dtype=np.int64):
        return array(flat.reshape(shape), dtype=flat.dtype)
    if len(trees) == 1:
        return head
    raise KVStoreError(f"the optimizer state of {key!r} on {len(trees)} servers cannot be joined to one for {shape}")


def _cut(tree: State, shape: tuple[int, ...], part: slice, key: Key) -> State:
    """Return the state of the elements ``part`` of a value of this shape, given the state ``tree`` of the value."""
    if isinstance(tree, tuple | list):
        return tuple(_cut(item, shape, part, key) for item in tree)
    if not isinstance(tree, NDArray):
        return tree
    size = int(np.prod(shape, dtype=np.int64))
    if tree.shape == shape:
        flat = tree.asnumpy().reshape(-1)[part]
        return array(flat, dtype=flat.dtype)
    if (part.start, part.stop) == (0, size):
        return tree  # the state has another shape than its value, which is whole on one server
    raise FormatError(f"the optimizer state of {key!r} has the shape {tree.shape}, its value {shape}")
