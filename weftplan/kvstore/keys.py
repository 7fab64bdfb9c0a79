"""Checking and grouping of a call's keys and values, such as ``push([3, 5], [[a0, a1], [b0, b1]])``.

All keys of a store are strings, or all are integers. Each key has a number, which orders the keys of a call and decides
placement, as in MXNet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weftplan.errors import KVStoreError
from weftplan.ndarray import NDArray

Key = int | str


class KeyTable:
    """The keys of a store: their common type, and the numbers of string keys in the order of ``init``.

    A table does not change: a store that gets keys gets a new table, so that a failure leaves it the old one.
    """

    def __init__(self) -> None:
        self._type: type[int] | type[str] | None = None
        self._numbers: dict[str, int] = {}

    def including(self, keys: Sequence[Key]) -> KeyTable:
        """Return a table with these checked keys, too; the first key of all fixes their type."""
        table = KeyTable()
        table._type, table._numbers = self._type, self._numbers.copy()
        for key in keys:
            table._type = str if isinstance(key, str) else int
            if isinstance(key, str):
                table._numbers.setdefault(key, len(table._numbers))
        return table

    def check(self, key: object) -> Key:
        """Return ``key``; raise KVStoreError unless it is an int or str, of the same type as the store's keys."""
        if isinstance(key, bool) or not isinstance(key, (int, str)):
            raise KVStoreError(f"a key must be an int or a str, got {type(key).__name__}: {key!r}")
        kind = int if isinstance(key, int) else str
        if self._type is not None and self._type is not kind:
            raise KVStoreError(
                f"Mixed key types are not allowed: this store uses {self._type.__name__} keys, got {key!r}"
            )
        return key

    def number(self, key: Key) -> int:
        """Return the number of ``key``: an int itself, a str's index in the order of ``init``, or the next index."""
        return key if isinstance(key, int) else self._numbers.get(key, len(self._numbers))


def group_pairs(table: KeyTable, key: object, value: object, *, what: str) -> list[tuple[Key, list[NDArray]]]:
    """Return (key, arrays in order of appearance) for each distinct key of a call, in ascending key number.

    Args:
        table: the store's keys.
        key: a key, or a list of keys.
        value: an array or a list of arrays (one for each device); for a list of keys a list of either.
        what: name of the argument ``value`` in errors, such as "out".

    Raises:
        KVStoreError: the lengths differ, a key is not legal for the store, or a value is not an NDArray.
    """
    if isinstance(key, (list, tuple)):
        values = value if isinstance(value, (list, tuple)) else None
        if values is None or len(values) != len(key):
            got = type(value).__name__ if values is None else str(len(values))
            raise KVStoreError(f"{len(key)} keys need a list of {len(key)} items as {what}, got {got}")
        pairs = [(table.check(k), _arrays(k, v, what)) for k, v in zip(key, values, strict=True)]
        if len(pairs) == 1:
            return pairs
    else:
        return [(table.check(key), _arrays(key, value, what))]
    if len({type(k) for k, _ in pairs}) > 1:
        raise KVStoreError(f"Mixed key types are not allowed: one call has {[k for k, _ in pairs]}")
    groups: dict[Key, list[NDArray]] = {}
    for k, arrays in pairs:
        groups.setdefault(k, []).extend(arrays)
    return sorted(groups.items(), key=lambda item: table.number(item[0]))


def _arrays(key: object, value: object, what: str) -> list[NDArray]:
    items: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    if not items:
        raise KVStoreError(f"key {key!r}: {what} is an empty list, expected at least one NDArray")
    for item in items:
        if item.__class__ is not NDArray and not isinstance(item, NDArray):
            raise KVStoreError(f"key {key!r}: {what} must be an NDArray or a list of them, got {type(item).__name__}")
    return items


def check_fits(key: Key, arrays: list[NDArray], stored: NDArray, verb: str) -> None:
    """Raise KVStoreError if the shape or dtype of an array differs from the stored value's.

    ``verb`` names the method in the error.
    """
    shape, dtype = stored.shape, stored.np_dtype
    for array in arrays:
        if array.shape != shape or (array.np_dtype is not dtype and array.np_dtype != dtype):
            raise KVStoreError(
                f"{verb}: key {key!r} holds {stored.shape} {stored.np_dtype}, got {array.shape} {array.np_dtype} on "
                f"{array.context}"
            )
