"""The user's cache folder of compiled kernels, measured times and plans, shared between processes.

A process executes code that it loads from here, or places arrays by it. So a folder is used only if no other user can
have written to it. It must be a real folder of this user with permissions for this user alone, and no other user may be
able to replace a folder on its path, links included. A file carries the hash of its content; a file that does not match
is made again. A refused folder costs the time to make its files again, and one line of the log.

Any process and thread may load and store at any time: a file appears whole, and the later of two writers wins.
"""

from __future__ import annotations

import contextlib
import errno
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
"""Maximum bytes in the folder of a kind; the oldest files are removed first. A plan of 2,000 nodes takes 0.4 MB, a
compiled module 10 KB."""
MAX_FILES = 8192
"""Maximum files in the folder of a kind, so that listing it when a limit is checked takes milliseconds."""
_SHARDS = 16
"""Sub-folders of a kind, one for each first digit of a name; each holds its share of both limits."""
_OURS = "weftplan"
_MAGIC = b"weftplan cache 1\n"
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe may never have a writer


def folder(kind: str, environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder of a kind of files (``kernels``, ``plans``).

    None if there is no absolute home folder, or if the system has no user ids to check write permissions with.
    """
    environment = os.environ if environment is None else environment
    if _user() is None:
        return None
    base = environment.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = environment.get("HOME", "")
        if not os.path.isabs(home):
            return None
        base = os.path.join(home, *(("Library", "Caches") if sys.platform == "darwin" else (".cache",)))
    return _under(base, kind)


@lru_cache(maxsize=16)
def _under(caches: str, kind: str) -> Path:
    return Path(caches, _OURS, kind)


def refusal(directory: Path) -> str | None:
    """Return why files of an existing folder must not be loaded; None if only this user can have written there."""
    try:
        status = os.lstat(directory)
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is no folder"
    me = _user()
    if me is None:
        return f"{directory}: this system does not tell who may write there"
    if status.st_uid != me:
        return f"{directory} belongs to another user"
    if status.st_mode & 0o077:
        return f"{directory} has permissions for others (expected 0700)"
    return _writable_path(directory.parent)


def _writable_path(path: Path) -> str | None:
    """Describe the first folder or link on a path that another user can replace; None if there is none."""
    me = _user()
    for above, status in _visited(os.fspath(path)):
        if status.st_uid not in (0, me):
            return f"{above} belongs to another user"
        if status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode) and not status.st_mode & stat.S_ISVTX:
            return f"{above} can be written by others"
    return None


def _visited(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every folder and link that the system visits when it resolves an absolute path, with its status."""
    directory, names = os.sep, path.split(os.sep)[::-1]
    yield directory, os.lstat(directory)
    while names:
        name = names.pop()
        if name in ("", os.curdir):
            continue
        if name == os.pardir:
            directory = os.path.dirname(directory)
            continue
        step = os.path.join(directory, name)
        status = os.lstat(step)
        yield step, status
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(step)
            names += target.split(os.sep)[::-1]
            directory = os.sep if os.path.isabs(target) else directory
        else:
            directory = step


def _user() -> int | None:
    """Return this process's effective user id; None on Windows, which has none."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def obstacle(directory: Path) -> str | None:
    """Return why no file can be stored in a folder, which may not exist yet; None if it can.

    The answer is for a report: only :func:`keep` finds out for certain.
    """
    existing = directory
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if existing == directory:
        refused = refusal(directory)
        if refused is not None:
            return refused
    elif not existing.is_dir():
        return f"{existing} is no folder"
    elif open_to := _writable_path(
        existing.parent if existing.name == _OURS else existing
    ):  # ours is closed on first use
        return open_to
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written"


def key(*parts: str) -> str:
    """Return a file name for the object made from these texts: their hash."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def load(directory: Path | None, name: str) -> bytes | None:
    """Return the object called ``name``, or None if there is none that can be trusted."""
    if directory is None:
        return None
    try:
        handle = os.open(os.path.join(directory, name[:1], name), _READ)
        with os.fdopen(handle, "rb") as file:
            # The folder is checked last: often there is no such file, and any change that another user could make
            # until then could also have been made before the file was opened.
            status = os.fstat(handle)
            if status.st_uid != _user() or status.st_mode & 0o022 or not stat.S_ISREG(status.st_mode):
                return None
            if refusal(directory) is not None:
                return None
            data = file.read()
    except OSError:
        return None
    head = len(_MAGIC) + 32
    content = data[head:]
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : head] != hashlib.sha256(content).digest():
        return None
    return content


