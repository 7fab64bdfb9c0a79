"""The record of a job: one line for each process whose program has come to its end, and what follows from them.

A process that a signal or ``os._exit`` ends writes none. The file is on this machine; processes of other hosts write
none either.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection
from pathlib import Path

from weftplan.support.program_end import End


def write(file: str, end: End) -> None:
    """Add the end of this process's program, in one write: others add theirs at the same time."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    line = json.dumps({"rank": rank, "status": end.status, "why": end.why, "shares": "mpi4py.MPI" in sys.modules})
    number = os.open(file, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(number, line.encode() + b"\n")
    finally:
        os.close(number)


class Record:
    """What the processes of a job have written, in the order in which they ended."""

    def __init__(self, file: Path) -> None:
        self._lines = [json.loads(line) for line in file.read_text().splitlines()]

    @property
    def status(self) -> int:
        """The status of the first program that failed; 0 if none has."""
        return next((int(line["status"]) for line in self._lines if line["status"]), 0)

    def failures(self, workers: int, stopped: Collection[int] | None) -> list[str]:
        """What ended badly, in words, the cause first.

        Args:
            workers: the number of processes.
            stopped: ranks that ran when the job was over; None if ranks without a line are not to be judged.
        """
        ends = [(line["rank"], line["why"]) for line in self._lines if line["status"]]
        ends.sort(key=lambda end: end[1].startswith("WorkerLostError"))  # it has heard of another one's end
        told = [f"rank {rank} ended by {why}" for rank, why in ends]
        if stopped is not None:
            silent = set(range(workers)) - {line["rank"] for line in self._lines} - set(stopped)
            told[:0] = [
                f"rank {rank} ended in the middle of its program, by a signal or os._exit" for rank in sorted(silent)
            ]
        return told

    def trained_alone(self, workers: int) -> bool:
        """Whether all of several processes came to their ends and none has created a store that they share."""
        ranks = {line["rank"] for line in self._lines}
        return workers > 1 and len(ranks) == workers and not any(line["shares"] for line in self._lines)
