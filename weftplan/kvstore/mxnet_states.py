"""Reader for optimizer states saved by MXNet as a pickle; it runs no code that the pickle names.

A pickle names functions for the reader to call. This reader accepts only arrays (stored as records of a ``.params``
file), bytes, and the objects of optimizers and schedules, which it reads as plain attributes. It refuses any other
name.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Protocol, TypeAlias

from weftplan.errors import FormatError
from weftplan.kvstore.keys import Key
from weftplan.ndarray import NDArray
from weftplan.ndarray.formats.serialize import dump_record, load_record

State: TypeAlias = "NDArray | tuple[State, ...] | None"
"""The optimizer state of a key: None, an NDArray, or a (nested) tuple of states."""
_SETTINGS = ("mxnet.optimizer", "mxnet.lr_scheduler")
"""Modules whose objects are read as :class:`_Settings`."""


def write_mxnet_states(states: Mapping[Key, State]) -> bytes:
    """Return states as the pickle that MXNet's ``Updater.set_states`` reads; it names MXNet's NDArray alone.

    Args:
        states: state of each key: None, an array, or a tuple of states. Counts of updates are not part of the format.
    """
    out = [b"\x80\x03}("]

    def put(value: object) -> None:
        if value is None:
            out.append(b"N")
        elif isinstance(value, NDArray):
            content = dump_record(value)
            # The object, then the argument of its __setstate__: {"handle": bytearray(content)}.
            out.append(b"cmxnet.ndarray.ndarray\nNDArray\nN\x85R}X\x06\x00\x00\x00handlecbuiltins\nbytearray\nB")
            out.append(struct.pack("<I", len(content)) + content + b"\x85Rsb")
        elif isinstance(value, tuple | list):
            out.append(b"(")
            for part in value:
                put(part)
            out.append(b"t")
        elif isinstance(value, str):
            text = value.encode()
            out.append(b"X" + struct.pack("<I", len(text)) + text)
        else:
            out.append(f"I{value}\n".encode())

    for key, state in states.items():
        put(key)
        put(state)
    return b"".join((*out, b"u."))


class _Array:
    """Stand-in for a pickled NDArray: its record in the format of a ``.params`` file."""

    def __init__(self, *args: object) -> None:
        self.record = b""

    def __setstate__(self, state: object) -> None:
        record = state.get("handle") if isinstance(state, dict) else None
        if not isinstance(record, (bytes, bytearray)):
            raise FormatError("optimizer states: an array without its bytes")
        self.record = bytes(record)


class _Settings:
    """Stand-in for a pickled optimizer or schedule, with the attributes but no methods."""

    def __init__(self, *args: object) -> None:
        """Ignore the arguments that the pickle passes."""


def _bytes(value: object = b"", encoding: str = "latin1") -> bytes:
    """Convert text or bytes to bytes, in place of ``bytearray`` and ``_codecs.encode``; refuse other types."""
    # bytearray(n) would allocate n bytes for a number n in a malicious file.
    if isinstance(value, str) and encoding in ("latin1", "latin-1"):
        return value.encode("latin1")
    if not isinstance(value, (bytes, bytearray)):
        raise FormatError(f"optimizer states: bytes made of {type(value).__name__}")
    return bytes(value)


_REBUILDERS: dict[tuple[str, str], Callable[..., object]] = {
    ("mxnet.ndarray.ndarray", "NDArray"): _Array,
    ("mxnet.ndarray", "NDArray"): _Array,
    ("builtins", "bytearray"): _bytes,
    ("__builtin__", "bytearray"): _bytes,
    ("_codecs", "encode"): _bytes,
}


class _PickleReader(Protocol):
    """The methods of an unpickler that an opcode's function uses."""

    read: Callable[[int], bytes]
    append: Callable[[object], None]


def _load_bytearray(reader: _PickleReader) -> None:
    """Execute the opcode BYTEARRAY8: read a length and push a bytearray of at most that many bytes of the file."""
    # The standard library's method first allocates the length, which a damaged file may set to any number.
    (length,) = struct.unpack("<Q", reader.read(8))
    reader.append(bytearray(reader.read(length)))


class _Reader(pickle._Unpickler):
    """An unpickler that calls only known functions.

    It derives from the Python implementation. The C implementation allocates a memo table for the largest index in the
    file, which a damaged file may set to any number.
    """

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BYTEARRAY8[0]: _load_bytearray}

    def find_class(self, module_name: str, global_name: str) -> Callable[..., object]:
        rebuild = _REBUILDERS.get((module_name, global_name))
        if rebuild is not None:
            return rebuild
        if module_name.startswith(_SETTINGS) and global_name.isidentifier():
            return _Settings
        raise FormatError(
            f"these optimizer states are a pickle that names {module_name}.{global_name}, which is neither an array "
            f"nor an optimizer: it is not read, since a pickle can run code"
        )

    def persistent_load(self, pid: object) -> NoReturn:
        raise FormatError("these optimizer states are a pickle that refers to something outside: it is not read")


def read_mxnet_states(data: bytes) -> tuple[dict[Key, State], dict[Key, int]]:
    """Return (states by key, update counts by key) from the bytes of MXNet's ``Updater.get_states``.

    The counts are empty if the file has no optimizer.

    Raises:
        FormatError: the data is damaged, or is a pickle of other objects.
    """
    try:
        return _read_content(_Reader(io.BytesIO(data)).load(), len(data))
    except FormatError:
        raise
    except Exception as error:  # a damaged pickle may raise any exception
        raise FormatError(f"optimizer states: a damaged pickle: {type(error).__name__}: {error}") from error


def _read_content(content: object, size: int) -> tuple[dict[Key, State], dict[Key, int]]:
    """Return (states by key, update counts by key) from the object in a pickle of ``size`` bytes."""
    optimizer: Any = None
    if isinstance(content, tuple) and len(content) == 2:
        content, optimizer = content
    if not isinstance(content, dict) or not all(isinstance(key, (int, str)) for key in content):
        kind = type(content).__name__
        raise FormatError(f"optimizer states: expected a dictionary of states, the pickle holds {kind}")
    counts = getattr(optimizer, "_index_update_count", {})
    if not isinstance(counts, dict) or not all(isinstance(n, int) for n in counts.values()):
        raise FormatError("optimizer states: the numbers of updates are no numbers")
    budget = _Budget(size)
    return {key: _state(value, key, budget) for key, value in content.items()}, counts


class _Budget:
    """Limit on the size of the states that a pickle describes: the pickle's own number of bytes.

    Each value takes 1 byte of this limit, and an array also its own bytes. Without the limit a malicious pickle of few
    bytes could describe huge states, because it can refer to one value many times.
    """

    def __init__(self, size: int) -> None:
        self._remaining = size

    def take(self, nbytes: int) -> None:
        self._remaining -= nbytes
        if self._remaining < 0:
            raise FormatError("optimizer states: a pickle that holds one value in many places")


def _state(value: object, key: object, budget: _Budget) -> State:
    budget.take(1)
    if value is None:
        return None
    if isinstance(value, _Array):
        budget.take(len(value.record))
        return load_record(value.record, f"optimizer state of {key!r}")
    if isinstance(value, (tuple, list)):
        return tuple(_state(item, key, budget) for item in value)
    raise FormatError(f"optimizer states: the state of {key!r} is {type(value).__name__}, no array")
