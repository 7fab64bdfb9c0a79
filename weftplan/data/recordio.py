"""``mx.recordio``: record files with or without an index, and headers of labelled records.

A record is the magic word ``0xced7230a``, a word that packs the length (29 bits) and the part kind (3 bits: whole,
first, middle, last), the payload, and zero padding to a multiple of 4. If the payload contains the magic word at a
multiple of 4, the record is split there and the word left out. All words are little endian.
"""

from __future__ import annotations

import atexit
import os
import struct
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from weftplan.data.image_files import Host, decode, encode
from weftplan.errors import FormatError, MXNetError, ParameterError
from weftplan.locks import Lock
from weftplan.support.atomic_files import naming, open_to_read, other_kind, replacing
from weftplan.support.package_log import log
from weftplan.support.progress import Progress

__all__ = ["IRHeader", "MXIndexedRecordIO", "MXRecordIO", "pack", "pack_img", "unpack", "unpack_img"]

_MAGIC = struct.pack("<I", 0xCED7230A)
_COMPLETE, _START, _MIDDLE, _END = range(4)
_LENGTH = (1 << 29) - 1
_MUCH = 1 << 20
"""Record length above which the file size is checked before the record is read."""
_HEADER = struct.Struct("<IfQQ")


class MXRecordIO:
    """Record file, read or written sequentially from its start.

    Args:
        uri: path of the file.
        flag: ``"r"`` or ``"w"``.

    Raises:
        ParameterError: another flag.
        OSError: the file cannot be opened.
    """

    def __init__(self, uri: str | os.PathLike[str], flag: str) -> None:
        if flag not in ("r", "w"):
            raise ParameterError(f"{type(self).__name__}: flag must be 'r' or 'w', got {flag!r}")
        self.uri = uri
        self.flag = flag
        self._file: BinaryIO | None = None
        self._pid = os.getpid()
        self.open()

    @property
    def writable(self) -> bool:
        """Whether the file is open for writing."""
        return self.flag == "w"

    @property
    def is_open(self) -> bool:
        """False after :meth:`close`."""
        return self._file is not None

    def open(self) -> None:
        """Open the file; opening for writing truncates it."""
        self._file = open(self.uri, "wb") if self.writable else open_to_read(self.uri)  # noqa: SIM115 - closed by close()
        self._pid = os.getpid()
        if self.writable:
            _writers.add(self)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._file is not None:
            file, self._file = self._file, None
            with naming(self.uri):
                file.close()

    def reset(self) -> None:
        """Close and reopen: read from the start, or truncate and write."""
        self.close()
        self.open()

    def __del__(self) -> None:
        file = getattr(self, "_file", None)
        if file is not None:
            try:
                if self._pid == os.getpid():
                    self.close()
                else:
                    file.close()  # the parent writes the index; the buffer is empty
            except OSError as error:  # a finalizer cannot raise
                log.warning("%s was not closed: %s", os.fspath(self.uri), error)

    def __getstate__(self) -> dict[str, object]:
        if self.writable:
            raise MXNetError("a record file that is written cannot be pickled: two processes would write it")
        return {**self.__dict__, "_file": None, "_was_open": self.is_open}

    def __setstate__(self, state: dict[str, Any]) -> None:
        was_open = state.pop("_was_open")
        self.__dict__.update(state)
        if was_open:
            self.open()

    def _opened(self, verb: str) -> BinaryIO:
        if self._file is None:
            raise MXNetError(f"{verb}: {os.fspath(self.uri)} is closed; call open()")
        if self._pid != os.getpid():
            # Parent and child share the file offset, so each would read only some of the records.
            if self.writable:
                raise MXNetError(f"{verb}: {os.fspath(self.uri)} was opened by the process that forked this one")
            self.reset()
        return self._file

    def write(self, buf: bytes) -> None:
        """Append a record; raises MXNetError when the file is read, or the record has 512 MiB or more."""
        file = self._opened("write")
        if not self.writable:
            raise MXNetError(f"write: {os.fspath(self.uri)} was opened to be read")
        if len(buf) > _LENGTH:
            raise MXNetError(f"write: a record has less than 512 MiB, got {len(buf):,} bytes")
        parts = _cut(buf)
        for k, part in enumerate(parts):
            kind = _COMPLETE if len(parts) == 1 else _START if k == 0 else _END if k == len(parts) - 1 else _MIDDLE
            with naming(self.uri):
                file.write(_MAGIC + struct.pack("<I", kind << 29 | len(part)) + part + bytes(-len(part) % 4))

    def read(self) -> bytes | None:
        """Return the next record, None at the end.

        Raises:
            FormatError: the file is truncated, or no file of records.
        """
        file = self._opened("read")
        if self.writable:
            raise MXNetError(f"read: {os.fspath(self.uri)} was opened to be written")
        parts: list[bytes] = []
        while True:
            start = file.tell()
            head = file.read(8)
            if not head and not parts:
                return None
            if len(head) < 8 or head[:4] != _MAGIC:
                what = other_kind(head + file.read(64)) if not start else ""
                raise FormatError(
                    f"{os.fspath(self.uri)}: {what or f'no record at byte {start:,}: damaged, or no record file'}"
                )
            (word,) = struct.unpack("<I", head[4:])
            kind, length = word >> 29, word & _LENGTH
            if kind > _END or (kind in (_COMPLETE, _START)) == bool(parts):
                raise FormatError(f"{os.fspath(self.uri)}: damaged: a part of a record stands alone at byte {start:,}")
            # Check large lengths against the file size: read() would allocate a damaged length before any byte is read.
            is_present = length < _MUCH or length <= os.fstat(file.fileno()).st_size - start - 8
            part = file.read(length) if is_present else b""
            if len(part) < length or len(file.read(-length % 4)) < -length % 4:
                raise FormatError(
                    f"{os.fspath(self.uri)}: truncated: the record at byte {start:,} needs {length:,} bytes"
                )
            parts.append(part)
            if kind in (_COMPLETE, _END):
                return _MAGIC.join(parts)

    def go_to(self, position: int) -> None:
        """Move to a byte offset."""
        self._opened("seek").seek(position)

    def places(self) -> list[int]:
        """Return the offset of every record, by scanning the record headers; then move to the first record.

        Raises:
            FormatError: the file is truncated, or no file of records.
        """
        file = self._opened("read")
        size = os.fstat(file.fileno()).st_size
        positions, position = [], 0
        with Progress(f"looking for the records of {os.fspath(self.uri)}", size >> 20, unit="MiB") as progress:
            while position < size:
                file.seek(position)
                head = file.read(8)
                kind, length = _COMPLETE, 0
                if len(head) == 8 and head[:4] == _MAGIC:
                    (word,) = struct.unpack("<I", head[4:])
                    kind, length = word >> 29, word & _LENGTH
                end = position + 8 + length + -length % 4
                if len(head) < 8 or head[:4] != _MAGIC or end > size:
                    raise FormatError(
                        f"{os.fspath(self.uri)}: no whole record at byte {position:,}: truncated, damaged, or no "
                        f"record file"
                    )
                if kind in (_COMPLETE, _START):
                    positions.append(position)
                progress.step((end >> 20) - (position >> 20))
                position = end
        file.seek(0)
        return positions


