"""The state of the simulated machine: devices, memory, each thread's current device and streams, errors."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.standin_cupy.memory import Memory
    from tests.standin_cupy.streams import Stream

DEVICES = 4
ALIGNMENT = 512


class CUDARuntimeError(RuntimeError):
    """An exception with an error code of CUDA's runtime."""


class OutOfMemoryError(MemoryError):
    """The exception that CuPy's allocators raise if memory is exhausted."""


class StreamRaceError(AssertionError):
    """An error for two streams that access the same bytes, at least one of them to write, without an order."""


Clock = dict[int, int]
"""Number of completed pieces of work, by stream key."""

lock = threading.RLock()
ids = itertools.count(1)


class BlasHandle:
    """A cuBLAS handle of one thread and one device, with its own workspaces."""

    def __init__(self, device: int) -> None:
        self.thread, self.device = threading.get_ident(), device
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        self.fixed = config in (":4096:8", ":16:8")
        self.workspace = {":4096:8": 32 << 20, ":16:8": 128 << 10}.get(config, 32 << 20)
        self.streams: set[int] = set()


class Machine:
    """The state of all devices: capacity, bytes in use, and what the host has waited for."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset to empty devices of 80 GiB."""
        self.capacity = [80 << 30] * DEVICES
        self.used = [0] * DEVICES
        self.era = object()
        """Identity of this stand-in. Streams, events and memory of an earlier one may outlive it: they count nothing,
        know of no error, and free nothing here."""
        self.host: Clock = {}
        self.sticky: str | None = None
        """The text of an error that every later call repeats, as after an illegal address; None without an error."""
        self.libraries_missing = False
        """Whether cuBLAS, cuRAND and NVRTC cannot be loaded, as on a machine with a driver only."""
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.null_streams: dict[int, Stream] = {}
        """The default stream of each device that has been asked for it."""
        self.memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        self.peers: set[tuple[int, int]] = set()
        """Device pairs whose peer access is enabled."""
        self.apart: set[tuple[int, int]] = set()
        """Device pairs without peer access."""
        self.corrupt: set[tuple[int, int]] = set()
        """Device pairs whose direct copies change bytes."""
        self.pinned: dict[int, int] = {}
        self.compute_types: dict[str, str] = {}
        """The explicitly set precision of cuBLAS products, by dtype."""
        self.math_mode = 0
        """cuBLAS's math mode: 3 lets float32 products round to TF32."""
        self.rates: dict[str, float] = {}
        """Bytes per millisecond, by kind of copy; a copy without a rate takes no time."""
        self.clock = 0.0
        """Milliseconds taken by work with known times; events record it."""
        self.faulty: dict[str, str] = {}
        """The sticky error of the next launch, by kernel name.

        The launch itself succeeds. The error is raised when the host next waits, and by every later call.
        """
        self.pending: str | None = None
        """The text of an error that no call has raised yet; None without an error."""
        self.pointers: list[int] = []
        """Handles of destroyed streams; new streams reuse them first, as in CUDA."""
        self.frees: deque[Clock] = deque()
        """Clocks that the host reached inside ``cudaFree``, which waits for the whole device.

        Finalizers append to it.
        """
        self.handles: dict[int, BlasHandle] = {}
        """cuBLAS handles by number."""
        self.unreproducible: set[str] = set()
        """Products whose bits may differ from run to run.

        Their handle has run on several streams, and its workspaces had no fixed size.
        """

    def library(self, name: str) -> None:
        """Load a library; raise ImportError if libraries are missing."""
        if self.libraries_missing:
            raise ImportError(f"lib{name.lower()}.so.12: cannot open shared object file: No such file or directory")

    def arrive(self) -> None:
        """Raise errors of earlier work, because the host waits for the device."""
        if self.pending is not None:
            self.sticky, self.pending = self.pending, None
        self.check()

    def settle_frees(self) -> None:
        """Apply the waits inside ``cudaFree`` to the host's clock. The caller holds the lock."""
        while self.frees:
            merge(self.host, self.frees.popleft())

    def library_bytes(self, device: int) -> int:
        """Return the bytes of the libraries' workspaces on a device."""
        return sum(handle.workspace for handle in list(self.handles.values()) if handle.device == device)

    def check(self) -> None:
        """Raise the sticky error, if any, as every call of CUDA's runtime does."""
        if self.sticky is not None:
            raise CUDARuntimeError(self.sticky)


machine = Machine()


class _Thread(threading.local):
    device = 0
    allocator: Any = None
    capturing: Any = None
    """The stream whose capture this thread has begun; None without a capture."""
    inside = False
    """Whether the thread is inside a captured call, to which further calls belong."""

    def __init__(self) -> None:
        self.guards: list[int] = []
        self.streams: dict[int, list[Stream]] = {}


thread = _Thread()


def merge(into: Clock, other: Clock) -> None:
    """Advance the clock ``into`` to at least ``other``."""
    for key, value in other.items():
        if into.get(key, 0) < value:
            into[key] = value
