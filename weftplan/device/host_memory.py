"""Available memory of the machine, or of the control groups (containers) of this process if they have less."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from weftplan.device import windows_memory
from weftplan.support import control_groups

Group = tuple[Path, tuple[str, str], str]
"""A control group's folder, the names of its files for limit and usage, and the ``memory.stat`` field of page cache."""
_UNLIMITED = 1 << 62
"""Figures from here on mean that there is no limit: version 1 writes a number near 2**63."""
_CACHE_S = 5.0
"""Seconds for which the groups with a limit are cached; limits change seldom."""


class _Limits:
    """Cache of the control groups that have a limit. Memory pools query memory often, and most groups have no limit."""

    def __init__(self) -> None:
        # Replaced as a whole, never mutated: threads read it without a lock.
        self.cached: tuple[float, list[Group]] = (0.0, [])
        """(``time.monotonic()`` at which the cache expires, the groups)."""


_limits = _Limits()


def memory_info() -> tuple[int, int]:
    """Return (available, total) bytes of memory for this process; reclaimable page cache counts as available.

    Both figures are the smallest of the machine's and those of each control group of this process (version 1 or 2,
    parents included), because the kernel kills a process that exceeds a group's limit. On systems that do not report
    available memory (macOS), all memory except this process's counts as available.
    """
    available, total = _machine()
    for group in _groups_with_limits():
        figures = _figures(*group)
        if figures is not None:
            total, available = min(total, figures[0]), min(available, figures[1])
    return max(available, 0), total


def resident() -> int:
    """Return the resident bytes of this process; its peak if the system does not report the current value."""
    if not hasattr(os, "sysconf"):
        return windows_memory.resident()
    try:
        with open(control_groups.PROC / "self" / "statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource  # Windows has no such module

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def _groups_with_limits() -> list[Group]:
    until, groups = _limits.cached
    time_s = time.monotonic()
    if time_s >= until:
        groups = [group for group in _groups() if _figures(*group) is not None]
        _limits.cached = (time_s + _CACHE_S, groups)
    return groups


def _machine() -> tuple[int, int]:
    if not hasattr(os, "sysconf"):
        return windows_memory.machine()
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    try:
        with open(control_groups.PROC / "meminfo", "rb") as file:
            for line in file:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024, total
    except OSError:
        pass
    if "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * page, total
    return total - resident(), total


def _groups() -> Iterator[Group]:
    """Yield each memory control group of this process, and its parents."""
    for folder, version_2 in control_groups.folders("memory"):
        if version_2:
            yield folder, ("memory.max", "memory.current"), "inactive_file"
        else:
            yield folder, ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"


def _figures(folder: Path, files: tuple[str, str], cache: str) -> tuple[int, int] | None:
    """Return (limit, bytes left) of one group; None if it has no limit or its files cannot be read."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in files)
        if not limit.isdecimal() or int(limit) >= _UNLIMITED:  # "max"
            return None
        held = int(used)
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == cache:
                held -= int(value)
    except (OSError, ValueError):
        return None
    return int(limit), int(limit) - held
