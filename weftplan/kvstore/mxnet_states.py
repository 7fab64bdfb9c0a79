"""Optimizer states saved by MXNet: a pickle, read without running any code that it names.

A pickle says which functions to call. The reader here knows arrays (their bytes are a record of a ``.params`` file),
bytes, and settings of optimizers and schedules, which it keeps as plain values; everything else is refused before it
could be called.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Protocol, TypeAlias

from weftplan.errors import FormatError
from weftplan.kvstore.keys import Key
from weftplan.ndarray import NDArray
from weftplan.ndarray.formats.serialize import load_record

State: TypeAlias = "NDArray | tuple[State, ...] | None"
"""None, an NDArray, or a (nested) tuple of states."""
_SETTINGS = ("mxnet.optimizer", "mxnet.lr_scheduler")
"""Modules whose objects are kept as plain settings."""


class _Array:
    """Stands for an NDArray while the pickle is read."""

    def __init__(self, *args: object) -> None:
        self.record = b""

    def __setstate__(self, state: object) -> None:
        record = state.get("handle") if isinstance(state, dict) else None
        if not isinstance(record, (bytes, bytearray)):
            raise FormatError("optimizer states: an array without its bytes")
        self.record = bytes(record)


class _Settings:
    """An optimizer or a schedule: its attributes, and nothing that acts."""

    def __init__(self, *args: object) -> None:
        """Keep nothing of these."""


def _bytes(value: object = b"", encoding: str = "latin1") -> bytes:
    """Accept only text or bytes, as MXNet passes to ``bytearray`` and ``_codecs.encode``: a number would allocate as
    many bytes."""
    if isinstance(value, str) and encoding in ("latin1", "latin-1"):
        return value.encode("latin1")
    if not isinstance(value, (bytes, bytearray)):
        raise FormatError(f"optimizer states: bytes made of {type(value).__name__}")
    return bytes(value)


_KNOWN: dict[tuple[str, str], Callable[..., object]] = {
    ("mxnet.ndarray.ndarray", "NDArray"): _Array,
    ("mxnet.ndarray", "NDArray"): _Array,
    ("builtins", "bytearray"): _bytes,
    ("__builtin__", "bytearray"): _bytes,
    ("_codecs", "encode"): _bytes,
}


class _Reads(Protocol):
    """A reader of a pickle, as far as a method for one opcode knows it."""

    read: Callable[[int], bytes]
    append: Callable[[object], None]


def _load_bytearray(reader: _Reads) -> None:
    """Read what is there; the library's own method makes as many zeros first as the file asks for."""
    (length,) = struct.unpack("<Q", reader.read(8))
    reader.append(bytearray(reader.read(length)))


class _Reader(pickle._Unpickler):
    """The reader in Python: that in C makes a table as long as the largest number in the file asks for."""

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BYTEARRAY8[0]: _load_bytearray}

    def find_class(self, module_name: str, global_name: str) -> Callable[..., object]:
        known = _KNOWN.get((module_name, global_name))
        if known is not None:
            return known
        if module_name.startswith(_SETTINGS) and global_name.isidentifier():
            return _Settings
        raise FormatError(
            f"these optimizer states are a pickle that names {module_name}.{global_name}, which is neither an array "
            f"nor an optimizer: it is not read, since a pickle can run code"
        )

    def persistent_load(self, pid: object) -> NoReturn:
        raise FormatError("these optimizer states are a pickle that refers to something outside: it is not read")


def read_mxnet_states(data: bytes) -> tuple[dict[Key, State], dict[Key, int]]:
    """Return (state of each key, number of its updates if stored) from ``Updater.get_states`` of MXNet.

    Raises:
        FormatError: truncated, not such a pickle, or a pickle that names anything else.
    """
    try:
        return _plain(_Reader(io.BytesIO(data)).load(), len(data))
    except FormatError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its bytes say
        raise FormatError(f"optimizer states: a damaged pickle: {type(error).__name__}: {error}") from error


def _plain(found: object, size: int) -> tuple[dict[Key, State], dict[Key, int]]:
    """Return the states and counts in the content of a pickle of ``size`` bytes."""
    optimizer: Any = None
    if isinstance(found, tuple) and len(found) == 2:
        found, optimizer = found
    if not isinstance(found, dict) or not all(isinstance(key, (int, str)) for key in found):
        raise FormatError(f"optimizer states: expected a dictionary of states, the pickle holds {type(found).__name__}")
    counts = getattr(optimizer, "_index_update_count", {})
    if not isinstance(counts, dict) or not all(isinstance(n, int) for n in counts.values()):
        raise FormatError("optimizer states: the numbers of updates are no numbers")
    room = _Room(size)
    return {key: _state(value, key, room) for key, value in found.items()}, counts


class _Room:
    """Remaining size of a pickle's content: at least a byte for each value, and the bytes of each array. A malicious
    pickle names one value in several places, and so a great many in few bytes."""

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise FormatError("optimizer states: a pickle that holds one value in many places")


def _state(value: object, key: object, room: _Room) -> State:
    room.take(1)
    if value is None:
        return None
    if isinstance(value, _Array):
        room.take(len(value.record))
        return load_record(value.record, f"optimizer state of {key!r}")
    if isinstance(value, (tuple, list)):
        return tuple(_state(item, key, room) for item in value)
    raise FormatError(f"optimizer states: the state of {key!r} is {type(value).__name__}, no array")
