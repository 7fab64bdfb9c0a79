"""Updates on a store: calls of the updater, and saving and loading of optimizer states."""

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
    """A store with an updater, which is an optimizer's or anybody's."""

    def __init__(self) -> None:
        self._updater: UpdaterFunction | None = None

    def set_updater(self, updater: UpdaterFunction | None) -> None:
        """Let ``updater(key, merged, stored)`` turn each pushed sum into a change of the stored value.

        It runs on the pushing thread, one at a time for the whole store, and may use the store. It should not wait for
        an operation that itself pushes to this store, which waits for the updater to return.
        """
        if updater is not None and not callable(updater):
            raise KVStoreError(f"an updater must be callable (key, merged, stored), got {type(updater).__name__}")
        self._updater = updater

    _set_updater = set_updater

    def _described_updater(self) -> str:
        """Return words for the updater, for ``repr``."""
        return "" if self._updater is None else f", {getattr(self._updater, 'optimizer', 'its own updater')}"

    def set_optimizer(self, optimizer: object) -> None:
        """Let the store apply ``optimizer`` to each pushed sum, keeping its states here."""
        if isinstance(optimizer, type) or not callable(getattr(optimizer, "update_multi_precision", None)):
            raise KVStoreError(
                f"set_optimizer needs an optimizer such as mx.optimizer.create('sgd', learning_rate=0.1), "
                f"got {optimizer!r}"
            )
        self.set_updater(Updater(cast("OptimizerProtocol", optimizer)))

    def set_gradient_compression(self, compression_params: Mapping[str, object]) -> None:
        """Compress gradients on their way to the sum: for stores that sum on devices.

        Raises:
            KVStoreError: always, as in MXNet: this store sums in host memory.
        """
        del compression_params
        raise KVStoreError(f"gradient compression is not for a store {self.type!r}: use mx.kv.create('device')")

    def _send_command_to_servers(self, head: int, body: str) -> None:
        """Nothing: as in MXNet, one process has no servers that could obey."""
        del head, body

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the optimizer's states to ``fname`` (whole or not at all)."""
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
        """The stored values whose states can be compared when they are loaded."""
        return {}

    def _states(self) -> Updater:
        if not isinstance(self._updater, Updater):
            raise KVStoreError("this store has no optimizer: call set_optimizer first")
        return self._updater

    @classmethod
    def is_capable(cls, capability: str) -> bool:
        """True for ``"optimizer"``; raises KVStoreError for anything unknown."""
        if isinstance(capability, str) and capability.lower() == cls.OPTIMIZER:
            return True
        raise KVStoreError(f"unknown capability {capability!r}: known is {cls.OPTIMIZER!r}")
