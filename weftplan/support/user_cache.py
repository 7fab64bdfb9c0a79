"""The user's cache folder: compiled kernels, measured times and plans, which later processes find again.

A process runs what it loads from here, or places arrays by it. So a folder is used only when no other user can have
written to it: it is a real folder of this user with permissions for this user alone, and no folder on the way to it,
along links too, lets others replace it. A file carries the hash of its content; one that does not match is made again.
A folder that is refused costs that time, and one line of the log.

Any process and thread may load and keep at any time: a file appears whole, and the later of two writers wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from weftplan.support.atomic_files import put
from weftplan.support.package_log import log

KINDS = ("kernels", "plans")
MOST = 256 << 20
"""Bytes in the folder of a kind; the eldest files go. A plan of 2,000 nodes takes 0.4 MB, a compiled module 10 KB."""
MOST_FILES = 8192
_SHARDS = 16
"""Sub-folders of a kind, one for each first digit of a name; each holds its share of both limits."""
_OURS = "weftplan"
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
    return Path(caches, _OURS, kind)


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
    return _open_to_others(place.parent)


def _open_to_others(place: Path) -> str | None:
    """Which folder or link on the way to a folder another user can replace; None if there is none."""
    me = _user()
    for above, found in _way(os.fspath(place)):
        if found.st_uid not in (0, me):
            return f"{above} belongs to another user"
        if found.st_mode & 0o022 and not stat.S_ISLNK(found.st_mode) and not found.st_mode & stat.S_ISVTX:
            return f"{above} can be written by others"
    return None


def _way(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every folder and every link that the system passes on its way to an absolute path."""
    here, names = os.sep, path.split(os.sep)[::-1]
    yield here, os.lstat(here)
    while names:
        name = names.pop()
        if name in ("", os.curdir):
            continue
        if name == os.pardir:
            here = os.path.dirname(here)
            continue
        step = os.path.join(here, name)
        found = os.lstat(step)
        yield step, found
        if stat.S_ISLNK(found.st_mode):
            target = os.readlink(step)
            names += target.split(os.sep)[::-1]
            here = os.sep if os.path.isabs(target) else here
        else:
            here = step


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
    elif open_to := _open_to_others(there.parent if there.name == _OURS else there):  # ours is closed on first use
        return open_to
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
        handle = os.open(os.path.join(place, name[:1], name), _READ)
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
    """Store an object under a :func:`key`; False if that is not possible. Now and then the eldest files are removed,
    until at most :data:`MOST` bytes and :data:`MOST_FILES` files are left."""
    if place is None:
        return False
    shard = os.path.join(place, name[:1])
    try:
        if not os.path.isdir(place):
            _make(place)
        refused = refusal(place)
        if refused is not None:
            _say_once(place, refused)
            return False
        if not os.path.isdir(shard):
            with contextlib.suppress(FileExistsError):
                os.mkdir(shard, 0o700)
        # What a loss of power leaves of a file does not match its hash.
        put(os.path.join(shard, name), b"".join((_MAGIC, hashlib.sha256(content).digest(), content)))
        if name[1:2] in ("", "0"):  # names are hashes: one in sixteen
            _drop_eldest(shard, MOST // _SHARDS, MOST_FILES // _SHARDS)
    except OSError:
        return False
    return True


def usage(place: Path) -> tuple[int, int]:
    """(files, bytes) in the folder of a kind."""
    sizes = [size for folder, _, _ in os.walk(place) for _, size, _ in _files(folder)]
    return len(sizes), sum(sizes)


def clear(place: Path) -> None:
    """Remove the folder of a kind; processes that keep files there meanwhile lose nothing but these files.

    Raises:
        OSError: it, or a file in it, cannot be removed.
    """
    if os.path.lexists(place):
        shutil.rmtree(place)


def _make(place: Path) -> None:
    """Make a folder and those above it, for this user alone whatever the umask; one of ours that is open is closed."""
    for folder in (*reversed(place.parents), place):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if folder.name == _OURS:
            found = os.lstat(folder)
            if found.st_uid == _user() and stat.S_ISDIR(found.st_mode) and found.st_mode & 0o022:
                folder.chmod(0o700)


@lru_cache(maxsize=16)
def _say_once(place: Path, reason: str) -> None:
    log.warning("nothing is kept in %s, so every process makes it again: %s", place, reason)


def _files(folder: str | os.PathLike[str]) -> list[tuple[int, int, str]]:
    """(time of writing, size, path) of the files in a folder, the eldest first."""
    written: list[tuple[int, int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process drops them, too
                if entry.is_file(follow_symlinks=False):
                    state = entry.stat(follow_symlinks=False)
                    written.append((state.st_mtime_ns, state.st_size, entry.path))
    return sorted(written)


def _drop_eldest(shard: str, most: int, most_files: int) -> None:
    """Remove files until at most that many bytes and files are left, and those that an earlier release has kept
    directly in the folder of the kind."""
    written = _files(shard)
    left, files = sum(size for _, size, _ in written), len(written)
    gone = [path for _, _, path in _files(os.path.dirname(shard))]
    for _, size, path in written:
        if left <= most and files <= most_files:
            break
        left, files = left - size, files - 1
        gone.append(path)
    for path in gone:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
