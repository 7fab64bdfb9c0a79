"""The host as a device: NumPy memory, where every call returns finished work.

``cpu(i)`` and ``cpu_pinned(i)`` are separate contexts on the same memory. A stream of a CPU runs everything at once, so
its events are born complete.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np

from weftplan.device import host_memory
from weftplan.device.base import Event, Owner
from weftplan.device.context import Context
from weftplan.device.stream import NO_WORK, NoWork, pop_stream, push_stream
from weftplan.errors import OutOfMemoryError
from weftplan.support.array_types import RawArray

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register of today's CPUs."""


class HostEvent:
    """A point in work that has run already."""

    __slots__ = ()

    def query(self) -> bool:
        """Always True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


_DONE = HostEvent()


class HostStream:
    """A stream whose work runs inside the call that enqueues it."""

    __slots__ = ("context",)

    def __init__(self, context: Context) -> None:
        self.context = context

    def record(self) -> HostEvent:
        """An event that is complete."""
        return _DONE

    def wait(self, event: Event) -> None:
        """Block until ``event`` (possibly of an asynchronous device) is complete."""
        event.synchronize()

    def synchronize(self) -> None:
        """Return at once."""

    def finish(self) -> tuple[()]:
        """As :meth:`synchronize`; there are no faults."""
        self.synchronize()
        return ()

    def work(self, owner: Callable[[], Owner]) -> NoWork:
        """Nothing is noted of an operation: its errors come at once."""
        return NO_WORK

    def __enter__(self) -> HostStream:
        push_stream(self)
        return self

    def __exit__(self, *exc: object) -> None:
        pop_stream(self)


class NumpyDevice:
    """Host memory with NumPy; also ``cpu_pinned`` if there is no GPU to pin memory for."""

    alignment = ALIGNMENT
    asynchronous = False

    def __init__(self, context: Context) -> None:
        self.context = context
        self.xp: ModuleType = np

    def allocate(self, nbytes: int) -> RawArray:
        """``nbytes`` > 0 undefined bytes whose address is a multiple of 64; raises OutOfMemoryError."""
        return aligned_empty(nbytes, self.context)

    def free(self, raw: RawArray) -> None:
        """Nothing to do: the memory goes when the last view of it does."""

    def memory_info(self) -> tuple[int, int]:
        """Return (available, total) bytes of physical memory, or of the container's share of it if that is less."""
        return host_memory.memory_info()

    def new_stream(self, *, priority: int = 0) -> HostStream:
        """Return a stream that runs everything at once; ``priority`` changes nothing."""
        return HostStream(self.context)

    def launch(self, fn: Callable[[], object]) -> None:
        """Call ``fn`` now."""
        fn()

    def copy(self, dst: RawArray, src: RawArray) -> None:
        """Copy ``src`` into ``dst`` before returning."""
        np.copyto(dst, src)

    def synchronize(self) -> None:
        """Return at once."""

    def __repr__(self) -> str:
        return f"<NumpyDevice {self.context}>"


def aligned_empty(nbytes: int, context: Context) -> RawArray:
    """Return a flat uint8 array of undefined bytes, 64-byte aligned; raises OutOfMemoryError naming ``context``."""
    try:
        whole = np.empty(nbytes + ALIGNMENT - 1, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more than an address can count
        raise OutOfMemoryError(f"{context}: the system refused {nbytes:,} bytes of host memory") from error
    start = -whole.__array_interface__["data"][0] % ALIGNMENT
    return whole[start : start + nbytes]
