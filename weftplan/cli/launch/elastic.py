"""The processes of ``weftplan launch --elastic``: started here, without mpiexec, and started again when one is lost.

The end of a process is judged as in every job (``record.py``): status 0 of a program that has come to its end is good,
every other end is a loss. A loss takes one of the job's restarts. If the others wait for it, the lost process alone is
started again, and joins (``kvstore/distributed/transport/elastic_job.py``); else all are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from weftplan.cli.launch.job_folder import job_folder
from weftplan.cli.launch.mpiexec import interpreted
from weftplan.cli.launch.record import Record, is_consequence, trained_alone
from weftplan.kvstore.distributed.transport.elastic_job import ElasticJob
from weftplan.support.program_end import End

_LOOK_S = 0.02
"""Seconds between two looks at the processes."""
_GRACE_S = 2.0
"""Seconds that processes have to exit after a signal."""


class Supervisor:
    """The processes of an elastic job.

    Args:
        workers: the number of processes.
        program: a Python program and its arguments.
        restarts: how many losses the job survives.
        tell: shows a line to the user.
    """

    def __init__(self, workers: int, program: tuple[str, ...], restarts: int, tell: Callable[[str], None]) -> None:
        self._workers, self._program, self._restarts, self._tell = workers, program, restarts, tell
        self._remaining = restarts
        self._records: dict[int, Path] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._signal = 0

    def run(self) -> int:
        """Run the job to its end; return its status.

        Raises:
            KVStoreError: this system has no sockets for the processes.
        """
        while True:
            with job_folder() as folder:
                try:
                    status = self._run_once(ElasticJob.create(folder, self._workers), folder)
                finally:
                    self._stop(self._signal or signal.SIGTERM)
                if status is not None:
                    return status

    def stop(self, number: int) -> None:
        """End the job as a signal asks; callable from a signal handler."""
        self._signal = number

    def _run_once(self, job: ElasticJob, folder: Path) -> int | None:
        """Return the status of the job; None if all processes are to start again."""
        for rank in range(self._workers):
            self._start(job, folder, rank, replaces=False)
        has_finished = False
        while self._processes:
            time.sleep(_LOOK_S)
            if self._signal:
                return 128 + self._signal
            for rank, end in self._ended():
                if not end.status:
                    has_finished = True
                    continue
                self._tell(f"rank {rank} ended by {end.why}")
                if not self._remaining:
                    return end.status
                self._remaining -= 1
                count = f"restart {self._restarts - self._remaining} of {self._restarts}"
                if is_consequence(end) or has_finished or not job.joinable:
                    self._tell(f"no process can join the others now, so all start again; {count}")
                    return None
                self._tell(f"rank {rank} starts again and joins the others; {count}")
                job.begin_generation()
                self._start(job, folder, rank, replaces=True)
        if self._workers > 1 and not job.shares:
            self._tell(trained_alone(self._workers))
        return 0

    def _start(self, job: ElasticJob, folder: Path, rank: int, *, replaces: bool) -> None:
        record = self._records[rank] = folder / f"end.{rank}.{job.generation}"
        record.touch()
        self._processes[rank] = subprocess.Popen(
            interpreted(self._program, str(record), recovers=False),
            env={**os.environ, **job.environment(rank, replaces=replaces)},
            stdin=subprocess.DEVNULL,
            process_group=0,
        )

    def _ended(self) -> list[tuple[int, End]]:
        """Return processes that have ended since the last look: good ends, causes, consequences."""
        ends = []
        for rank, process in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                del self._processes[rank]
                end = Record(self._records[rank]).end(rank, code)
                if end.status:
                    _signal_group(process, signal.SIGKILL)  # to its children
                ends.append((rank, end))
        return sorted(ends, key=lambda end: (bool(end[1].status), is_consequence(end[1])))

    def _stop(self, number: int) -> None:
        """End all processes."""
        begun = time.monotonic()
        while self._processes:
            for rank, process in list(self._processes.items()):
                ended = process.poll() is not None
                _signal_group(process, signal.SIGKILL if ended else number)
                if ended:
                    del self._processes[rank]
            time.sleep(_LOOK_S)
            if time.monotonic() - begun > _GRACE_S:
                number = signal.SIGKILL


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process and its children; those of an ended process may be left."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, number)
