"""The temporary folder of one job: removed at the job's end, or by the next job if its launcher was killed.

A launcher holds a lock on a file of its folder. The system releases the lock when the process exits for any reason, so
an unlocked file shows that the launcher has gone. On Windows, without these locks, such folders stay.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "weftplan-job-"
_LOCK = "launcher"


@contextlib.contextmanager
def job_folder() -> Iterator[Path]:
    """Yield a new folder and remove it after the ``with`` block; first remove the folders of killed launchers."""
    _remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        # Locked before it has its name: another launcher would take an unlocked file for that of a killed process.
        file = os.open(folder / f"{_LOCK}.new", os.O_CREAT | os.O_RDWR)
        try:
            _lock(file)
            (folder / f"{_LOCK}.new").rename(folder / _LOCK)
            yield folder
        finally:
            os.close(file)


def _remove_abandoned() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # of another user, or removed meanwhile
            file = os.open(path, os.O_RDWR)
            try:
                if _lock(file):
                    shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(file)


def _lock(file: int) -> bool:
    """Lock an open file until it is closed; return False if that is impossible, as while another process holds it."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
