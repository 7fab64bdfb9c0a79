"""Devices, streams, events and memory of the stand-in, and the check that work on different streams is ordered.

Work runs in the call that enqueues it, so a missing event never shows as a wrong value. It shows as a
:class:`StreamRaceError` instead: every access to device memory is stamped with its stream and its place there, every
stream knows how far into the other streams it has waited, and an access that meets one of another stream which it has
not waited for is refused. What the host has waited for counts for all streams, because the work of a later call starts
later.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

import numpy as np

from tests.standin_cupy.meter import meter

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

_lock = threading.RLock()
_ids = itertools.count(1)


class Machine:
    """The state of all devices: capacity, bytes in use, what the host has waited for."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Empty devices of 80 GiB."""
        self.capacity = [80 << 30] * DEVICES
        self.used = [0] * DEVICES  # a new list: memory of before counts for the old one
        self.host: Clock = {}
        self.sticky: str | None = None
        """The text of an error that every later call repeats, as after an illegal address."""
        self.libraries_missing = False
        """True: cuBLAS, cuRAND and NVRTC cannot be loaded, as on a machine that has a driver only."""
        self.streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self.memories: weakref.WeakSet[Memory] = weakref.WeakSet()
        self.peers: set[tuple[int, int]] = set()
        self.pinned: dict[int, int] = {}

    def library(self, name: str) -> None:
        """What loading a library does."""
        if self.libraries_missing:
            raise ImportError(f"lib{name.lower()}.so.12: cannot open shared object file: No such file or directory")

    def check(self) -> None:
        """What every call of CUDA's runtime does first."""
        if self.sticky is not None:
            raise CUDARuntimeError(self.sticky)


machine = Machine()


class _Thread(threading.local):
    device = 0
    allocator: Any = None

    def __init__(self) -> None:
        self.guards: list[int] = []
        self.streams: dict[int, list[Stream]] = {}


thread = _Thread()


class Device:
    """``cupy.cuda.Device``."""

    def __init__(self, device: int | None = None) -> None:
        machine.check()
        self.id = thread.device if device is None else int(device)
        if not 0 <= self.id < DEVICES:
            raise CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")

    def __enter__(self) -> Device:
        thread.guards.append(thread.device)
        thread.device = self.id
        return self

    def __exit__(self, *exc: object) -> None:
        thread.device = thread.guards.pop()

    def use(self) -> None:
        """Make it current."""
        thread.device = self.id

    def synchronize(self) -> None:
        """Wait for every stream."""
        machine.check()
        meter.syncs["Device.synchronize"] += 1
        with _lock:
            for stream in list(machine.streams):
                if stream.device_id == self.id:
                    _merge(machine.host, stream.now())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def __int__(self) -> int:
        return self.id

    @property
    def attributes(self) -> dict[str, int]:
        """Those that weftplan asks for."""
        return {"MultiProcessorCount": 132, "AsyncEngineCount": 3}

    @property
    def cublas_handle(self) -> int:
        """A handle of cuBLAS."""
        machine.library("cuBLAS")
        return 1

    @property
    def compute_capability(self) -> str:
        """That of an H100."""
        return "90"


def _merge(into: Clock, other: Clock) -> None:
    for key, value in other.items():
        if into.get(key, 0) < value:
            into[key] = value


class Stream:
    """``cupy.cuda.Stream``."""

    null: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        machine.check()
        self.device_id = thread.device
        self.ptr = 0 if null else next(_ids)
        self.key = -1 - self.device_id if null else self.ptr
        self.count = 0
        self.seen: Clock = {}
        self.priority = priority
        machine.streams.add(self)

    def now(self) -> Clock:
        """What is over once all work enqueued so far is."""
        return {**self.seen, self.key: self.count}

    def __enter__(self) -> Stream:
        thread.streams.setdefault(self.device_id, []).append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        top = thread.streams[self.device_id].pop()
        assert top is self, "`with stream:` blocks left in the wrong order"

    def use(self) -> Stream:
        """Make it current from now on."""
        thread.streams[self.device_id] = [self]
        return self

    @property
    def done(self) -> bool:
        """Work runs at once; the host learns of it here."""
        with _lock:
            _merge(machine.host, self.now())
        return True

    def synchronize(self) -> None:
        """Block the host until the stream is empty."""
        machine.check()
        meter.syncs["Stream.synchronize"] += 1
        with _lock:
            _merge(machine.host, self.now())

    def record(self, event: Event | None = None) -> Event:
        """An event behind the work so far."""
        made = event or Event()
        made.record(self)
        return made

    def wait_event(self, event: Event) -> None:
        """Later work starts after ``event``."""
        machine.check()
        assert isinstance(event, Event), f"wait_event takes an Event, got {event!r}"
        with _lock:
            _merge(self.seen, event.clock)


