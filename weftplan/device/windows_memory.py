"""Memory figures from the Windows library kernel32, for ``host_memory.py``."""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any


class _Machine(ctypes.Structure):
    """The structure MEMORYSTATUSEX of the Windows API."""

    _fields_ = [
        ("nbytes", c_uint32),
        ("load", c_uint32),
        ("total", c_uint64),
        ("available", c_uint64),
        ("page_files_and_addresses", c_uint64 * 5),
    ]


class _Process(ctypes.Structure):
    """The structure PROCESS_MEMORY_COUNTERS of the Windows API."""

    _fields_ = [
        ("nbytes", c_uint32),
        ("page_faults", c_uint32),
        ("peak_resident", c_size_t),
        ("resident", c_size_t),
        ("pools_and_page_files", c_size_t * 6),
    ]


def machine() -> tuple[int, int]:
    """Return (available, total) bytes of the machine's physical memory.

    Raises:
        OSError: the call to Windows failed.
    """
    status = _Machine(nbytes=ctypes.sizeof(_Machine))
    _check_answer(_kernel32().GlobalMemoryStatusEx(ctypes.byref(status)), "the machine's memory")
    return int(status.available), int(status.total)


def resident() -> int:
    """Return the resident bytes of this process.

    Raises:
        OSError: the call to Windows failed.
    """
    counters = _Process(nbytes=ctypes.sizeof(_Process))
    library = _kernel32()
    library.GetCurrentProcess.restype = c_void_p  # the pseudo handle -1
    library.K32GetProcessMemoryInfo.argtypes = [c_void_p, c_void_p, c_uint32]
    process = library.GetCurrentProcess()
    _check_answer(
        library.K32GetProcessMemoryInfo(process, ctypes.byref(counters), counters.nbytes), "the memory of this process"
    )
    return int(counters.resident)


def _kernel32() -> Any:
    """Load kernel32 for this call only, so that setting its ``restype`` and ``argtypes`` affects no other code."""
    windows: Any = ctypes  # type checkers on other systems know no WinDLL
    return windows.WinDLL("kernel32")


def _check_answer(answer: int, what: str) -> None:
    if not answer:
        raise OSError(f"Windows does not tell {what}")
