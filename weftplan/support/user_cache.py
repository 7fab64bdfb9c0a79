"""Files in the user's cache folder: compiled kernels, measured times, plans; so a second process makes none anew.

What is loaded from here is run, or says where arrays lie, so a folder is used only when nobody else could have written
to it: it is a real folder of this user's with permissions for this user alone, and no folder above it lets others
replace it. A file carries the hash of its content; what does not match is made again. A folder that cannot be used or
written costs that time and nothing else.

Any process and thread may load and keep at any time: a file appears whole, and the later of two writers wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from weftplan.support.atomic_files import put

MOST = 256 << 20
"""Bytes in the folder of a kind; the eldest files go. A plan of 2,000 nodes takes 0.4 MB, a compiled module 10 KB."""
_MAGIC = b"weftplan cache 1\n"
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe may never have a writer


def folder(kind: str, environment: Mapping[str, str] | None = None) -> Path | None:
    """Where files of a kind (``kernels``, ``plans``) are kept; None where the system offers no way to tell who may
    write."""
    environment = os.environ if environment is None else environment
    if _user() is None:
        return None
    given = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(given):
        home = environment.get("HOME", "")
        if not os.path.isabs(home):
            return None
        given = os.path.join(home, *(("Library", "Caches") if sys.platform == "darwin" else (".cache",)))
    return _under(given, kind)


@lru_cache(maxsize=16)
def _under(caches: str, kind: str) -> Path:
    return Path(caches, "weftplan", kind)


def refusal(place: Path) -> str | None:
    """Why an existing folder must not be loaded from; None when only this user can have written there."""
    try:
        found = os.lstat(place)
    except OSError as error:
        return f"{place}: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{place} is no folder"
    me = _user()
    if me is None:
        return f"{place}: this system does not tell who may write there"
    if found.st_uid != me:
        return f"{place} belongs to another user"
    if found.st_mode & 0o077:
        return f"{place} has permissions for others (expected 0700)"
    above = os.fspath(place)
    while above != (up := os.path.dirname(above)):
        above = up
        found = os.lstat(above)
        if stat.S_ISLNK(found.st_mode):
            above = os.path.realpath(above)
            found = os.stat(above)
        if found.st_uid not in (0, me):
            return f"{above} belongs to another user"
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            return f"{above} can be written by others"
    return None


def _user() -> int | None:
    """The number of the user as whom this process acts; None where users have none (Windows)."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def obstacle(place: Path) -> str | None:
    """Why nothing can be kept in a folder, which may not exist yet; None when something can. For a reader: whether it
    is so is seen when something is kept."""
    there = place
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if there == place:
        refused = refusal(place)
        if refused is not None:
            return refused
    elif not there.is_dir():
        return f"{there} is no folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"


def key(*parts: str) -> str:
    """A name for what is made from these texts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def load(place: Path | None, name: str) -> bytes | None:
    """The object called ``name``, or None when there is none that can be trusted."""
    if place is None:
        return None
    try:
        handle = os.open(os.path.join(place, name), _READ)
        with os.fdopen(handle, "rb") as file:
            # The folder is looked at last: often there is no such file, and what others could do to it until then they
            # could also have done before the file was opened.
            found = os.fstat(handle)
            if found.st_uid != _user() or found.st_mode & 0o022 or not stat.S_ISREG(found.st_mode):
                return None
            if refusal(place) is not None:
                return None
            data = file.read()
    except OSError:
        return None
    head = len(_MAGIC) + 32
    content = data[head:]
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : head] != hashlib.sha256(content).digest():
        return None
    return content


def keep(place: Path | None, name: str, content: bytes) -> bool:
    """Store an object under a :func:`key`; False where that is not possible. Now and then the eldest files of the
    folder are removed, until the others have at most :data:`MOST` bytes."""
    if place is None:
        return False
    try:
        if not os.path.isdir(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
        if refusal(place) is not None:
            return False
        # What a loss of power leaves of a file does not match its hash.
        put(os.path.join(place, name), b"".join((_MAGIC, hashlib.sha256(content).digest(), content)))
        if name.startswith("0"):  # names are hashes: one in sixteen
            _drop_eldest(place, MOST)
    except OSError:
        return False
    return True


def _drop_eldest(place: Path, most: int) -> None:
    """Remove files until at most so many bytes are left."""
    written: list[tuple[int, int, str]] = []
    with os.scandir(place) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):  # another process drops them, too
                state = entry.stat(follow_symlinks=False)
                written.append((state.st_mtime_ns, state.st_size, entry.path))
    left = sum(size for _, size, _ in written)
    for _, size, path in sorted(written):
        if left <= most:
            break
        left -= size
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