class Event:
    """``cupy.cuda.Event``."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        machine.check()
        self.device_id = thread.device
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work of ``stream`` so far; an event belongs to the device that was current when it was made."""
        where = stream or get_current_stream()
        if where.device_id != self.device_id:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle: the event and the stream are of different devices")
        with _lock:
            self.clock = where.now()

    @property
    def done(self) -> bool:
        """Work runs at once; the host learns of it here."""
        machine.check()
        with _lock:
            _merge(machine.host, self.clock)
        return True

    def synchronize(self) -> None:
        """Block the host until the event has passed."""
        machine.check()
        meter.syncs["Event.synchronize"] += 1
        with _lock:
            _merge(machine.host, self.clock)


_null_streams: dict[int, Stream] = {}


def _null_stream(device: int) -> Stream:
    stream = _null_streams.get(device)
    if stream is None:
        with Device(device):
            stream = _null_streams[device] = Stream(null=True)
    machine.streams.add(stream)
    return stream


def get_current_stream(device_id: int = -1) -> Stream:
    """The stream of the current device (or of ``device_id``) that is current in this thread."""
    device = thread.device if device_id < 0 else device_id
    stack = thread.streams.get(device)
    return stack[-1] if stack else _null_stream(device)


# -- memory -----------------------------------------------------------------------------------------------------------


class _Use:
    """The last write of a range of bytes, and the reads since."""

    __slots__ = ("count", "readers", "stream")

    def __init__(self) -> None:
        self.stream = self.count = 0
        self.readers: Clock = {}


class Memory:
    """``cupy.cuda.Memory``: one allocation of the driver, freed with the object."""

    def __init__(self, size: int) -> None:
        machine.check()
        self.device_id = thread.device
        self._used = machine.used
        self.size = 0
        if type(size) is not int or size < 0:
            raise TypeError(f"Memory takes a size in bytes, got {size!r}")
        with _lock:
            if machine.used[self.device_id] + size > machine.capacity[self.device_id]:
                raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
            machine.used[self.device_id] += size
        self.size = size
        whole = np.empty(size + ALIGNMENT - 1, np.uint8)
        start = -whole.__array_interface__["data"][0] % ALIGNMENT
        self.bytes = whole[start : start + size]
        self.ptr = int(self.bytes.__array_interface__["data"][0])
        self._uses: dict[tuple[int, int], _Use] = {}
        with _lock:
            machine.memories.add(self)

    def __del__(self) -> None:
        self._used[self.device_id] -= self.size

    def touch(self, start: int, stop: int, stream: Stream, *, write: bool, what: str) -> None:
        """Note an access by the piece of work that ``stream`` has just been given; refuse one that nothing orders."""
        key, seen = stream.key, stream.seen
        for (low, high), use in list(self._uses.items()):
            if high <= start or stop <= low:
                continue
            if use.count and use.stream != key and seen.get(use.stream, 0) < use.count:
                raise StreamRaceError(
                    f"{what} on stream {key} {'writes' if write else 'reads'} bytes [{start}, {stop}) of gpu("
                    f"{self.device_id}) that stream {use.stream} writes, and does not wait for it"
                )
            if write:
                for reader, count in use.readers.items():
                    if reader != key and seen.get(reader, 0) < count:
                        raise StreamRaceError(
                            f"{what} on stream {key} writes bytes [{start}, {stop}) of gpu({self.device_id}) that "
                            f"stream {reader} reads, and does not wait for it"
                        )
                if start <= low and high <= stop:
                    del self._uses[low, high]
        use = self._uses.setdefault((start, stop), _Use())
        if write:
            use.stream, use.count = key, stream.count
            use.readers.clear()
        else:
            use.readers[key] = stream.count


