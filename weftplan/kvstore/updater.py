"""The updater: applies an optimizer to (key, gradient, weight) and keeps the optimizer's state of every key.

The optimizer is anything with MXNet's optimizer protocol (see :class:`OptimizerProtocol`). States travel as an archive
of plain arrays, never as a pickle, so loading a file cannot run code.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from weftplan.errors import FormatError
from weftplan.ndarray import NDArray, array

State = Any
"""None, an NDArray, or a (nested) tuple of states."""


class OptimizerProtocol(Protocol):
    """What an updater asks of an optimizer."""

    def create_state_multi_precision(self, index: Any, weight: NDArray) -> State: ...

    def update_multi_precision(self, index: Any, weight: NDArray, grad: NDArray, state: State) -> None: ...


class Updater:
    """Callable ``updater(index, grad, weight)``; makes the state of an index at its first use."""

    def __init__(self, optimizer: OptimizerProtocol) -> None:
        self.optimizer = optimizer
        self.states: dict[Any, State] = {}

    def __call__(self, index: Any, grad: NDArray | Sequence[NDArray], weight: NDArray | Sequence[NDArray]) -> None:
        if isinstance(index, (list, tuple)):
            for i, g, w in zip(index, grad, weight, strict=True):
                self(i, g, w)
            return
        assert isinstance(grad, NDArray)
        assert isinstance(weight, NDArray)
        state = self.states.get(index)
        if state is None and index not in self.states:
            state = self.optimizer.create_state_multi_precision(index, weight)
        elif state is not None:
            state = _to_context(state, weight)
        self.states[index] = state
        self.optimizer.update_multi_precision(index, weight, grad, state)

    def get_states(self) -> bytes:
        """All states as bytes (an ``.npz`` archive with a JSON description of the structure)."""
        arrays: dict[str, Any] = {}
        layout = [
            [key, "int" if isinstance(key, int) else "str", _flatten(state, arrays)]
            for key, state in self.states.items()
        ]
        buffer = io.BytesIO()
        np.savez(buffer, __layout__=np.frombuffer(json.dumps(layout).encode(), np.uint8), **arrays)
        return buffer.getvalue()

    def set_states(self, data: bytes) -> None:
        """Replace all states by those of :meth:`get_states`; raises FormatError and changes nothing if damaged."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                layout = json.loads(bytes(archive["__layout__"]))
                states = {(int(key) if kind == "int" else key): _unflatten(tree, archive) for key, kind, tree in layout}
        except Exception as error:
            raise FormatError(f"optimizer states are truncated or not a states file: {error}") from error
        self.states = states


def _to_context(state: State, weight: NDArray) -> State:
    if isinstance(state, NDArray):
        return state if state.context == weight.context else state.as_in_context(weight.context)
    if isinstance(state, tuple):
        return tuple(_to_context(item, weight) for item in state)
    return state


def _flatten(state: State, arrays: dict[str, Any]) -> Any:
    if state is None:
        return None
    if isinstance(state, NDArray):
        name = f"a{len(arrays)}"
        arrays[name] = state.asnumpy()
        return name
    return [_flatten(item, arrays) for item in state]


def _unflatten(tree: Any, archive: Any) -> State:
    if tree is None:
        return None
    if isinstance(tree, str):
        stored = archive[tree]
        return array(stored, dtype=stored.dtype)
    return tuple(_unflatten(item, archive) for item in tree)
