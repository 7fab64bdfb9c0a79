"""Counters of the stand-in: launches, host synchronisations, copies from the host, CuPy's own allocations."""

from __future__ import annotations

import threading
from collections import Counter


class _Thread(threading.local):
    capturing = False
    silent = False


class Meter:
    """Counts since the last :meth:`reset`; one object, :data:`meter`, serves all devices and threads.

    Counts are made under the interpreter's lock, one ``+=`` at a time; a test that compares exact figures runs its work
    on one thread.
    """

    def __init__(self) -> None:
        self._dry = False
        self.thread = _Thread()
        self.reset()

    @property
    def dry(self) -> bool:
        """True: everything is checked and counted, nothing is computed. For large networks, whose values no test reads.

        Work captured as a graph is not computed either.
        """
        return self._dry or self.thread.capturing

    @dry.setter
    def dry(self, value: bool) -> None:
        self._dry = value

    def reset(self) -> None:
        """Start again from nothing."""
        self.launches: Counter[str] = Counter()
        """Kernels, memory copies on the device, fills and library calls, by name."""
        self.syncs: Counter[str] = Counter()
        """Calls that made the host wait for the device."""
        self.uploads: Counter[str] = Counter()
        """Copies from host memory, ``set`` excepted."""
        self.atomics: Counter[str] = Counter()
        """Kernels that add or compare with atomic operations on floats: their order, hence their bits, vary."""
        self.compiled: Counter[str] = Counter()
        """Raw kernels whose source was read."""
        self.temporaries = 0
        """Arrays that CuPy allocated by itself, from its own pool."""
        self.temporary_bytes = 0
        self.frees = 0
        """Calls of ``cudaFree``; each waits for the whole device."""

    @property
    def total(self) -> int:
        """Launches of all kinds."""
        return sum(self.launches.values())

    def launch(self, name: str, count: int = 1) -> None:
        """Count a launch; captured kernels do not count, and a graph counts once."""
        if not self.thread.silent:
            self.launches[name] += count


meter = Meter()
