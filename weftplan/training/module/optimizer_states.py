"""Conversion of optimizer states between modules with different devices or kvstores.

A store keys the states of a parameter by name. Without a store every context has its own states, keyed by ``index of
the parameter * number of contexts + number of the context``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weftplan.errors import FormatError, MXNetError, listed
from weftplan.kvstore import KVStoreBase, Updater
from weftplan.kvstore.keys import Key
from weftplan.kvstore.mxnet_states import State
from weftplan.kvstore.updating import UpdatingStore
from weftplan.ndarray import NDArray
from weftplan.support.atomic_files import open_to_read


def states_holder(updater: Updater | None, store: KVStoreBase | None) -> Updater:
    """Return the updater of this process: the module's own, or that of its store.

    Raises:
        MXNetError: the store does not give access to its states.
    """
    holder = updater if updater is not None else getattr(store, "_updater", None)
    if not isinstance(holder, Updater):
        raise MXNetError(f"kvstore {store!r} does not give access to optimizer states")
    return holder


def all_states(updater: Updater | None, store: KVStoreBase | None) -> Updater:
    """Return the updater whose states are saved or replaced; with ``dist_async`` one with the states of all servers."""
    if updater is None and isinstance(store, UpdatingStore):
        return store._states()
    return states_holder(updater, store)


def adopt(
    updater: Updater,
    data: bytes,
    indices: Mapping[str, int],
    arrays: Mapping[str, tuple[Sequence[NDArray], bool]],
    keys: Mapping[Key, str],
) -> None:
    """Load saved states into ``updater``, converting keys from any number of devices and any kvstore.

    Args:
        updater: updater of the loading module.
        data: result of :meth:`~weftplan.kvstore.Updater.get_states` in any module.
        indices: the index of each parameter.
        arrays: for each parameter its arrays, one per context, and whether it has a gradient.
        keys: key of a state in ``updater`` -> name of the parameter.

    Raises:
        FormatError: damaged, or states of other parameters or another optimizer; nothing is changed.
    """
    names = sorted(indices, key=indices.__getitem__)
    trained = [indices[name] for name, (_, has_gradient) in arrays.items() if has_gradient]
    # Without a kvstore, a key identifies a parameter on a context; with a kvstore, its array on the first context.
    weights = {
        key: arrays[name][0][key % len(arrays[name][0]) if isinstance(key, int) else 0] for key, name in keys.items()
    }
    loaded = Updater(_Counts())
    loaded.set_states(data)
    recorder = loaded.optimizer
    assert isinstance(recorder, _Counts)
    owner = _owners({*loaded.states, *recorder._index_update_count}, names, trained)
    first = {owner[key]: state for key, state in reversed(loaded.states.items())}  # the first context's
    counts = {owner[key]: count for key, count in recorder._index_update_count.items()}
    # Copy for each key: contexts that share an array would each update it.
    # A context that trains its own parameters keeps its own state, which may differ from the other contexts' states.
    states = {
        key: _copy(loaded.states[key] if owner.get(key) == name and key in loaded.states else first[name])
        for key, name in keys.items()
        if name in first
    }
    updater.replace_states(
        states, loaded.version, weights, {key: counts[name] for key, name in keys.items() if name in counts}
    )


def _copy(state: State) -> State:
    if isinstance(state, NDArray):
        return state.copy()
    return tuple(_copy(item) for item in state) if isinstance(state, tuple) else state


def read_states(fname: str | os.PathLike[str]) -> bytes:
    """Read a file of states; raises FormatError if it cannot be read."""
    try:
        with open_to_read(fname) as file:
            return file.read()
    except OSError as error:
        raise FormatError(f"cannot read optimizer states from {os.fspath(fname)}: {error}") from error


def _owners(saved_keys: Iterable[Key], names: Sequence[str], trained: Sequence[int]) -> dict[Key, str]:
    """Map each key of the saved states to its parameter."""
    keys = list(saved_keys)
    numbers = [key for key in keys if isinstance(key, int)]
    if not numbers:
        strange = [key for key in keys if key not in names]
        if strange:
            raise FormatError(f"these are optimizer states of {listed(strange)}; the module has {listed(names)}")
        return {key: key for key in keys if isinstance(key, str)}
    contexts, remainder = divmod(len(keys), max(1, len(trained)))
    if remainder or {i * contexts + k for i in trained for k in range(contexts)} != set(keys):
        raise FormatError(
            f"these are optimizer states of {len(keys)} parameters or of others; the module trains {len(trained)}: "
            f"{listed(names[i] for i in trained)}"
        )
    return {key: names[key // contexts] for key in numbers}


class _Counts:
    """Stub optimizer that only receives the saved update counts."""

    def __init__(self) -> None:
        self._index_update_count: dict[Any, int] = {}
        self.num_update = 0

    def create_state_multi_precision(self, index: Key, weight: NDArray) -> State:
        raise NotImplementedError

    def update_multi_precision(self, index: Key, weight: NDArray, grad: NDArray, state: State) -> None:
        raise NotImplementedError