def keep(directory: Path | None, name: str, content: bytes) -> bool:
    """Store an object under a :func:`key`; return False if that is not possible.

    One call in sixteen removes the oldest files, until at most :data:`MOST` bytes and :data:`MAX_FILES` files remain.
    """
    if directory is None:
        return False
    shard = os.path.join(directory, name[:1])
    try:
        if not os.path.isdir(directory):
            _make(directory)
        refused = refusal(directory)
        if refused is not None:
            _say_once(directory, refused)
            return False
        if not os.path.isdir(shard):
            with contextlib.suppress(FileExistsError):
                os.mkdir(shard, 0o700)
        # A file damaged by a power loss does not match its hash.
        put(os.path.join(shard, name), b"".join((_MAGIC, hashlib.sha256(content).digest(), content)))
        if name[1:2] in ("", "0"):  # names are hashes: one in sixteen
            _drop_eldest(shard, MOST // _SHARDS, MAX_FILES // _SHARDS)
    except OSError:
        return False
    return True


TRIES = 20
"""How often :func:`clear` removes a folder in which other processes store files meanwhile."""


def usage(directory: Path) -> tuple[int, int]:
    """Return (files, bytes) in the folder of a kind."""
    sizes = [size for folder, _, _ in os.walk(directory) for _, size, _ in _files(folder)]
    return len(sizes), sum(sizes)


def clear(directory: Path) -> None:
    """Remove the folder of a kind; processes that store files there meanwhile lose only these files.

    Raises:
        OSError: it, or a file in it, cannot be removed.
    """
    for attempt in range(TRIES):
        try:
            if os.path.lexists(directory):
                shutil.rmtree(directory)
            return
        except OSError as error:  # another process stored a file in a folder that was being removed, or removed one
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or attempt == TRIES - 1:
                raise


def _make(directory: Path) -> None:
    """Make a folder and its parents for this user alone, whatever the umask; tighten an open folder of ours."""
    for folder in (*reversed(directory.parents), directory):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if folder.name == _OURS:
            status = os.lstat(folder)
            if status.st_uid == _user() and stat.S_ISDIR(status.st_mode) and status.st_mode & 0o022:
                folder.chmod(0o700)


@lru_cache(maxsize=16)
def _say_once(directory: Path, reason: str) -> None:
    log.warning("nothing is kept in %s, so every process makes it again: %s", directory, reason)


def _files(folder: str | os.PathLike[str]) -> list[tuple[int, int, str]]:
    """Return (time of writing, size, path) of the files in a folder, oldest first."""
    written: list[tuple[int, int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process drops them, too
                if entry.is_file(follow_symlinks=False):
                    state = entry.stat(follow_symlinks=False)
                    written.append((state.st_mtime_ns, state.st_size, entry.path))
    return sorted(written)


def _drop_eldest(shard: str, max_bytes: int, max_files: int) -> None:
    """Remove the oldest files until at most ``max_bytes`` bytes and ``max_files`` files are left.

    Files that an earlier release has stored directly in the folder of the kind are removed too.
    """
    written = _files(shard)
    nbytes, files = sum(size for _, size, _ in written), len(written)
    removed = [path for _, _, path in _files(os.path.dirname(shard))]
    for _, size, path in written:
        if nbytes <= max_bytes and files <= max_files:
            break
        nbytes, files = nbytes - size, files - 1
        removed.append(path)
    for path in removed:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
