"""Files as a device: ``file(i)`` is memory that the system keeps in a file, for offloaded bytes.

Raw memory is a mapping of a file without a name: the file is unlinked, or never linked, as soon as it is open. So it
goes when its last mapping does, whatever ends the process, and a folder that vanishes takes nothing with it that is in
it already. Where a system cannot open files without names, a kill between two calls can leave an empty one; the next
device in that folder removes it. All bytes are reserved when a file is made, so a disk that is full refuses then, and
never in the middle of a copy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil

import numpy as np

from weftplan.device.context import Context
from weftplan.device.numpy_device import NumpyDevice
from weftplan.errors import DeviceError, OutOfMemoryError
from weftplan.locks import Lock, whole_in_children
from weftplan.support.array_types import RawArray

_PREFIX = ".weftplan-spill-"
_ZEROS = bytes(1 << 20)


class FileDevice(NumpyDevice):
    """Memory in files of one folder.

    Args:
        context: its name.
        folder: the folder of the files.
        limit: most bytes at once; None: the disk's free bytes.

    Raises:
        DeviceError: the folder does not exist or cannot be written.
    """

    alignment = mmap.PAGESIZE

    def __init__(self, context: Context, folder: str, limit: int | None = None) -> None:
        super().__init__(context)
        self.folder = folder
        self.limit = limit
        self.used = 0
        """Bytes in files."""
        self._lock = whole_in_children(Lock())
        self._remove_left_over()
        try:
            os.close(self._open())
        except OSError as error:
            raise DeviceError(
                f"{context}: no file can be made in {folder!r} ({error.strerror}): name a folder in WEFTPLAN_SPILL "
                f"that exists and may be written"
            ) from error

    def _remove_left_over(self) -> None:
        """Remove files of killed processes. Open files need no name."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                if name.startswith(_PREFIX):
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(self.folder, name))

    def _open(self) -> int:
        """Return a new file without a name, or with one that goes with its last handle (Windows)."""
        flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_TEMPORARY", 0)
        if hasattr(os, "O_TMPFILE"):
            with contextlib.suppress(IsADirectoryError, NotImplementedError):
                return os.open(self.folder, flags | os.O_TMPFILE, 0o600)
        path = os.path.join(self.folder, f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
        handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        if not hasattr(os, "O_TEMPORARY"):
            with contextlib.suppress(FileNotFoundError):  # the next device has been quicker
                os.unlink(path)
        return handle

    def allocate(self, nbytes: int) -> RawArray:
        """``nbytes`` > 0 bytes of a new file; raises OutOfMemoryError beyond the limit, or if disk or folder refuse."""
        with self._lock:
            if self.limit is not None and self.used + nbytes > self.limit:
                raise OutOfMemoryError(
                    f"{self.context}: {nbytes:,} bytes requested, {self.limit - self.used:,} of the {self.limit:,} "
                    f"that WEFTPLAN_SPILL allows in {self.folder!r} are left"
                )
            self.used += nbytes
        try:
            return self._mapped(nbytes)
        except BaseException as error:
            with self._lock:
                self.used -= nbytes
            if not isinstance(error, OSError | ValueError | OverflowError):
                raise
            raise OutOfMemoryError(
                f"{self.context}: {nbytes:,} bytes in {self.folder!r} were refused: {error}"
            ) from error

    def _mapped(self, nbytes: int) -> RawArray:
        handle = self._open()
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, nbytes)
            else:
                left = nbytes
                while left:
                    left -= os.write(handle, _ZEROS[:left])
            return np.frombuffer(mmap.mmap(handle, nbytes), np.uint8)
        finally:
            os.close(handle)

    def free(self, raw: RawArray) -> None:
        """The file goes when the last view of it does."""
        with self._lock:
            self.used -= raw.nbytes

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of the disk, or of the limit if that is less."""
        try:
            total, _, free = shutil.disk_usage(self.folder)
        except OSError:  # the folder has vanished
            return 0, self.used
        if self.limit is None:
            return free, total
        return min(free, max(self.limit - self.used, 0)), min(total, self.limit)

    def __repr__(self) -> str:
        return f"<FileDevice {self.context} in {self.folder!r}>"
