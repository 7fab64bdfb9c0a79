"""Control groups of this process, with which containers limit memory and CPUs (Linux, versions 1 and 2)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
ROOT = Path("/sys/fs/cgroup")


def folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each group that may limit ``controller``, and whether the group is of version 2.

    A group comes before its parents, whose limits hold for it, too.
    """
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:  # not Linux, or not visible
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        version_2 = number == "0" and not controllers
        if not version_2 and controller not in controllers.split(","):
            continue
        root = ROOT if version_2 else ROOT / controller
        # Inside a container the path may be the machine's, and only the root be there.
        for folder in (PurePosixPath(path), *PurePosixPath(path).parents):
            yield root / str(folder).lstrip("/"), version_2


@functools.cache
def cpu_quota() -> int | None:
    """Return the number of CPUs whose time this process may use, rounded up; None without a limit. Read once."""
    quotas = [quota for group in folders("cpu") if (quota := _quota(*group)) is not None]
    return min(quotas, default=None)


def _quota(folder: Path, version_2: bool) -> int | None:
    """Return the quota of a group: microseconds of CPU time for each period, in CPUs."""
    try:
        if version_2:
            allowed, period = (folder / "cpu.max").read_text().split()
        else:
            allowed, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        if not allowed.isdecimal():  # "max", or -1
            return None
        return max(1, -(-int(allowed) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        return None
