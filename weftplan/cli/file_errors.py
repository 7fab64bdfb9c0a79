"""Errors of the system about files, in words: the cause, and the remedy."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def in_words(error: OSError) -> str:
    """Return ``FILE: cause; advice``, or the system's text if the error names no file."""
    if not isinstance(error.filename, (str, bytes, os.PathLike)):
        return str(error.strerror or error)
    return f"{os.fsdecode(error.filename)}: {cause(error, Path(os.fsdecode(error.filename)))}"


def cause(error: OSError, path: Path) -> str:
    """Return why ``path`` could not be read or written, and the remedy."""
    number, folder = error.errno, next(folder for folder in (path, *path.parents, Path()) if folder.exists())
    if number == errno.ENOENT and error.strerror != os.strerror(errno.ENOENT):  # it lists the files that exist
        return str(error.strerror)
    if number == errno.ENOENT and path.parent.is_dir():
        return f"there is no such file; check its name{'' if path.is_absolute() else f' and the folder {os.getcwd()}'}"
    if number == errno.ENOENT:
        return f"there is no folder {path.parent}; create it, or give another name"
    if number == errno.EISDIR:
        return "it is a folder, expected a file; give the name of a file"
    if number in (errno.ENOTDIR, errno.EEXIST) and folder.is_file():
        return f"{folder} is a file, expected a folder; give another name"
    if number in (errno.EACCES, errno.EPERM):
        return f"this user may not use {folder}; change its permissions, or give another name"
    return str(error.strerror or error)
