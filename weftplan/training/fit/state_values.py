"""Serialization of metrics, optimizers and iterators into JSON values and arrays for checkpoints.

Numbers, texts, lists and dictionaries become JSON values. Arrays, on any device, go into a separate table. No pickle is
involved, so reading a file runs no code. Copies of NDArrays are pushed to the engine without waiting. One thread uses
a :class:`StatePacker`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import FormatError
from weftplan.ndarray import NDArray, array
from weftplan.support.array_types import RawArray

Arrays = dict[str, Any]
"""Arrays by name: NDArrays on the host, or NumPy arrays."""
_KIND = "~"
_LIVE = (FunctionType, MethodType, ModuleType, type)
_HOST = Context("cpu", 0)


class Unpackable(TypeError):
    """Value that cannot be serialized."""


class StatePacker:
    """Serializer of values; collects arrays in :attr:`arrays` under names that start with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        self.arrays: Arrays = {}
        self._prefix = prefix

    def value(self, value: Any) -> Any:
        """Convert ``value`` to JSON; raises :class:`Unpackable` for functions, files and other live objects."""
        if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, np.generic)):
            return value
        if isinstance(value, np.generic):
            return {_KIND: "number", "dtype": value.dtype.str, "value": value.item()}
        if isinstance(value, NDArray):
            return {
                _KIND: "ndarray",
                "name": self._keep(value.copyto(_HOST)),
                "context": [*_context_key(value.context)],
            }
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "biuf":
                raise Unpackable(f"an array of dtype {value.dtype}")
            return {_KIND: "array", "name": self._keep(value.copy())}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, tuple):
            return {_KIND: "tuple", "items": [self.value(item) for item in value]}
        if isinstance(value, Mapping):
            return {_KIND: "dict", "items": [[self.value(key), self.value(item)] for key, item in value.items()]}
        raise Unpackable(type(value).__name__)

    def attributes(self, instance: object, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Pack the serializable attributes of ``instance``, nested objects included; skip the others."""
        packed = {}
        for name, value in vars(instance).items():
            if name in leave_out:
                continue
            try:
                packed[name] = self.value(value)
            except Unpackable:
                inner = self._inner(value)
                if inner is not None:
                    packed[name] = inner
        return packed

    def _inner(self, value: Any) -> Any:
        """Pack an object, or a list of objects, by its attributes; None if it has none."""
        if isinstance(value, list) and value and all(hasattr(item, "__dict__") for item in value):
            return {_KIND: "objects", "items": [self.attributes(item) for item in value]}
        if hasattr(value, "__dict__") and not isinstance(value, _LIVE):
            return {_KIND: "object", "items": self.attributes(value)}
        return None

    def _keep(self, values: NDArray | RawArray) -> str:
        name = f"{self._prefix}{len(self.arrays)}"
        self.arrays[name] = values
        return name


def unpacked(value: Any, arrays: Mapping[str, RawArray]) -> Any:
    """Convert the result of :meth:`StatePacker.value` back.

    Raises:
        FormatError: the value was not made by :class:`StatePacker`.
    """
    if isinstance(value, list):
        return [unpacked(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        kind = value[_KIND]
        if kind == "number":
            return np.dtype(value["dtype"]).type(value["value"])
        if kind == "ndarray":
            stored = arrays[value["name"]]
            return array(stored, ctx=Context(*value["context"]), dtype=stored.dtype)
        if kind == "array":
            return arrays[value["name"]].copy()
        if kind == "tuple":
            return tuple(unpacked(item, arrays) for item in value["items"])
        if kind == "dict":
            return {unpacked(key, arrays): unpacked(item, arrays) for key, item in value["items"]}
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"damaged: {value!r} is no value that a checkpoint holds ({error!r})") from error
    raise FormatError(f"damaged: a value of the unknown kind {kind!r}")


def restore(instance: object, attributes: Mapping[str, Any], arrays: Mapping[str, RawArray]) -> None:
    """Set the attributes of ``instance`` from a result of :meth:`StatePacker.attributes`."""
    for name, value in attributes.items():
        kind = value.get(_KIND) if isinstance(value, dict) else None
        if kind == "objects":
            for item, inner in zip(getattr(instance, name), value["items"], strict=True):
                restore(item, inner, arrays)
        elif kind == "object":
            # Copy: two attributes may share an object now, while their saved states differ.
            inner = copy.copy(getattr(instance, name))
            restore(inner, value["items"], arrays)
            setattr(instance, name, inner)
        else:
            setattr(instance, name, unpacked(value, arrays))


def _context_key(context: Context) -> tuple[str, int]:
    return context.device_type, context.device_id
