"""Stores with an updater: setting the updater or optimizer, and saving and loading optimizer states."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, cast

from weftplan.errors import FormatError, KVStoreError
from weftplan.kvstore.base import KVStoreBase
from weftplan.kvstore.keys import Key
from weftplan.kvstore.updater import OptimizerProtocol, Updater
from weftplan.ndarray import NDArray
from weftplan.support.atomic_files import open_to_read, replacing

UpdaterFunction = Callable[[Any, NDArray, NDArray], None]


class UpdatingStore(KVStoreBase):
    """Base class of stores with an updater, either an optimizer's :class:`Updater` or any function."""

    def __init__(self) -> None:
        self._updater: UpdaterFunction | None = None

    def set_updater(self, updater: UpdaterFunction | None) -> None:
        """Set the function ``updater(key, merged, stored)`` that updates the stored value from each pushed sum.

        None removes the updater, so that a sum replaces the stored value. The updater runs on the pushing thread, one
        call at a time for the whole store, and may use the store. It must not wait for an operation that pushes to this
        store: that push waits for the updater to return, which is a deadlock.
        """
        if updater is not None and not callable(updater):
            raise KVStoreError(f"an updater must be callable (key, merged, stored), got {type(updater).__name__}")
        self._updater = updater

    _set_updater = set_updater

    def _described_updater(self) -> str:
        """Return text about the updater for ``repr``; empty without an updater."""
        return "" if self._updater is None else f", {getattr(self._updater, 'optimizer', 'its own updater')}"

    def set_optimizer(self, optimizer: object) -> None:
        """Make the store apply ``optimizer`` to each pushed sum and own the optimizer's states."""
        if isinstance(optimizer, type) or not callable(getattr(optimizer, "update_multi_precision", None)):
            raise KVStoreError(
                f"set_optimizer needs an optimizer such as mx.optimizer.create('sgd', learning_rate=0.1), "
                f"got {optimizer!r}"
            )
        self.set_updater(Updater(cast("OptimizerProtocol", optimizer)))

    def set_gradient_compression(self, compression_params: Mapping[str, object]) -> None:
        """Raise an error; stores that support compression override this method.

        Raises:
            KVStoreError: always, as in MXNet: this store sums in host memory.
        """
        del compression_params
        raise KVStoreError(f"gradient compression is not for a store {self.type!r}: use mx.kv.create('device')")

    def _send_command_to_servers(self, head: int, body: str) -> None:
        """Do nothing: as in MXNet, a single-process store has no servers."""
        del head, body

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the optimizer's states to ``fname``; the file is replaced atomically."""
        states = self._states().get_states(dump_optimizer)
        with replacing(fname) as file:
            file.write(states)

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read the optimizer's states from ``fname``.

        Raises:
            FormatError: the file is damaged, or a state does not fit its stored value; nothing is changed then.
        """
        updater = self._states()
        try:
            with open_to_read(fname) as file:
                data = file.read()
        except OSError as error:
            raise FormatError(f"cannot read optimizer states from {fname}: {error}") from error
        try:
            updater.set_states(data, self._weights())
        except FormatError as error:
            raise FormatError(f"{os.fspath(fname)}: {error}") from error

    def _weights(self) -> Mapping[Key, NDArray]:
        """Return the stored values by key, against which loaded states are checked."""
        return {}

    def _states(self) -> Updater:
        if not isinstance(self._updater, Updater):
            raise KVStoreError("this store has no optimizer: call set_optimizer first")
        return self._updater

    @classmethod
    def is_capable(cls, capability: str) -> bool:
        """Return True for ``"optimizer"``; raise KVStoreError for any other capability."""
        if isinstance(capability, str) and capability.lower() == cls.OPTIMIZER:
            return True
        raise KVStoreError(f"unknown capability {capability!r}: known is {cls.OPTIMIZER!r}")
