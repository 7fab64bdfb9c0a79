"""The state of the simulated machine: devices, what their memory holds, what each thread has made current, errors."""

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
    """An error code of CUDA's runtime."""


class OutOfMemoryError(MemoryError):
    """CuPy's: raised by its allocators."""


class StreamRaceError(AssertionError):
    """Two streams touch the same bytes, at least one of them writes, and nothing orders them."""


Clock = dict[int, int]
"""By stream: how many of its pieces of work are known to be over."""

lock = threading.RLock()
ids = itertools.count(1)


class BlasHandle:
    """A handle of cuBLAS: of one thread and one device, with workspaces of its own."""

    def __init__(self, device: int) -> None:
        self.thread, self.device = threading.get_ident(), device
        config = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
        self.fixed = config in (":4096:8", ":16:8")
        self.workspace = {":4096:8": 32 << 20, ":16:8": 128 << 10}.get(config, 32 << 20)
        self.streams: set[int] = set()


class Machine:
    """The state of all devices: capacity, bytes in use, what the host has waited for."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Empty devices of 80 GiB."""
        self.capacity = [80 << 30] * DEVICES
        self.used = [0] * DEVICES
        self.era = object()
        """Identity of this stand-in. Streams, events and memory of an earlier one may outlive it: they count nothing,
        know of no error, and free nothing here."""
        self.host: Clock = {}
        self.sticky: str | None = None
        """The text of an error that every later call repeats, as after an illegal address."""
        self.libraries_missing = False
        """True: cuBLAS, cuRAND and NVRTC cannot be loaded, as on a machine that has a driver only."""
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.null_streams: dict[int, Stream] = {}
        """The default stream of each device that has been asked for it."""
        self.memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        self.peers: set[tuple[int, int]] = set()
        """Pairs between which peer access is enabled."""
        self.apart: set[tuple[int, int]] = set()
        """Device pairs without peer access."""
        self.corrupt: set[tuple[int, int]] = set()
        """Pairs whose direct copies bring other bytes."""
        self.pinned: dict[int, int] = {}
        self.compute_types: dict[str, str] = {}
        """By dtype: the explicitly set precision of cuBLAS's products."""
        self.math_mode = 0
        """cuBLAS's: 3 lets products of float32 round to TF32."""
        self.rates: dict[str, float] = {}
        """By kind of copy: bytes per millisecond; other work takes no time."""
        self.clock = 0.0
        """Milliseconds that work with known times has taken; events keep it."""
        self.faulty: dict[str, str] = {}
        """By name of a kernel: the sticky error of its next launch. The launch itself succeeds; the error arrives when
        the host next waits, and every later call repeats it."""
        self.pending: str | None = None
        """An error that has not arrived yet."""
        self.pointers: list[int] = []
        """Handles of streams that are gone; new streams get them first, as from CUDA."""
        self.frees: deque[Clock] = deque()
        """Clocks that the host reached inside ``cudaFree``, which waits for the whole device. Finalizers append."""
        self.handles: dict[int, BlasHandle] = {}
        """cuBLAS's handles."""
        self.unreproducible: set[str] = set()
        """Products whose bits may differ from run to run: their handle has worked on several streams, and the size of
        its workspaces was not fixed before it was made."""

    def library(self, name: str) -> None:
        """Load a library: allocate its memory."""
        if self.libraries_missing:
            raise ImportError(f"lib{name.lower()}.so.12: cannot open shared object file: No such file or directory")

    def arrive(self) -> None:
        """The host waits: errors of earlier work arrive."""
        if self.pending is not None:
            self.sticky, self.pending = self.pending, None
        self.check()

    def settle_frees(self) -> None:
        """Let the host know what it has waited for inside ``cudaFree``; under the lock."""
        while self.frees:
            merge(self.host, self.frees.popleft())

    def library_bytes(self, device: int) -> int:
        """Return the bytes that libraries have allocated on a device."""
        return sum(handle.workspace for handle in list(self.handles.values()) if handle.device == device)

    def check(self) -> None:
        """Run the checks that precede every call of CUDA's runtime."""
        if self.sticky is not None:
            raise CUDARuntimeError(self.sticky)


machine = Machine()


class _Thread(threading.local):
    device = 0
    allocator: Any = None
    capturing: Any = None
    """The stream whose capture this thread has begun."""
    inside = False
    """A call that is being captured makes others, which belong to it."""

    def __init__(self) -> None:
        self.guards: list[int] = []
        self.streams: dict[int, list[Stream]] = {}


thread = _Thread()


def merge(into: Clock, other: Clock) -> None:
    """Let ``into`` know what ``other`` knows."""
    for key, value in other.items():
        if into.get(key, 0) < value:
            into[key] = value
