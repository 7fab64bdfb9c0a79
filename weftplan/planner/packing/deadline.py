"""A moment in time at which packing stops, wherever it is.

Searches look at it between steps. It is read only, so several threads may share one, but a plan that is to be the
same every time must not have one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


class OutOfTime(Exception):
    """The time limit is over. Never leaves `pack`, which returns the best packing so far."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """Asked in every loop that can take long."""

    moment: float | None = None
    """Of `time.perf_counter`; None: never."""

    def over(self) -> bool:
        """Whether the moment has come."""
        return self.moment is not None and time.perf_counter() >= self.moment

    def check(self) -> None:
        """Raise `OutOfTime` once the moment has come."""
        if self.over():
            raise OutOfTime

    def left(self) -> float:
        """Seconds that are left; only where there is a moment."""
        assert self.moment is not None
        return self.moment - time.perf_counter()


ENDLESS = Deadline()
