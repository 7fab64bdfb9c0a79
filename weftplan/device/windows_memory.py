"""Memory as Windows tells it: two questions to its library kernel32, which ``host_memory.py`` asks there."""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any


class _Machine(ctypes.Structure):
    """MEMORYSTATUSEX."""

    _fields_ = [
        ("nbytes", c_uint32),
        ("load", c_uint32),
        ("total", c_uint64),
        ("available", c_uint64),
        ("page_files_and_addresses", c_uint64 * 5),
    ]


class _Process(ctypes.Structure):
    """PROCESS_MEMORY_COUNTERS."""

    _fields_ = [
        ("nbytes", c_uint32),
        ("page_faults", c_uint32),
        ("peak_resident", c_size_t),
        ("resident", c_size_t),
        ("pools_and_page_files", c_size_t * 6),
    ]


def machine() -> tuple[int, int]:
    """Return (available, total) bytes of the machine.

    Raises:
        OSError: Windows does not say.
    """
    status = _Machine(nbytes=ctypes.sizeof(_Machine))
    _told(_kernel32().GlobalMemoryStatusEx(ctypes.byref(status)), "the machine's memory")
    return int(status.available), int(status.total)


def resident() -> int:
    """Return the bytes of this process that are in memory now.

    Raises:
        OSError: Windows does not say.
    """
    counters = _Process(nbytes=ctypes.sizeof(_Process))
    library = _kernel32()
    library.GetCurrentProcess.restype = c_void_p  # -1, which means this process
    library.K32GetProcessMemoryInfo.argtypes = [c_void_p, c_void_p, c_uint32]
    process = library.GetCurrentProcess()
    _told(
        library.K32GetProcessMemoryInfo(process, ctypes.byref(counters), counters.nbytes), "the memory of this process"
    )
    return int(counters.resident)


def _kernel32() -> Any:
    """Return a private handle of the library, whose declarations no other code changes."""
    windows: Any = ctypes  # which has WinDLL only there
    return windows.WinDLL("kernel32")


def _told(answer: int, what: str) -> None:
    if not answer:
        raise OSError(f"Windows does not tell {what}")