class MemoryPointer:
    """``cupy.cuda.MemoryPointer``: a place in an allocation."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem = mem
        self.offset = offset

    @property
    def ptr(self) -> int:
        """Its address."""
        return int(self.mem.ptr) + self.offset

    @property
    def device_id(self) -> int:
        """Where it is."""
        return int(self.mem.device_id)

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.offset + offset)

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Stream | None = None) -> None:
        """``cudaMemcpyAsync`` between devices; enables peer access by itself, as CuPy does."""
        machine.check()
        if src.device_id != self.device_id:
            machine.peers.add((src.device_id, self.device_id))
        source, target = memory_of(src), memory_of(self)
        start, origin = offset_of(self), offset_of(src)
        enqueue(
            "memcpy peer" if src.device_id != self.device_id else "memcpy",
            [(source, origin, origin + size)],
            [(target, start, start + size)],
            stream=stream,
        )
        if not meter.dry:
            target.bytes[start : start + size] = source.bytes[origin : origin + size]


class UnownedMemory:
    """``cupy.cuda.UnownedMemory``: memory that somebody else frees; knows the allocation through its owner."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr = ptr
        self.size = size
        self.owner = owner
        self.device_id = thread.device if device_id < 0 else device_id


def memory_of(pointer: MemoryPointer) -> Memory:
    """The allocation under a pointer."""
    found = pointer.mem
    while not isinstance(found, Memory):
        data = getattr(found, "owner", None)
        data = getattr(data, "raw", data)
        found = data if isinstance(data, Memory) else data.data.mem
    return found


def offset_of(pointer: MemoryPointer) -> int:
    """Where a pointer is in the allocation under it."""
    return pointer.ptr - memory_of(pointer).ptr


Range = tuple[Memory, int, int]


def enqueue(
    name: str, reads: list[Range], writes: list[Range], *, stream: Stream | None = None, count: int = 1
) -> None:
    """Count a launch on the current stream (or ``stream``) and check that its accesses are ordered."""
    machine.check()
    where = stream or get_current_stream()
    meter.launch(name, count)
    with _lock:
        where.count += 1
        _merge(where.seen, machine.host)
        for memory, start, stop in reads:
            memory.touch(start, stop, where, write=False, what=name)
        for memory, start, stop in writes:
            memory.touch(start, stop, where, write=True, what=name)


class _DefaultPool:
    """CuPy's own pool, without a pool: whatever comes through it is a temporary beside the storage layer."""

    def malloc(self, size: int) -> MemoryPointer:
        """Memory for one array."""
        try:
            return MemoryPointer(Memory(max(size, 1)), 0)
        except CUDARuntimeError as error:
            raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes") from error

    def free_all_blocks(self, stream: Stream | None = None) -> None:
        """It keeps none."""

    def used_bytes(self) -> int:
        """Not kept."""
        return 0


default_pool = _DefaultPool()
_global_allocator: list[Any] = [default_pool.malloc]


def alloc(size: int) -> MemoryPointer:
    """What every new array calls: the allocator of this thread, else the global one."""
    allocator = thread.allocator or _global_allocator[0]
    pointer = allocator(size)
    if not isinstance(pointer, MemoryPointer):
        raise TypeError(f"an allocator must return a MemoryPointer, got {pointer!r}")
    return pointer


def set_allocator(allocator: Any = None) -> None:
    """``cupy.cuda.set_allocator``: for the process."""
    if thread.allocator is not None:
        raise ValueError("Can't change the global allocator inside `using_allocator` context manager")
    _global_allocator[0] = allocator or default_pool.malloc


class using_allocator:
    """``cupy.cuda.using_allocator``: for this thread, within a ``with`` block."""

    def __init__(self, allocator: Any = None) -> None:
        self._allocator = allocator

    def __enter__(self) -> None:
        self._before = thread.allocator
        thread.allocator = self._allocator

    def __exit__(self, *exc: object) -> None:
        thread.allocator = self._before


class PinnedMemory:
    """``cupy.cuda.PinnedMemory``; the bytes are those of the pointer that is made to it."""

    def __init__(self, size: int, flags: int = 0) -> None:
        machine.check()
        self.size = size


class PinnedMemoryPointer(bytearray):
    """``cupy.cuda.PinnedMemoryPointer``: offers the buffer protocol, and keeps the memory."""

    def __init__(self, mem: PinnedMemory, offset: int) -> None:
        super().__init__(mem.size - offset)
        self.mem = mem
        if len(self):
            self._address = int(np.frombuffer(self, np.uint8).__array_interface__["data"][0])
            machine.pinned[self._address] = len(self)

    def __del__(self) -> None:
        if len(self):
            machine.pinned.pop(self._address, None)


class Attributes:
    """What ``cudaPointerGetAttributes`` tells; ``type`` is 1 for page-locked host memory, 0 for other host memory."""

    def __init__(self, address: int) -> None:
        machine.check()
        found = any(start <= address < start + size for start, size in list(machine.pinned.items()))
        self.type = 1 if found else 0
