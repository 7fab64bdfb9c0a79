"""Conversion of optimizer states between modules with different devices or kvstores.

A store keys the states of a parameter by name. Without a store every context has its own states, keyed by ``index of
the parameter * number of contexts + number of the context``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from weftplan.errors import FormatError, listed
from weftplan.kvstore import Updater
from weftplan.kvstore.keys import Key
from weftplan.kvstore.mxnet_states import State
from weftplan.ndarray import NDArray
from weftplan.support.atomic_files import open_to_read


def adopt(
    updater: Updater,
    data: bytes,
    names: Sequence[str],
    trained: Sequence[int],
    keys: Mapping[Key, str],
    weights: Mapping[Key, NDArray],
) -> None:
    """Load saved states into ``updater``, converting keys from any number of devices and any kvstore.

    Args:
        updater: updater of the loading module.
        data: result of :meth:`~weftplan.kvstore.Updater.get_states` in any module.
        names: all parameters, in order.
        trained: indices of the parameters with a gradient.
        keys: key of a state in ``updater`` -> name of the parameter.
        weights: arrays that ``updater`` updates, by the same keys.

    Raises:
        FormatError: damaged, or states of other parameters or another optimizer; nothing is changed.
    """
    loaded = Updater(_Counts())
    loaded.set_states(data)
    told = loaded.optimizer
    assert isinstance(told, _Counts)
    owner = _owners({*loaded.states, *told._index_update_count}, names, trained)
    first = {owner[key]: state for key, state in reversed(loaded.states.items())}  # the first context's
    counts = {owner[key]: count for key, count in told._index_update_count.items()}
    # Copy for each key: contexts that share an array would each update it.
    # A context that trains its own parameters keeps its own state, which may differ from the other contexts' states.
    taken = {
        key: _copy(loaded.states[key] if owner.get(key) == name and key in loaded.states else first[name])
        for key, name in keys.items()
        if name in first
    }
    known = {key: counts[name] for key, name in keys.items() if name in counts}
    updater.replace_states(taken, loaded.version, weights, known)


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


def _owners(found: Iterable[Key], names: Sequence[str], trained: Sequence[int]) -> dict[Key, str]:
    """Map each key of the saved states to its parameter."""
    keys = list(found)
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
