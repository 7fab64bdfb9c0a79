"""CuPy's temporaries inside kernels, allocated from the storage layer's pools.

Some of CuPy's functions allocate: a sort its indices, a product of transposed matrices their copies. During our work
they allocate here, so that the bytes are in the statistics, under a name, and can be released.

Python frees such memory long before the GPU has worked with it. It therefore returns to the stream that used it, where
its next use is ordered later. Only :meth:`Temporaries.release`, which waits for the device first, returns it to
storage: before an allocation fails, and when caches are emptied.

Any thread may call these functions; finalizers only append to a deque.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

from weftplan.device.context import Context
from weftplan.device.stream import current_stream
from weftplan.errors import DeviceError
from weftplan.locks import ReentrantLock, whole_in_children
from weftplan.support import slots

NAME = "temporaries of CuPy"
"""Name of this memory in the storage layer's reports."""
_ROUND = 512
_WASTE = 2
"""A block serves requests down to this part of its size."""


class _Block(NamedTuple):
    allocation: Any
    resource: Any
    """The resource that owns it."""


class _Lease:
    """Held by CuPy's array; when that goes, the block is free for its stream again."""

    __slots__ = ("_block", "_home")

    def __init__(self, block: _Block, home: deque[_Block]) -> None:
        self._block = block
        self._home = home

    @property
    def raw(self) -> Any:
        """The bytes, an array of CuPy."""
        return self._block.allocation.raw

    def __del__(self) -> None:
        self._home.append(self._block)


class _NoStream:
    ptr = -1


_NO_STREAM = _NoStream()


class _Refusing(threading.local):
    on = False


class Temporaries:
    """CuPy's allocator for one device: :meth:`allocate` is passed to ``cupy.cuda.using_allocator``."""

    def __init__(self, context: Context, xp: ModuleType, synchronize: Callable[[], None]) -> None:
        self._context = context
        self._xp = xp
        self._synchronize = synchronize
        self._lock = whole_in_children(ReentrantLock())
        self._free: dict[int, deque[_Block]] = {}
        """By stream (:meth:`_stream_number`): blocks that no array has. Finalizers append; only this class takes, under
        the lock."""
        self._refusing = _Refusing()
        self.reserved = 0
        """Bytes taken from storage and not given back."""

    def allocate(self, nbytes: int) -> Any:
        """Return a ``cupy.cuda.MemoryPointer`` to at least ``nbytes`` bytes, to be used on the current stream.

        Raises:
            OutOfMemoryError: storage has none; the message is its report.
            DeviceError: within :meth:`refused`.
        """
        if self._refusing.on:
            raise DeviceError(f"CuPy takes {int(nbytes):,} bytes by itself")
        cuda = self._xp.cuda
        size = max(_ROUND, -(-int(nbytes) // _ROUND) * _ROUND)
        with self._lock:
            home = self._free.setdefault(self._stream_number(), deque())
            block = self._fitting(home, size)
        if block is None:
            block = self._take(size)
        lease = _Lease(block, home)
        memory = cuda.UnownedMemory(lease.raw.data.ptr, size, lease, self._context.device_id)
        return cuda.MemoryPointer(memory, 0)

    def _stream_number(self) -> int:
        """Return a number for CuPy's current stream. CUDA gives the handle of a stream that is gone to a new one while
        the device still does the old one's work. Of streams that are not ours, all work is over when a call returns."""
        handle, stream = int(self._xp.cuda.get_current_stream().ptr), current_stream()
        ours = stream is not None and int(getattr(stream, "handle", _NO_STREAM).ptr) == handle
        return int(getattr(stream, "number", 0)) if ours else -handle

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Within the ``with`` block this thread gets no temporaries: a graph would go on writing to them."""
        self._refusing.on = True
        try:
            yield
        finally:
            self._refusing.on = False

    def _fitting(self, home: deque[_Block], size: int) -> _Block | None:
        """Return the smallest free block of a stream that fits without much waste, taken out; None without one."""
        best: _Block | None = None
        for block in list(home):
            nbytes = block.allocation.nbytes
            if size <= nbytes <= _WASTE * size and (best is None or nbytes < best.allocation.nbytes):
                best = block
        if best is not None:
            home.remove(best)
        return best

    def _take(self, size: int) -> _Block:
        resource = slots.TEMPORARY_SOURCE.get()(self._context)
        allocation = resource.allocate(size, name=NAME)
        with self._lock:
            self.reserved += size
        return _Block(allocation, resource)

    def release(self) -> int:
        """Wait for the device, return every free block to storage, and return the bytes.

        A block that a finalizer on another thread appends during the wait may belong to work that was enqueued after
        the device became idle. It stays with its stream: only the blocks that were there before the wait are released.
        """
        with self._lock:
            before = [(home, len(home)) for home in self._free.values() if home]
            if not before:
                return 0
            self._synchronize()
            released = 0
            for home, count in before:
                for _ in range(count):
                    block = home.popleft()
                    released += block.allocation.nbytes
                    block.resource.free(block.allocation)
            self.reserved -= released
            return released
