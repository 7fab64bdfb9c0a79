"""Atomic file writes, size checks on packed files, and detection of mistaken file kinds.

A writer gets a temporary file next to the target. The temporary file is renamed to the target at the end, or removed.
This module keeps no state. Any thread may write; of two concurrent writers the later one wins with its whole file. A
packed file may unpack to :data:`FREE` bytes, or to :data:`RATIO` times its own size.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import secrets
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from weftplan.errors import FormatError

FREE = 64 << 20
"""Bytes that every file may unpack to, however small it is."""
RATIO = 100
"""How many times its own size a file may unpack to: images and tables shrink to a third, zeros to a thousandth."""

_GZIP = b"\x1f\x8b"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags that create a new file, in binary mode on Windows too."""


def other_kind(start: bytes) -> str:
    """Return a description and a remedy for a file of a commonly mistaken kind; empty if the kind is not recognized.

    Call this with the first bytes of a file that could not be read in the expected format.

    >>> other_kind(b"version https://git-lfs.github.com/spec/v1").partition(",")[0]
    'it is a pointer of Git LFS'
    >>> other_kind(b"{")
    ''
    """
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, which stands for the file until that is fetched: run `git lfs pull` there"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "it is a page of HTML, as servers send one for a download that failed; fetch the file again"
    if start.startswith(_GZIP):
        return "it is a gzip file; unpack it first"
    if start.startswith(b"PK\x03\x04"):
        return "it is a zip archive; unpack it first"
    if start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return "it is a pickle, such as MXNet writes for optimizer states; it is not read, which could run any code"
    return ""


def open_to_read(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a file to read its bytes.

    Raises:
        FormatError: it is a folder.
        OSError: it cannot be opened.
    """
    if os.path.isdir(path):
        raise FormatError(f"{os.fspath(path)} is a folder, expected a file")
    return open(path, "rb")


def check_unpacked(nbytes: int, packed: int, file: str) -> None:
    """Raise FormatError if ``packed`` bytes of a file do not justify ``nbytes`` of memory; ``file`` names the file."""
    if nbytes > max(FREE, RATIO * packed):
        raise FormatError(
            f"{file}: {packed:,} bytes are said to unpack to {nbytes:,} or more, which is over {RATIO} times as many: "
            f"unpack the file first if you trust it"
        )


def unpack_gzip(content: bytes, file: str) -> bytes:
    """Return the unpacked bytes of a gzip file; return any other bytes unchanged.

    Raises:
        FormatError: the file is damaged, or unpacks to more than its size justifies.
    """
    if content[:2] != _GZIP:
        return content
    limit = max(FREE, RATIO * len(content))
    try:
        unpacked = gzip.GzipFile(fileobj=io.BytesIO(content)).read(limit + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise FormatError(f"{file}: a gzip file that is truncated or damaged: {error}") from error
    check_unpacked(len(unpacked), len(content), file)
    return unpacked


def check_zip(file: BinaryIO, name: str, *, stored: bool = False) -> None:
    """Raise FormatError if the members of a zip archive take more memory than its size justifies, or than it holds.

    Args:
        stored: require that no member is compressed and that no two members share bytes.
    """
    packed = file.seek(0, os.SEEK_END)
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, EOFError, OSError, NotImplementedError) as error:
        raise FormatError(f"{name}: a zip archive that is truncated or damaged: {error}") from error
    nbytes = sum(member.file_size for member in members)
    if stored and (nbytes > packed or any(member.compress_type != zipfile.ZIP_STORED for member in members)):
        raise FormatError(f"{name}: expected arrays that are not compressed, {packed:,} bytes hold {nbytes:,}")
    check_unpacked(nbytes, packed, name)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a temporary binary file for a ``with`` block; it replaces ``path`` when the block ends.

    If the block raises, or the process ends inside it, the old content of ``path`` stays. As with a plain ``open``,
    links are followed, an existing file keeps its permissions, and a new file gets the permissions that the umask
    allows. A target that is not a regular file (a pipe, ``/dev/null``) is written directly.

    Raises:
        OSError: the folder does not exist, or it or the file cannot be written; names ``path``.
    """
    target = os.path.realpath(os.fspath(path))
    try:
        status = os.stat(target)
    except OSError:
        status = None
    if status is not None and not stat.S_ISREG(status.st_mode):
        with naming(path), open(path, "wb") as file:
            yield file
        return
    if status is not None and not os.access(target, os.W_OK):
        raise PermissionError(13, "the file is write-protected", os.fspath(path))
    temporary = _beside(target)
    try:
        # Not the module tempfile: its files are for their owner only, and the umask cannot be read without changing it.
        handle = os.open(temporary, _NEW, 0o666)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error
    try:
        with naming(path), os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if status is not None:
            with contextlib.suppress(OSError):  # of another owner
                os.chmod(temporary, stat.S_IMODE(status.st_mode))
        os.replace(temporary, target)
        _keep_name(os.path.dirname(target))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text atomically, with :func:`replacing`."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file name to system errors that lack it, such as the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error


def put(path: str, content: bytes) -> None:
    """Replace ``path`` atomically by a file with permissions for this user only.

    It makes few system calls and does not call ``fsync``: a power loss soon after may damage the file.

    Raises:
        OSError: the folder does not exist or cannot be written, or the disk is full.
    """
    temporary = _beside(path)
    handle = os.open(temporary, _NEW, 0o600)
    try:
        try:
            with naming(path):
                written = os.write(handle, content)
        finally:
            os.close(handle)
        if written < len(content):
            raise OSError(errno.ENOSPC, f"expected to write {len(content):,} bytes, the disk took {written:,}", path)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _beside(target: str) -> str:
    """Return a name for a temporary file in the same folder."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name[:40]}.{secrets.token_hex(4)}")


def _keep_name(folder: str) -> None:
    """Make a new name in ``folder`` survive a power loss, if the system supports this."""
    with contextlib.suppress(OSError):  # file systems and operating systems may refuse it
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
