"""Counters of the stand-in: launches, host synchronisations, copies from the host, CuPy's own allocations."""

from __future__ import annotations

import threading
from collections import Counter


class _Thread(threading.local):
    capturing = False
    silent = False


class Meter:
    """Counts since the last :meth:`reset`; one object, :data:`meter`, serves all devices and threads.

    Increments are not atomic. A test that compares exact numbers must run its work on one thread.
    """

    def __init__(self) -> None:
        self._dry = False
        self.thread = _Thread()
        self.reset()

    @property
    def dry(self) -> bool:
        """Whether calls are checked and counted but not computed; for large networks whose values no test reads.

        Work captured as a graph is not computed either.
        """
        return self._dry or self.thread.capturing

    @dry.setter
    def dry(self, value: bool) -> None:
        self._dry = value

    def reset(self) -> None:
        """Set all counters to zero."""
        self.launches: Counter[str] = Counter()
        """Kernels, memory copies on the device, fills and library calls, by name."""
        self.syncs: Counter[str] = Counter()
        """Calls that made the host wait for the device, by name."""
        self.uploads: Counter[str] = Counter()
        """Copies from host memory, except by ``set``, by name."""
        self.atomics: Counter[str] = Counter()
        """Kernels with atomic operations on floats, by name; their order, hence their bits, may vary."""
        self.compiled: Counter[str] = Counter()
        """Raw kernels whose source was parsed, by name."""
        self.temporaries = 0
        """Number of arrays that CuPy allocated from its own pool."""
        self.temporary_bytes = 0
        self.frees = 0
        """Number of calls of ``cudaFree``; each waits for the whole device."""

    @property
    def total(self) -> int:
        """Number of launches of all kinds."""
        return sum(self.launches.values())

    def launch(self, name: str, count: int = 1) -> None:
        """Count a launch; captured kernels do not count, and a graph counts once."""
        if not self.thread.silent:
            self.launches[name] += count


meter = Meter()
