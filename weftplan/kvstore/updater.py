"""The updater applies an optimizer to (key, gradient, weight) and owns the optimizer state of each key.

An optimizer is any object with the methods of :class:`OptimizerProtocol`. States are saved as an archive of plain
arrays, not as a pickle, so loading a file cannot run code. MXNet's pickled states are loaded by a reader that runs no
code (:mod:`weftplan.kvstore.mxnet_states`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import FormatError, KVStoreError
from weftplan.kvstore.keys import Key
from weftplan.kvstore.mxnet_states import State, read_mxnet_states
from weftplan.kvstore.stages import Stage
from weftplan.ndarray import NDArray, array
from weftplan.ops.core.floats import is_half
from weftplan.support.array_types import RawArray
from weftplan.support.atomic_files import check_zip

Tree: TypeAlias = "str | list[Tree] | None"
"""A state as JSON, with names of arrays in the archive in place of NDArrays."""

_VERSION = 2
"""Version of the file format. In version 1 the float32 weight was the first item of each multi-precision state."""


class OptimizerProtocol(Protocol):
    """The methods of an optimizer that the updater calls."""

    def create_state_multi_precision(self, index: Key, weight: NDArray) -> State: ...

    def update_multi_precision(self, index: Key, weight: NDArray, grad: NDArray, state: State) -> None: ...


class Updater:
    """A callable ``updater(index, grad, weight)`` that applies an optimizer and creates its states on first use.

    ``index`` is a key. Lists of indices, gradients and weights are updated in one call.
    """

    def __init__(self, optimizer: OptimizerProtocol) -> None:
        self.optimizer = optimizer
        self.states: dict[Key, State] = {}
        self._unchecked: set[Key] = set()
        """Indices whose loaded state was not yet compared with a state of the optimizer."""
        self.version = _VERSION
        """Format version of the loaded states file."""

    def __call__(
        self,
        index: Key | list[Key] | list[int] | list[str] | tuple[Key, ...],
        grad: NDArray | Sequence[NDArray],
        weight: NDArray | Sequence[NDArray],
    ) -> None:
        update_together = getattr(self.optimizer, "update_together", None)
        if isinstance(index, (list, tuple)) and update_together is None:
            for i, g, w in zip(index, grad, weight, strict=True):
                self(i, g, w)
            return
        with self._no_new_states_after_errors(index if isinstance(index, (list, tuple)) else (index,)):
            if isinstance(index, (list, tuple)):
                states = [self._state(i, w) for i, w in zip(index, weight, strict=True)]
                update_together(index, weight, grad, states)  # type: ignore[misc]
                return
            assert isinstance(grad, NDArray)
            assert isinstance(weight, NDArray)
            self.optimizer.update_multi_precision(index, weight, grad, self._state(index, weight))

    @contextmanager
    def _no_new_states_after_errors(self, indices: Sequence[Key]) -> Iterator[None]:
        """Drop the states that the body has created if it raises."""
        new = [index for index in indices if index not in self.states]
        try:
            yield
        except BaseException:
            for index in new:
                self.states.pop(index, None)
            raise

    def fuses_on(self, contexts: Iterable[Context]) -> bool:
        """Return whether the optimizer can fuse updates, as :meth:`steps` does, on all these contexts."""
        can_fuse = getattr(self.optimizer, "fuses_on", None)
        return can_fuse is not None and all(map(can_fuse, contexts))

    def steps(self, keys: Sequence[Key], grads: Sequence[NDArray], weights: Sequence[NDArray]) -> Sequence[Stage]:
        """Count one update of each key and return stages that do the updates, one stage for each kind of weight.

        :meta private:
        """
        with self._no_new_states_after_errors(keys):
            states = [self._state(key, weight) for key, weight in zip(keys, weights, strict=True)]
            stages: Sequence[Stage] = self.optimizer.fused_steps(keys, weights, grads, states)  # type: ignore[attr-defined]
            return stages

    def _state(self, index: Key, weight: NDArray) -> State:
        """Return the state of an index, created on first use and moved to the device of its weight.

        Raises:
            KVStoreError: a state loaded from a file does not fit the weight and the optimizer.
        """
        state = self.states.get(index)
        if state is None and index not in self.states:
            state = self.optimizer.create_state_multi_precision(index, weight)
        elif state is not None:
            state = _to_context(state, weight)
        if index in self._unchecked:
            if mistake := self._mismatch(index, state, weight, self.version):
                raise KVStoreError(mistake)
            self._unchecked.discard(index)
        self.states[index] = state
        return state

    def _mismatch(self, index: Key, state: State, weight: NDArray, version: int) -> str | None:
        """Return an error message if a loaded state does not fit the optimizer and the weight, else None.

        ``version`` is the format version of the file.
        """
        optimizer: Any = self.optimizer
        halves = getattr(optimizer, "multi_precision", False) and is_half(weight.np_dtype)
        if version < 2 and halves and getattr(optimizer, "weight_last", False):
            return (
                f"the loaded optimizer state of {index!r} was saved when its order was (float32 weight, state); "
                f"{type(optimizer).__name__} now has (state, float32 weight), as MXNet: start without the states"
            )
        expected = _describe(self.optimizer.create_state_multi_precision(index, weight))
        if _describe(state) != expected:
            return (
                f"the loaded optimizer state of {index!r} is {_describe(state)}, but "
                f"{type(self.optimizer).__name__} needs {expected} for a weight {weight.shape} {weight.np_dtype}: load "
                f"states of the same optimizer, settings and network, or start without"
            )
        return None

    def get_states(self, dump_optimizer: bool = False, keys: Collection[Key] | None = None) -> bytes:
        """Return the states of all keys, or of ``keys``, as an ``.npz`` archive with JSON descriptions.

        If the optimizer counts the updates of each key, the counts are included, because learning rate schedules and
        bias corrections depend on them.

        Raises:
            KVStoreError: a state is not a :data:`State`, or ``dump_optimizer`` is true.
        """
        if dump_optimizer:
            raise KVStoreError("dump_optimizer=True would need a pickle of the optimizer; save its settings yourself")
        arrays: dict[str, Any] = {}
        states, counted = list(self.states.items()), list(getattr(self.optimizer, _COUNTS, {}).items())
        layout = [[*_tag_key(key), _flatten(state, arrays)] for key, state in states if keys is None or key in keys]
        buffer = io.BytesIO()
        counts = [[*_tag_key(key), count] for key, count in counted if keys is None or key in keys]
        facts: dict[str, Any] = {
            "__version__": _as_bytes(_VERSION),
            "__layout__": _as_bytes(layout),
            "__counts__": _as_bytes(counts),
        }
        np.savez(buffer, **facts, **arrays)
        return buffer.getvalue()

    def replace_states(
        self,
        states: dict[Key, State],
        version: int = _VERSION,
        weights: Mapping[Key, NDArray] = MappingProxyType({}),
        counts: Mapping[Key, int] = MappingProxyType({}),
    ) -> None:
        """Replace all states by states loaded from a file.

        Args:
            states: state of each index.
            version: format version of the file.
            weights: known weights by index, whose states are checked now; other states are checked on first use.
            counts: number of updates of each index; if empty, the optimizer's counts stay.

        Raises:
            FormatError: a state does not fit its weight and the optimizer; nothing is changed then.
        """
        for index in states.keys() & weights.keys():
            if mistake := self._mismatch(index, states[index], weights[index], version):
                raise FormatError(mistake)
        self.version = version
        self.states = states
        self._unchecked = states.keys() - weights.keys()
        self._count_from(counts)

    def set_states(self, states: bytes, weights: Mapping[Key, NDArray] = MappingProxyType({})) -> None:
        """Replace all states by those in ``states``, from :meth:`get_states` or from MXNet's ``Updater.get_states``.

        Args:
            states: the saved states.
            weights: known weights by index, whose states are checked now; other states are checked on first use.

        Raises:
            FormatError: the states are damaged, are a pickle with other objects than arrays and optimizers, or do not
                fit the weights; nothing is changed then.
        """
        if states[:1] == b"\x80":
            by_index, counts = read_mxnet_states(states)
            self.replace_states(by_index, _VERSION, weights, counts)
            return
        by_index, counts, version = read_states(states)
        self.replace_states(by_index, version, weights, counts)

    def add_states(self, data: bytes) -> None:
        """Add the states in ``data``, from :meth:`get_states`; the states of other keys stay.

        Raises:
            FormatError: the data is damaged or not from :meth:`get_states`.
        """
        states, counts, version = read_states(data)
        self.version = version
        self.states.update(states)
        self._unchecked.update(states)
        self._count_from({**getattr(self.optimizer, _COUNTS, {}), **counts})

    def _count_from(self, counts: Mapping[Key, int]) -> None:
        if counts and hasattr(self.optimizer, _COUNTS):
            setattr(self.optimizer, _COUNTS, dict(counts))
            self.optimizer.num_update = max(counts.values())  # type: ignore[attr-defined]


def read_states(data: bytes) -> tuple[dict[Key, State], dict[Key, int], int]:
    """Return (states by key, update counts by key, format version) from the bytes of :meth:`Updater.get_states`.

    Raises:
        FormatError: the data is damaged or not an archive of states.
    """
    if data[: len(_ARCHIVE)] != _ARCHIVE:
        raise FormatError(f"optimizer states are truncated or not a states file, it begins {data[:8]!r}")
    try:
        check_zip(io.BytesIO(data), "the archive", stored=True)
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if not name.startswith("__")}
            version = int(json.loads(bytes(archive["__version__"]))) if "__version__" in archive else 1
            layout = json.loads(bytes(archive["__layout__"]))
            states = {_untag_key(key, kind): _unflatten(tree, arrays) for key, kind, tree in layout}
            counts = {}  # old files have no counts
            if "__counts__" in archive:
                counts = {_untag_key(*key): int(n) for *key, n in json.loads(bytes(archive["__counts__"]))}
    except Exception as error:
        raise FormatError(f"optimizer states are truncated or not a states file: {error}") from error
    return states, counts, version


_ARCHIVE = b"PK\x03\x04"
"""First bytes of an archive written by ``numpy.savez``."""
_COUNTS = "_index_update_count"
"""Attribute of optimizers, as in MXNet, with the number of updates of each key; ``num_update`` is the largest."""


def _tag_key(key: Key) -> tuple[Key, str]:
    """Return a key with the name of its type, as it is stored in JSON."""
    return key, "int" if isinstance(key, int) else "str"


def _untag_key(key: Key, kind: str) -> Key:
    return int(key) if kind == "int" else key


def _as_bytes(value: object) -> RawArray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _describe(state: State) -> str:
    if isinstance(state, NDArray):
        return f"{state.shape} {state.np_dtype}"
    if isinstance(state, tuple | list):
        return f"[{', '.join(map(_describe, state))}]"
    return repr(state)


def _to_context(state: State, weight: NDArray) -> State:
    if isinstance(state, NDArray):
        current, target = state.chunk.context, weight.chunk.context
        return state if current is target or current == target else state.as_in_context(target)
    if isinstance(state, tuple | list):
        moved = [_to_context(item, weight) for item in state]
        return moved if isinstance(state, list) else tuple(moved)
    return state


def _flatten(state: State, arrays: dict[str, RawArray]) -> Tree:
    if state is None:
        return None
    if isinstance(state, NDArray):
        name = f"a{len(arrays)}"
        arrays[name] = state.asnumpy()
        return name
    if not isinstance(state, tuple | list):
        raise KVStoreError(
            f"an optimizer state to be saved is None, an NDArray, or a tuple or list of such, got "
            f"{type(state).__name__}: {state!r}"
        )
    return [_flatten(item, arrays) for item in state]


def _unflatten(tree: Tree, arrays: dict[str, RawArray]) -> State:
    """Return the state that ``tree`` describes, and remove its arrays from ``arrays``.

    Raises:
        FormatError: an array is missing or used twice.
    """
    if tree is None:
        return None
    if isinstance(tree, str):
        if tree not in arrays:
            raise FormatError(f"array {tree!r} is missing, or named twice")
        stored = arrays.pop(tree)
        return array(stored, dtype=stored.dtype)
    return tuple(_unflatten(item, arrays) for item in tree)
