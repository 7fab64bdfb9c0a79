"""The store interface and the registry of plug-in stores.

A plug-in store derives from :class:`KVStoreBase` and registers itself with :func:`register`; its name is the class name
in lower case, as in MXNet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, TypeVar

from weftplan.device.context import Context
from weftplan.ndarray import NDArray

K = TypeVar("K", bound=int | str)
Arrays = NDArray | list[NDArray] | list[list[NDArray]]
Keys = int | str | Sequence[int] | Sequence[str]
Values = NDArray | Sequence[NDArray] | Sequence[Sequence[NDArray]]
"""For one key: an array, or a list with an array for each device. For a list of keys: a list of either."""


class KVStoreBase:
    """The interface of every store. Keys are ints or strs; values are NDArrays, one for each device.

    Data operations are asynchronous, and the engine orders them: a pull that follows a push sees its result, without a
    barrier.
    """

    OPTIMIZER: ClassVar[str] = "optimizer"

    @staticmethod
    def register(klass: type[KVStoreBase]) -> type[KVStoreBase]:
        """Register a plug-in store class; MXNet's name for the function :func:`register`."""
        return register(klass)

    def init(self, key: Keys, value: Values) -> None:
        """Store a copy of each value as the initial value of its key."""
        raise NotImplementedError

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Sum the values of each key; pass the sum to the updater, or store it if there is no updater.

        Args:
            key: key, or a list of keys.
            value: array, list of arrays (one for each device), or a list of these for a list of keys.
            priority: operations with a higher priority run first.
        """
        raise NotImplementedError

    def pull(self, key: Keys, out: Values | None = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy the stored value of each key into every array of ``out``.

        Args:
            key: key, or a list of keys.
            out: array, list of arrays (one for each device), or a list of these for a list of keys.
            priority: operations with a higher priority run first.
            ignore_sparse: leave arrays of storage type ``row_sparse`` unchanged.
        """
        raise NotImplementedError

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Set the initial value of each key, and copy it to every ``out``.

        Args:
            key: key, or a list of keys.
            value: array, list of arrays (one for each device), or a list of these for a list of keys.
            out: arrays that take the value, in the form of ``value``.
            priority: operations with a higher priority run first.
        """
        raise NotImplementedError

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Do :meth:`push`, then :meth:`pull` into ``out``.

        Args:
            key: key, or a list of keys.
            value: array, list of arrays (one for each device), or a list of these for a list of keys.
            out: arrays to fill, in the form of ``value``; None: the arrays of ``value``.
            priority: operations with a higher priority run first.
        """
        raise NotImplementedError

    def prepare(
        self, key: Keys, value: Values, out: Values | None = None, ready: Sequence[int | str] | None = None
    ) -> Callable[[], None]:
        """Return a function that does :meth:`pushpull` with these arrays each time it is called.

        Args:
            key: a key, or a list of keys.
            value: arrays to push, as for :meth:`push`.
            out: arrays to fill, as for :meth:`pull`; None: the pushed arrays.
            ready: the keys in the order of their values' readiness; None: the last key first.
        """
        return partial(self.pushpull, key, value, out)

    def is_plug_in(self) -> bool:
        """Return whether a Module exchanges one key per call, as MXNet: the store does not override :meth:`prepare`."""
        return type(self).prepare is KVStoreBase.prepare

    def buckets(self, keys: Sequence[K], ready: Sequence[K] | None = None) -> list[Sequence[K]]:
        """Return the buckets of a call: groups of keys that are exchanged together, in the order of exchange.

        Args:
            keys: keys of the call.
            ready: as for :meth:`prepare`.
        """
        return [keys]

    def set_optimizer(self, optimizer: object) -> None:
        """Make the store apply ``optimizer`` to each pushed sum."""
        raise NotImplementedError

    @classmethod
    def is_capable(cls, capability: str) -> bool:
        """Return whether the store has a capability: ``KVStoreBase.OPTIMIZER`` means updates on the store."""
        raise NotImplementedError

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimizer's states to a file."""
        raise NotImplementedError

    def load_optimizer_states(self, fname: str) -> None:
        """Read the optimizer's states from a file."""
        raise NotImplementedError

    def buffer_bytes(
        self, arrays: Sequence[tuple[int, int]], contexts: Sequence[Context], *, updates: bool
    ) -> dict[str, int]:
        """Return the bytes of the store's buffers by purpose, once every key was pushed from all contexts.

        Args:
            arrays: (elements, bytes) of each key.
            contexts: contexts of the arrays pushed for each key.
            updates: True if an optimizer will run on the store; the bytes of its states are not included.
        """
        del arrays, contexts, updates
        return {}

    def local_elements(self, number: int, elements: int) -> int:
        """Return the number of elements of key ``number`` whose optimizer state is in this process; by default all."""
        del number
        return elements

    @property
    def type(self) -> str:
        """The name of the store, as passed to ``create``, in lower case."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """Index of this worker, 0 <= rank < num_workers."""
        raise NotImplementedError

    @property
    def num_workers(self) -> int:
        """Number of workers that share the store."""
        raise NotImplementedError


_REGISTERED: dict[str, type[KVStoreBase]] = {}


def register(klass: type[KVStoreBase]) -> type[KVStoreBase]:
    """Decorate a store class so that ``create(klass.__name__.lower())`` returns an instance.

    Replacing a registered class warns.
    """
    name = klass.__name__.lower()
    if name in _REGISTERED:
        warnings.warn(f"kvstore {name!r} is registered again: {klass!r} replaces {_REGISTERED[name]!r}", stacklevel=2)
    _REGISTERED[name] = klass
    return klass


def registered() -> dict[str, type[KVStoreBase]]:
    """Return the plug-in stores by name."""
    return dict(_REGISTERED)
