"""Files that appear whole or not at all, and what a file is that was given for another.

A writer gets a temporary file beside the target, which takes the target's name at the end or not at all. Nothing is
kept; any thread may write, and where two write one file the later one wins whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""A new file, which is no text on Windows either."""


def other_kind(start: bytes) -> str:
    """What a file is that begins so, and what to do, where it could not be read as what it was given for; empty where
    it is nothing that often lies in such a place.

    >>> other_kind(b"version https://git-lfs.github.com/spec/v1").partition(",")[0]
    'it is a pointer of Git LFS'
    >>> other_kind(b"{")
    ''
    """
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of Git LFS, which stands for the file until that is fetched: run `git lfs pull` there"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        return "it is a page of HTML, as servers send one for a download that failed; fetch the file again"
    if start.startswith(b"\x1f\x8b"):
        return "it is a gzip file; unpack it first"
    if start.startswith(b"PK\x03\x04"):
        return "it is a zip archive; unpack it first"
    if start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return "it is a pickle, such as MXNet writes for optimizer states; it is not read, which could run any code"
    return ""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file to write in a ``with`` block; it takes the place of ``path`` when the block ends.

    When the block raises, or the process ends in it, what was at ``path`` is still there. As with a plain ``open``, a
    link leads on to its file, an existing file keeps its permissions and a new one has those that the umask allows, and
    what is no regular file (a pipe, ``/dev/null``) is written directly.

    Raises:
        OSError: the folder does not exist, or it or the file cannot be written; names ``path``.
    """
    target = os.path.realpath(os.fspath(path))
    try:
        before = os.stat(target)
    except OSError:
        before = None
    if before is not None and not stat.S_ISREG(before.st_mode):
        with open(path, "wb") as file:
            yield file
        return
    if before is not None and not os.access(target, os.W_OK):
        raise PermissionError(13, "the file is write-protected", os.fspath(path))
    temporary = _beside(target)
    try:
        # Not the module tempfile: its files are for their owner only, and the umask cannot be read without changing it.
        handle = os.open(temporary, _NEW, 0o666)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if before is not None:
            with contextlib.suppress(OSError):  # of another owner
                os.chmod(temporary, stat.S_IMODE(before.st_mode))
        os.replace(temporary, target)
        _keep_name(os.path.dirname(target))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def put(path: str, content: bytes) -> None:
    """Let a file for this user alone take the place of ``path``, whatever is there, in few calls of the system; a loss
    of power soon after may damage it.

    Raises:
        OSError: the folder does not exist or cannot be written, or the disk is full.
    """
    temporary = _beside(path)
    handle = os.open(temporary, _NEW, 0o600)
    try:
        try:
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
    """A name for a temporary file in the same folder."""
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name[:40]}.{secrets.token_hex(4)}")


def _keep_name(folder: str) -> None:
    """Let a new name in ``folder`` outlast a loss of power, where the system can be asked to."""
    with contextlib.suppress(OSError):  # no file system, and no system, has to allow it
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
