"""The host as a device: NumPy memory, and streams that run work inline.

``cpu(i)``, and ``cpu_pinned(i)`` on a machine without a GPU, are separate contexts on the same memory. Each call
finishes its work before it returns, so events are always complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType

import numpy as np

from weftplan.device import host_memory
from weftplan.device.base import Event, Owner
from weftplan.device.context import Context
from weftplan.device.cost_model import CostModel
from weftplan.device.stream import NO_WORK, NoWork, pop_stream, push_stream
from weftplan.errors import OutOfMemoryError
from weftplan.support.array_types import RawArray

ALIGNMENT = 64
"""Alignment in bytes: the size of a cache line, and of an AVX-512 register."""


class HostEvent:
    """An event that is always complete."""

    __slots__ = ()

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return immediately."""


_COMPLETED = HostEvent()


class HostStream:
    """A stream that runs work inline, in the call that enqueues it."""

    __slots__ = ("context",)

    def __init__(self, context: Context) -> None:
        self.context = context

    def record(self) -> HostEvent:
        """Return a complete event."""
        return _COMPLETED

    def wait(self, event: Event) -> None:
        """Block until ``event``, which may belong to an asynchronous device, is complete."""
        event.synchronize()

    def synchronize(self) -> None:
        """Return immediately; no work is pending."""

    def finish(self) -> tuple[()]:
        """Return no faults: errors are raised by the call that does the work."""
        self.synchronize()
        return ()

    def clock(self) -> float:
        """Return the host's ``time.perf_counter()``."""
        return time.perf_counter()

    def work(self, owner: Callable[[], Owner]) -> NoWork:
        """Return a placeholder: errors are raised inline and need no attribution."""
        return NO_WORK

    def __enter__(self) -> HostStream:
        push_stream(self)
        return self

    def __exit__(self, *exc: object) -> None:
        pop_stream(self)


class NumpyDevice:
    """Host memory with NumPy: device of ``cpu(i)``, and of ``cpu_pinned(i)`` on a machine without a GPU."""

    alignment = ALIGNMENT
    asynchronous = False
    cost = CostModel()

    def __init__(self, context: Context) -> None:
        self.context = context
        self.xp: ModuleType = np

    def allocate(self, nbytes: int) -> RawArray:
        """Return ``nbytes`` > 0 undefined bytes, aligned to 64 bytes; raises OutOfMemoryError."""
        return aligned_empty(nbytes, self.context)

    def free(self, raw: RawArray) -> None:
        """Do nothing: NumPy frees the memory with its last view."""

    def memory_info(self) -> tuple[int, int]:
        """Return (available, total) bytes of physical memory, or of the container's limit if that is less."""
        return host_memory.memory_info()

    def new_stream(self, *, priority: int = 0) -> HostStream:
        """Return a stream that runs work inline; ``priority`` is ignored."""
        return HostStream(self.context)

    def launch(self, fn: Callable[[], object], modelled: float | None = 0.0) -> None:
        """Call ``fn`` inline."""
        fn()

    def copy(self, dst: RawArray, src: RawArray) -> None:
        """Copy ``src`` into ``dst`` before returning."""
        np.copyto(dst, src)

    def synchronize(self) -> None:
        """Return immediately; no work is pending."""

    def __repr__(self) -> str:
        return f"<NumpyDevice {self.context}>"


def aligned_empty(nbytes: int, context: Context) -> RawArray:
    """Return ``nbytes`` undefined bytes as a flat uint8 array, aligned to 64 bytes; raises OutOfMemoryError.

    ``context`` only names the device in the error.
    """
    try:
        padded = np.empty(nbytes + ALIGNMENT - 1, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: NumPy's limit on the size of an array
        raise OutOfMemoryError(f"{context}: the system refused {nbytes:,} bytes of host memory") from error
    start = -padded.__array_interface__["data"][0] % ALIGNMENT
    return padded[start : start + nbytes]
