"""Shared-memory segment of batch slots: workers fill them, the owner process reads them.

No segment stays in /dev/shm, even if processes are killed. The owner unlinks the name as soon as all workers have
mapped the segment; after that the kernel frees the memory when the last process unmaps it. If the owner and its
resource tracker are killed before the unlink, the name stays. It contains the owner's process ID, start time and PID
namespace. The next process that creates a segment removes the names of dead processes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from weftplan.data.input.layout import BatchLayout, Host
from weftplan.errors import OutOfMemoryError

_FOLDER = Path("/dev/shm")
_NAME = re.compile(r"weftplan-(\d+)-(\d+)-(\d+)-\d+")
_counter = itertools.count()


class Slots:
    """Segment of shared memory, divided into a slot per batch.

    Args:
        layout: layout of a batch.
        count: number of slots.
        name: name of an existing segment; None creates a segment.

    Raises:
        OutOfMemoryError: the system has no memory for it.
    """

    def __init__(self, layout: BatchLayout, count: int, name: str | None = None) -> None:
        self._layout = layout
        self._nbytes = max(1, layout.nbytes)
        self._named = name is None
        if name is None:
            _let_go()
            sweep()
            self._memory = _make(self._nbytes * count)
        else:
            self._memory = SharedMemory(name)
        buffer: Any = self._memory.buf
        self.views: list[list[Host]] = [
            layout.views(buffer[i * self._nbytes : (i + 1) * self._nbytes]) for i in range(count)
        ]

    @property
    def name(self) -> str:
        """Name under which other processes open the segment; invalid after :meth:`unname`."""
        return self._memory.name

    def unname(self) -> None:
        """Unlink the name: existing mappings stay valid, and no further process can open the segment."""
        if self._named:
            self._named = False
            self._memory.unlink()

    def close(self) -> None:
        """Release the memory. If a view of a slot is still alive (in a traceback, say), unmapping is deferred."""
        self.unname()
        self.views = []
        _lingering.append(self._memory)
        _let_go()


_lingering: list[SharedMemory] = []
"""Closed segments that could not be unmapped yet because a view of them may still be alive."""


def _let_go() -> None:
    for memory in [*_lingering]:
        with contextlib.suppress(BufferError, ValueError):  # a view is alive; or another thread has closed it
            memory.close()
            _lingering.remove(memory)


def _make(nbytes: int) -> SharedMemory:
    while True:
        name = f"weftplan-{_space()}-{os.getpid()}-{_started(os.getpid())}-{next(_counter)}"
        try:
            memory = SharedMemory(name, create=True, size=nbytes)
        except FileExistsError:  # left by an earlier process with the same ID and start time
            continue
        except OSError as error:
            raise OutOfMemoryError(
                f"there is no shared memory for {nbytes:,} bytes of batches ({error}): make batches smaller, use fewer "
                f"workers, or give /dev/shm more room"
            ) from error
        try:
            _reserve(memory, nbytes)
        except OSError as error:
            memory.close()
            memory.unlink()
            raise OutOfMemoryError(
                f"/dev/shm has no room for {nbytes:,} bytes of batches ({error}): make batches smaller, use fewer "
                f"workers, or give it more room"
            ) from error
        return memory


def _reserve(memory: Any, nbytes: int) -> None:
    """Allocate the pages now: later, writing to a full /dev/shm would kill the process with SIGBUS."""
    if hasattr(os, "posix_fallocate") and getattr(memory, "_fd", -1) >= 0:
        os.posix_fallocate(memory._fd, 0, nbytes)


def sweep(folder: Path = _FOLDER) -> list[str]:
    """Remove the segments of dead processes; returns their names."""
    removed = []
    try:
        names = os.listdir(folder)
    except OSError:  # a system without /dev/shm, which frees segments with their last user
        return []
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None:
            continue
        space, pid, started = map(int, match.groups())
        if space == _space() and _started(pid) != started:
            try:
                os.unlink(folder / name)
            except OSError:  # removed by another process, or owned by another user
                continue
            removed.append(name)
    return removed


def _space() -> int:
    """Return this process's PID namespace; the liveness of processes in other namespaces is unknown."""
    try:
        return int(re.sub(r"\D", "", os.readlink("/proc/self/ns/pid")) or 0)
    except OSError:
        return 0


def _started(pid: int) -> int:
    """Return a process's start time in clock ticks since boot; -1 if it is dead or unreadable."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    fields = text[text.rindex(")") + 2 :].split()
    return -1 if fields[0] in "ZX" else int(fields[19])
