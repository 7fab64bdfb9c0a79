"""Files as a device: memory of ``file(i)`` is mapped from files in a folder, for offloaded arrays.

Each allocation maps a file without a name (opened with ``O_TMPFILE``, or unlinked right after opening). The system
deletes the file with its last mapping, even if the process is killed. If the system has no ``O_TMPFILE``, a kill
between opening and unlinking leaves an empty file, which the next device in that folder removes.

All bytes are reserved on disk at allocation, so a full disk fails the allocation and never a later copy.
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
from weftplan.locks import Lock, consistent_in_children
from weftplan.support.array_types import RawArray

_PREFIX = ".weftplan-spill-"
_ZEROS = bytes(1 << 20)


class FileDevice(NumpyDevice):
    """A device whose memory is mapped from files in one folder.

    Args:
        context: the device's context.
        folder: folder of the files.
        limit: greatest number of bytes in use; None for no limit besides the disk's.

    Raises:
        DeviceError: no file can be created in the folder.
    """

    alignment = mmap.PAGESIZE

    def __init__(self, context: Context, folder: str, limit: int | None = None) -> None:
        super().__init__(context)
        self.folder = folder
        self.limit = limit
        self.used = 0
        """Bytes in use."""
        self._lock = consistent_in_children(Lock())  # guards `used`: test and increase are one step
        self._remove_stale()
        try:
            os.close(self._open())
        except OSError as error:
            raise DeviceError(
                f"{context}: no file can be made in {folder!r} ({error.strerror}): name a folder in WEFTPLAN_SPILL "
                f"that exists and may be written"
            ) from error

    def _remove_stale(self) -> None:
        """Remove named files in the folder: killed processes left them, and files in use work without a name."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                if name.startswith(_PREFIX):
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(self.folder, name))

    def _open(self) -> int:
        """Return the descriptor of a new file without a name; on Windows, of a file deleted with its last handle."""
        flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_TEMPORARY", 0)
        if hasattr(os, "O_TMPFILE"):
            with contextlib.suppress(IsADirectoryError, NotImplementedError):
                return os.open(self.folder, flags | os.O_TMPFILE, 0o600)
        path = os.path.join(self.folder, f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
        handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        if not hasattr(os, "O_TEMPORARY"):
            with contextlib.suppress(FileNotFoundError):  # another device's _remove_stale removed it first
                os.unlink(path)
        return handle

    def allocate(self, nbytes: int) -> RawArray:
        """Return ``nbytes`` > 0 bytes, mapped from a new file.

        Raises:
            OutOfMemoryError: beyond the limit, or the system cannot create a file of that size in the folder.
        """
        with self._lock:
            if self.limit is not None and self.used + nbytes > self.limit:
                raise OutOfMemoryError(
                    f"{self.context}: {nbytes:,} bytes requested, {self.limit - self.used:,} of the {self.limit:,} "
                    f"that WEFTPLAN_SPILL allows in {self.folder!r} are left"
                )
            self.used += nbytes
        try:
            return self._map_new_file(nbytes)
        except BaseException as error:
            with self._lock:
                self.used -= nbytes
            if not isinstance(error, OSError | ValueError | OverflowError):
                raise
            raise OutOfMemoryError(
                f"{self.context}: {nbytes:,} bytes in {self.folder!r} were refused: {error}"
            ) from error

    def _map_new_file(self, nbytes: int) -> RawArray:
        handle = self._open()
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, nbytes)
            else:
                remaining = nbytes
                while remaining:
                    remaining -= os.write(handle, _ZEROS[:remaining])
            return np.frombuffer(mmap.mmap(handle, nbytes), np.uint8)
        finally:
            os.close(handle)

    def free(self, raw: RawArray) -> None:
        """Subtract the bytes from :attr:`used`; the system deletes the file when the last view is gone."""
        with self._lock:
            self.used -= raw.nbytes

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of the disk, or of the limit if that is less; no free bytes without the folder."""
        try:
            total, _, free = shutil.disk_usage(self.folder)
        except OSError:  # the folder was removed
            return 0, self.used
        if self.limit is None:
            return free, total
        return min(free, max(self.limit - self.used, 0)), min(total, self.limit)

    def __repr__(self) -> str:
        return f"<FileDevice {self.context} in {self.folder!r}>"
