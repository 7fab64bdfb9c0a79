"""Memory of the stand-in: allocations, pointers, allocators, and the check that streams order their accesses."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.standin_cupy.machine import (
    ALIGNMENT,
    Clock,
    CUDARuntimeError,
    OutOfMemoryError,
    StreamRaceError,
    lock,
    machine,
    merge,
    thread,
)
from tests.standin_cupy.meter import meter
from tests.standin_cupy.streams import Stream, capturable, get_current_stream, not_while_capturing, refuse
from weftplan.locks import members


class _Use:
    """The last write of a range of bytes, and the reads after it."""

    __slots__ = ("count", "readers", "stream")

    def __init__(self) -> None:
        self.stream = self.count = 0
        self.readers: Clock = {}


class Memory:
    """``cupy.cuda.Memory``: one allocation of the driver, freed with the object."""

    def __init__(self, size: int) -> None:
        machine.check()
        self.device_id = thread.device
        self.size = 0
        self._used, self._era = machine.used, machine.era
        not_while_capturing("cudaMalloc")
        self.size = 0
        if type(size) is not int or size < 0:
            raise TypeError(f"Memory takes a size in bytes, got {size!r}")
        with lock:
            taken = machine.used[self.device_id] + machine.library_bytes(self.device_id)
            if taken + size > machine.capacity[self.device_id]:
                raise CUDARuntimeError("cudaErrorMemoryAllocation: out of memory")
            machine.used[self.device_id] += size
        self.size = size
        whole = np.empty(size + ALIGNMENT - 1, np.uint8)
        start = -whole.__array_interface__["data"][0] % ALIGNMENT
        self.bytes = whole[start : start + size]
        self.ptr = int(self.bytes.__array_interface__["data"][0])
        self._uses: dict[tuple[int, int], _Use] = {}
        with lock:
            machine.memories.add(self)

    def __del__(self) -> None:
        self._used[self.device_id] -= self.size
        if self.size and self._era is machine.era:
            meter.frees += 1
            for stream in members(machine.streams):  # cudaFree returns when the device is idle
                if stream.device_id == self.device_id and stream.captured is None:
                    machine.frees.append(stream.now())

    def touch(self, start: int, stop: int, stream: Stream, *, write: bool, what: str) -> None:
        """Record an access by the latest work of ``stream``; raise StreamRaceError if no event orders it."""
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
    """``cupy.cuda.MemoryPointer``: a position in an allocation."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem = mem
        self.offset = offset

    @property
    def ptr(self) -> int:
        """Address in bytes."""
        return int(self.mem.ptr) + self.offset

    @property
    def device_id(self) -> int:
        """Number of the allocation's device."""
        return int(self.mem.device_id)

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.offset + offset)

    @capturable
    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Stream | None = None) -> None:
        """Copy ``size`` bytes by ``cudaMemcpyAsync``; enable peer access between devices, as CuPy does."""
        machine.check()
        pair = (src.device_id, self.device_id)
        if pair[0] != pair[1] and pair not in machine.apart:
            machine.peers.add(pair)
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
            if pair in machine.corrupt:
                target.bytes[start : start + size] ^= 1


class UnownedMemory:
    """``cupy.cuda.UnownedMemory``: memory that its owner frees; the owner identifies the allocation."""

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr = ptr
        self.size = size
        self.owner = owner
        self.device_id = thread.device if device_id < 0 else device_id


def memory_of(pointer: MemoryPointer) -> Memory:
    """Return the allocation under a pointer."""
    actual = pointer.mem
    while not isinstance(actual, Memory):
        data = getattr(actual, "owner", None)
        data = getattr(data, "raw", data)
        actual = data if isinstance(data, Memory) else data.data.mem
    return actual


def offset_of(pointer: MemoryPointer) -> int:
    """Return a pointer's offset in bytes in its allocation."""
    return pointer.ptr - memory_of(pointer).ptr


Range = tuple[Memory, int, int]


def enqueue(
    name: str, reads: list[Range], writes: list[Range], *, stream: Stream | None = None, count: int = 1
) -> None:
    """Count a launch on ``stream``, by default the current stream, and check that its accesses are ordered."""
    machine.check()
    where = stream or get_current_stream()
    if where.captured is not None:
        if not thread.inside:
            refuse(where.captured, name)
        return
    if thread.capturing is not None:
        not_while_capturing(f"{name} on another stream")
    meter.launch(name, count)
    machine.pending = machine.faulty.pop(name, None) or machine.pending
    with lock:
        machine.settle_frees()
        if name in machine.rates:
            _, first, last = (reads or writes)[0]
            machine.clock += 0.01 + (last - first) / machine.rates[name]
        where.count += 1
        merge(where.seen, machine.host)
        for memory, start, stop in reads:
            memory.touch(start, stop, where, write=False, what=name)
        for memory, start, stop in writes:
            memory.touch(start, stop, where, write=True, what=name)


class _DefaultPool:
    """CuPy's default pool, without pooling: its allocations are temporaries outside the storage layer."""

    def malloc(self, size: int) -> MemoryPointer:
        """Return memory for one array."""
        try:
            return MemoryPointer(Memory(max(size, 1)), 0)
        except CUDARuntimeError as error:
            if "MemoryAllocation" not in str(error):
                raise
            raise OutOfMemoryError(f"Out of memory allocating {size:,} bytes") from error

    def free_all_blocks(self, stream: Stream | None = None) -> None:
        """Do nothing, because the pool caches no blocks."""

    def used_bytes(self) -> int:
        """Return 0; the bytes are not counted."""
        return 0


default_pool = _DefaultPool()
_global_allocator: list[Any] = [default_pool.malloc]


def alloc(size: int) -> MemoryPointer:
    """Allocate memory for a new array by this thread's allocator, else by the global allocator."""
    allocator = thread.allocator or _global_allocator[0]
    pointer = allocator(size)
    if not isinstance(pointer, MemoryPointer):
        raise TypeError(f"an allocator must return a MemoryPointer, got {pointer!r}")
    return pointer


def set_allocator(allocator: Any = None) -> None:
    """Set the process's allocator, as ``cupy.cuda.set_allocator``; None restores the default pool."""
    if thread.allocator is not None:
        raise ValueError("Can't change the global allocator inside `using_allocator` context manager")
    _global_allocator[0] = allocator or default_pool.malloc


class using_allocator:
    """Set this thread's allocator within a ``with`` block, as ``cupy.cuda.using_allocator``."""

    def __init__(self, allocator: Any = None) -> None:
        self._allocator = allocator

    def __enter__(self) -> None:
        self._before = thread.allocator
        thread.allocator = self._allocator

    def __exit__(self, *exc: object) -> None:
        thread.allocator = self._before


class PinnedMemory:
    """``cupy.cuda.PinnedMemory``; its pointer allocates the bytes."""

    def __init__(self, size: int, flags: int = 0) -> None:
        machine.check()
        self.size = size


class PinnedMemoryPointer(bytearray):
    """``cupy.cuda.PinnedMemoryPointer``: bytes with the buffer protocol and a reference to the memory."""

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
    """The result of ``cudaPointerGetAttributes``.

    ``type`` is 1 for page-locked host memory, 0 for other host memory.
    """

    def __init__(self, address: int) -> None:
        machine.check()
        actual = any(start <= address < start + size for start, size in list(machine.pinned.items()))
        self.type = 1 if actual else 0
