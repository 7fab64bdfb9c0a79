"""The record of a job: one line for each finished program, one for each that knows of a loss, and the job's status.

A process killed by a signal or ended by ``os._exit`` writes no line. The file is on this machine; processes of other
hosts write none either.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path

from weftplan.support import program_end
from weftplan.support.program_end import End


def write(file: str, end: End) -> None:
    """Append the exit of this process's program in one write, because other processes append theirs concurrently."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    shares, late = "mpi4py.MPI" in sys.modules, sorted(program_end.given_up)
    line = json.dumps({"rank": rank, "status": end.status, "why": end.why, "shares": shares, "late": late})
    _append(file, line)


def note_loss(file: str) -> None:
    """Append that this process knows of the loss of another one, and may go on without it."""
    _append(file, json.dumps({"informed": int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))}))


def _append(file: str, line: str) -> None:
    number = os.open(file, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(number, line.encode() + b"\n")
    finally:
        os.close(number)


def is_consequence(end: End) -> bool:
    """Return whether a process failed because another one was lost."""
    return end.why.startswith("WorkerLostError")


def trained_alone(workers: int) -> str:
    """Return the line for a job whose processes have shared nothing."""
    return (
        f"no process has created a store of several processes, so each of the {workers} has done all of the work "
        f"alone: create the store 'dist_sync' (--kvstore dist_sync)"
    )


class Record:
    """The lines that the processes of a job have written, in order of exit."""

    def __init__(self, file: Path) -> None:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        self._lines = [line for line in lines if "rank" in line]
        self.informed = {line["informed"] for line in lines if "informed" in line}
        """Ranks that know of a loss."""

    @property
    def ranks(self) -> set[int]:
        """The ranks whose programs have ended by themselves."""
        return {line["rank"] for line in self._lines}

    @property
    def late(self) -> set[int]:
        """The ranks for which an ended rank has waited in vain, and of which nothing was heard since."""
        return {rank for line in self._lines for rank in line["late"]} - self.ranks - self.informed

    @property
    def has_loss(self) -> bool:
        """Whether the loss of a rank has ended another one."""
        return any(line["why"].startswith("WorkerLostError") for line in self._lines)

    @property
    def status(self) -> int:
        """Return the status of the first program that failed; 0 if none has."""
        return next((int(line["status"]) for line in self._lines if line["status"]), 0)

    def failures(self, workers: int, stopped: Collection[int] | None) -> list[str]:
        """Return the failures in words, the cause first.

        Args:
            workers: the number of processes.
            stopped: ranks that still ran at the end of the job; None if ranks without a line are not failures.
        """
        ends = [(line["rank"], End(line["status"], line["why"])) for line in self._lines if line["status"]]
        ends.sort(key=lambda end: is_consequence(end[1]))
        reports = [f"rank {rank} ended by {end.why}" for rank, end in ends]
        # If a program fails before it has started MPI, mpiexec ends the others, which are then silent.
        ends_all = any(line["status"] and not line["shares"] for line in self._lines)
        if stopped is not None and not ends_all:
            silent = set(range(workers)) - self.ranks - set(stopped)
            reports[:0] = [
                f"rank {rank} ended in the middle of its program, by a signal or os._exit" for rank in sorted(silent)
            ]
        return reports

    def end(self, rank: int, code: int) -> End:
        """Return the end of a process, whose status or negated signal is ``code``."""
        for line in self._lines:
            if line["rank"] == rank and (line["status"] or not code):
                return End(line["status"], line["why"])
        if code < 0:
            return End(128 - code, f"the signal {signal.Signals(-code).name}")
        return End(code or 1, f"os._exit({code})")

    def trained_alone(self, workers: int) -> bool:
        """Return whether all of several processes finished and none has created a shared store."""
        return workers > 1 and len(self.ranks) == workers and not any(line["shares"] for line in self._lines)