_writers: weakref.WeakSet[MXRecordIO] = weakref.WeakSet()
"""Files opened for writing. A finalizer may run too late at exit to write an index."""


@atexit.register
def _close_writers() -> None:
    """Close the files that the program has left open, except those of the process that forked this one."""
    for writer in list(_writers):
        writer.__del__()


def _flush_writers() -> None:
    """Write buffered records before a fork, since the child would write its copy of the buffer, too."""
    for writer in list(_writers):
        if writer._file is not None:
            writer._file.flush()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_flush_writers)


def _cut(buf: bytes) -> list[bytes]:
    """Split a record's payload at every aligned occurrence of the magic word."""
    parts, start, position = [], 0, buf.find(_MAGIC)
    while position >= 0:
        if position % 4 == 0:
            parts.append(buf[start:position])
            start = position + 4
        position = buf.find(_MAGIC, position + 4 - position % 4 if position % 4 == 0 else position + 1)
    return [*parts, buf[start:]]


class MXIndexedRecordIO(MXRecordIO):
    """Record file with random access by key; the index is a text file with a line ``key<tab>place`` per record.

    Args:
        idx_path: path of the index.
        key_type: function that converts the text of a key.
    """

    def __init__(
        self,
        idx_path: str | os.PathLike[str],
        uri: str | os.PathLike[str],
        flag: str,
        key_type: Callable[[str], Hashable] = int,
    ) -> None:
        self.idx_path = idx_path
        self.key_type = key_type
        self.idx: dict[Any, int] = {}
        self.keys: list[Any] = []
        super().__init__(uri, flag)

    def open(self) -> None:
        super().open()
        self.idx, self.keys = {}, []
        if self.writable:
            return
        try:
            self._read_index(os.fstat(self._opened("read").fileno()).st_size)
        except BaseException:
            self.close()
            raise
        self.keys = list(self.idx)

    def _read_index(self, size: int) -> None:
        """Read the index; every offset must lie below ``size``, the size of the record file."""
        path = os.fspath(self.idx_path)
        with open_to_read(self.idx_path) as file:
            lines = file.read().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                key, _, position = line.decode().strip().partition("\t")
                self.idx[self.key_type(key)] = offset = int(position)
            except ValueError:
                raise FormatError(
                    f"{path}: line {number} must be a key, a tab and a place, got {line[:40]!r}"
                ) from None
            if not 0 <= offset < size:
                raise FormatError(
                    f"{path}: line {number} has the place {position[:40]}, but {os.fspath(self.uri)} has {size:,} "
                    f"bytes: damaged, or another file's index"
                )

    def close(self) -> None:
        if self.is_open and self.writable:
            lines = [f"{key}\t{position}\n" for key, position in self.idx.items()]
            try:
                with replacing(self.idx_path) as file:
                    file.write("".join(lines).encode())
            finally:
                super().close()
        super().close()

    def seek(self, idx: Hashable) -> None:
        """Move to the record of a key; raises ParameterError if there is none."""
        if idx not in self.idx:
            raise ParameterError(f"{os.fspath(self.uri)}: no record has the key {idx!r}")
        self._opened("seek").seek(self.idx[idx])

    def tell(self) -> int:
        """Return the offset of the next record to write."""
        return self._opened("tell").tell()

    def read_idx(self, idx: Hashable) -> bytes | None:
        """Return the record of a key."""
        self.seek(idx)
        return self.read()

    def write_idx(self, idx: Any, buf: bytes) -> None:
        """Append a record with a key."""
        key, position = self.key_type(idx), self.tell()
        self.write(buf)
        self.idx[key] = position
        self.keys.append(key)


