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
"""One array for a key, or one for each device; for several keys one of these for each."""


class KVStoreBase:
    """The interface of every store. Keys are ints or strs; values are NDArrays, one per device.

    Every data operation is asynchronous and ordered by the engine: a pull after a push sees it, without a barrier.
    """

    OPTIMIZER: ClassVar[str] = "optimizer"

    @staticmethod
    def register(klass: type[KVStoreBase]) -> type[KVStoreBase]:
        """Return the function :func:`register`, where MXNet has it."""
        return register(klass)

    def init(self, key: Keys, value: Values) -> None:
        """Store a copy of each value under its key, once."""
        raise NotImplementedError

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Sum the values of each key and hand the sum to the updater, or store it when there is none.

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
        """Give every ``out`` the initial value of ``key``.

        Args:
            key: key, or a list of keys.
            value: array, list of arrays (one for each device), or a list of these for a list of keys.
            out: arrays that take the value, in the form of ``value``.
            priority: operations with a higher priority run first.
        """
        raise NotImplementedError

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Sum the values of ``key`` and write the result to every ``out`` (to every value when ``out`` is None).

        Args:
            key: key, or a list of keys.
            value: array, list of arrays (one for each device), or a list of these for a list of keys.
            out: arrays that take the sum, in the form of ``value``; None: the values.
            priority: operations with a higher priority run first.
        """
        raise NotImplementedError

    def prepare(
        self, key: Keys, value: Values, out: Values | None = None, ready: Sequence[int | str] | None = None
    ) -> Callable[[], None]:
        """Return a function that does :meth:`pushpull` of these very arrays, as often as it is called.

        Args:
            key: a key, or a list of keys.
            value: arrays to push, as for :meth:`push`.
            out: arrays to write, as for :meth:`pull`; None: the pushed arrays.
            ready: the keys in the order in which their values will be there; None: the last key first.
        """
        return partial(self.pushpull, key, value, out)

    def buckets(self, keys: Sequence[K], ready: Sequence[K] | None = None) -> list[Sequence[K]]:
        """Return the keys of one call in the groups that are exchanged as one, in the order of exchange.

        Args:
            keys: of the call.
            ready: as for :meth:`prepare`.
        """
        return [keys]

    def set_optimizer(self, optimizer: object) -> None:
        """Let the store apply ``optimizer`` to every push."""
        raise NotImplementedError

    @classmethod
    def is_capable(cls, capability: str) -> bool:
        """Return whether the store can do ``capability`` (``KVStoreBase.OPTIMIZER``)."""
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
        """Return the bytes that the store will hold, by purpose, after every array was pushed from all contexts.

        Args:
            arrays: (elements, bytes) of each key.
            contexts: context of each array of a key.
            updates: an optimizer will run on the store; its states are not counted.
        """
        del arrays, contexts, updates
        return {}

    def updated_here(self, number: int, elements: int) -> int:
        """Of how many elements of the key of that number this process keeps the optimizer's states."""
        del number
        return elements

    @property
    def type(self) -> str:
        """The name it was created by, in lower case."""
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
    """Class decorator: make ``create(klass.__name__.lower())`` give an instance; registering again warns."""
    name = klass.__name__.lower()
    if name in _REGISTERED:
        warnings.warn(f"kvstore {name!r} is registered again: {klass!r} replaces {_REGISTERED[name]!r}", stacklevel=2)
    _REGISTERED[name] = klass
    return klass


def registered() -> dict[str, type[KVStoreBase]]:
    """Return the plug-in stores by name."""
    return dict(_REGISTERED)
