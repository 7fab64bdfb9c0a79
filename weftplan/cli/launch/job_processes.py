"""The processes of an ``mpiexec`` job on this machine: finding them, and ending those that hang or are left.

Only Linux lists the environment of other processes, by which they are found. Elsewhere no process is found, and hung
ranks are ended through mpiexec.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from pathlib import Path

from weftplan import config
from weftplan.cli.launch.record import Record

_GRACE_S = 2.0
"""Seconds that a process has to exit after SIGTERM."""

_LATE_S = 10.0
"""Maximum seconds that a rank which the others gave up has to end by itself, once they have ended."""

_POLL_S = 0.05
"""Seconds between two polls of processes."""

_RANK = re.compile(rb"(?:^|\0)PMIX_RANK=(\d+)")


def find(mpiexec: int) -> dict[int, int]:
    """Return {process: rank} of a job on this machine, by the name that PMIx gives it (``prterun-HOST-NUMBER@1``)."""
    processes, name = {}, re.compile(rb"(?:^|\0)PMIX_NAMESPACE=[^\0]*-%d@" % mpiexec)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or exited meanwhile
            variables = (folder / "environ").read_bytes()
            if name.search(variables):
                rank = _RANK.search(variables)
                processes[int(folder.name)] = int(rank[1]) if rank else -1
    return processes


def end(mpiexec: int, ranks: Collection[int] | None = None) -> tuple[set[int], signal.Signals]:
    """End a job's processes on this machine, by SIGTERM and after a grace period by SIGKILL.

    Args:
        mpiexec: id of the process that has started them.
        ranks: the ranks to end; None for all.

    Returns:
        The ranks that were running, and the last signal.
    """

    def running() -> dict[int, int]:
        return {process: rank for process, rank in find(mpiexec).items() if ranks is None or rank in ranks}

    processes, begun, number = running(), time.monotonic(), signal.SIGTERM
    ended_ranks = set(processes.values())
    while processes and time.monotonic() - begun < 2 * _GRACE_S:
        if time.monotonic() - begun > _GRACE_S:
            number = signal.SIGKILL
        for process in processes:
            with contextlib.suppress(OSError):
                os.kill(process, number)
                os.kill(process, signal.SIGCONT)  # a stopped process handles SIGTERM only when it continues
        time.sleep(_POLL_S)
        processes = running()
    return ended_ranks, number


def wait(job: subprocess.Popen[bytes], file: Path, tell: Callable[[str], None]) -> tuple[int, set[int]]:
    """Wait until mpiexec exits, and end ranks that keep it waiting after a loss has ended all others.

    A rank that runs has :data:`_LATE_S` seconds if an ended rank has given it up, and else the time-out of exchanges.
    No rank is ended while one goes on that knows of the loss: it may have recovered.

    Args:
        job: the process of mpiexec.
        file: the job's record.
        tell: shows a line to the user.

    Returns:
        The status of mpiexec, and the ranks that were ended.
    """
    timeout_s = float(config.get("WEFTPLAN_KVSTORE_TIMEOUT"))
    since, ended = 0.0, set[int]()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return job.wait(0.5), ended
        record = Record(file)
        late = record.late - ended
        running = set(find(job.pid).values()) - record.ranks - ended if record.has_loss else set[int]()
        if not late | running or running & record.informed:
            since = 0.0
            continue
        since = since or time.monotonic()
        patience_s = min(_LATE_S, timeout_s) if running <= late else timeout_s
        if time.monotonic() - since < patience_s:  # it may find out by itself that the others have ended
            continue
        late |= running
        ranks, number = end(job.pid, late)
        if not ranks:  # they run on other hosts, or this system does not list processes
            job.terminate()
            number = signal.SIGTERM
        words = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, sorted(late)))}"
        tell(f"{words} did not answer, and the others have ended: ended by {number.name}")
        ended |= late