class RecordReader:
    """Thread-safe random access to records: by the keys of the index, else by record number from 0.

    Raises:
        FormatError: the file or its index is damaged.
    """

    def __init__(self, uri: str | os.PathLike[str], idx_path: str | os.PathLike[str] | None = None) -> None:
        # Guards the position of ``_file``: a seek and the read after it are one step.
        self._lock = Lock()
        if idx_path is None:
            self._file = MXRecordIO(uri, "r")
            self._offsets: dict[Any, int] = dict(enumerate(self._file.places()))
        else:
            indexed = MXIndexedRecordIO(idx_path, uri, "r")
            self._file, self._offsets = indexed, indexed.idx
        self.keys = list(self._offsets)

    def read(self, key: Any) -> bytes:
        """Return the record of a key."""
        with self._lock:
            self._file.go_to(self._offsets[key])
            record = self._file.read()
        if record is None:
            raise FormatError(f"{os.fspath(self._file.uri)}: there is no record {key!r}: damaged, or another's index")
        return record


class IRHeader(NamedTuple):
    """Header of a labelled record; ``flag`` is the number of labels if they are an array, else 0."""

    flag: int
    label: Any
    id: int
    id2: int


def pack(header: IRHeader | Sequence[Any], s: bytes) -> bytes:
    """Pack a header and bytes into a record; an array label is stored as float32 after the header."""
    header = IRHeader(*header)
    if isinstance(header.label, (int, float, np.integer, np.floating)):
        return _HEADER.pack(0, float(header.label), header.id, header.id2) + s
    labels = np.asarray(header.label, dtype="<f4")
    return _HEADER.pack(labels.size, 0.0, header.id, header.id2) + labels.tobytes() + s


def unpack(s: bytes) -> tuple[IRHeader, bytes]:
    """Unpack a record of :func:`pack` into (header, bytes); raises FormatError if it is too short."""
    if len(s) < _HEADER.size:
        raise FormatError(f"unpack: a record with a header has at least {_HEADER.size} bytes, got {len(s)}")
    header, content = IRHeader(*_HEADER.unpack_from(s)), s[_HEADER.size :]
    if not header.flag:
        return header, content
    if len(content) < 4 * header.flag:
        raise FormatError(f"unpack: the header says {header.flag} labels, {len(content)} bytes are left")
    labels = np.frombuffer(content, "<f4", header.flag).astype(np.float32)
    return header._replace(label=labels), content[4 * header.flag :]


def pack_img(header: IRHeader | Sequence[Any], img: ArrayLike, quality: int = 95, img_fmt: str = ".jpg") -> bytes:
    """Pack a header and an image, encoded as JPEG or PNG, into a record.

    Args:
        img: pixels, uint8 of shape (height, width[, 1 or 3]), in BGR order like OpenCV.
        quality: of JPEG from 1 to 100; for PNG the compression from 0 to 9, and 9 for anything above.
    """
    return pack(header, encode(_reversed_channels(np.asarray(img)), quality, img_fmt))


def unpack_img(s: bytes, iscolor: int = -1) -> tuple[IRHeader, Host]:
    """Unpack a record of :func:`pack_img` into (header, pixels), in BGR order.

    ``iscolor``: 1 for three channels, 0 for grey, -1 for those of the file.

    Raises:
        FormatError: the record holds no image.
    """
    header, content = unpack(s)
    pixels = _reversed_channels(decode(content, iscolor, "unpack_img"))
    return header, pixels[:, :, 0] if pixels.shape[2] == 1 else pixels


def _reversed_channels(pixels: Host) -> Host:
    """Swap the red and blue channels."""
    return pixels if pixels.ndim == 2 or pixels.shape[2] < 3 else pixels[:, :, [2, 1, 0, *range(3, pixels.shape[2])]]
