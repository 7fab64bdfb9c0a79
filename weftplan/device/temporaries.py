"""Memory that CuPy functions allocate internally, taken from the storage layer's pools.

Some CuPy functions allocate temporaries: a sort its indices, a product of transposed matrices their copies. Inside our
operations these allocations come from here, so that storage statistics include them and they can be released.

CuPy drops a temporary before the GPU has finished using it. The block therefore goes to a free list of its stream,
whose next work runs after the use. Blocks return to storage only in :meth:`Temporaries.release`, which waits for the
device: when an allocation would otherwise fail, and when caches are emptied. Any thread may call these functions.
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
from weftplan.locks import ReentrantLock, consistent_in_children
from weftplan.support import slots

NAME = "temporaries of CuPy"
"""Name of this memory in the storage layer's reports."""
_ROUND = 512
"""Bytes to whose multiples requests are rounded up, as in CuPy's own pool."""
_WASTE = 2
"""A free block is reused for requests of at least 1 / ``_WASTE`` of its bytes."""


class _Block(NamedTuple):
    allocation: Any
    resource: Any
    """The storage resource to which the allocation is returned."""


class _Lease:
    """Owner of a block that a CuPy array references; when the array dies, the block returns to its free list."""

    __slots__ = ("_block", "_free_blocks")

    def __init__(self, block: _Block, free_blocks: deque[_Block]) -> None:
        self._block = block
        self._free_blocks = free_blocks

    @property
    def raw(self) -> Any:
        """The block's memory, a flat CuPy array."""
        return self._block.allocation.raw

    def __del__(self) -> None:
        # A finalizer may run inside any code, also under the lock: it takes no lock, and deque.append is atomic.
        self._free_blocks.append(self._block)


class _NoStream:
    ptr = -1


_NO_STREAM = _NoStream()


class _Refusing(threading.local):
    on = False


class Temporaries:
    """An allocator for CuPy on one device; :meth:`allocate` is passed to ``cupy.cuda.using_allocator``."""

    def __init__(self, context: Context, xp: ModuleType, synchronize: Callable[[], None]) -> None:
        self._context = context
        self._xp = xp
        self._synchronize = synchronize
        # Guards removals from `_free` and `reserved`. Reentrant: a collection under it may run a finalizer that frees.
        self._lock = consistent_in_children(ReentrantLock())
        self._free: dict[int, deque[_Block]] = {}
        """Free lists by stream (:meth:`_stream_number`). Finalizers append to them; removals hold the lock."""
        self._refusing = _Refusing()
        self.reserved = 0
        """Bytes allocated from storage and not yet returned, whether in use or free."""

    def allocate(self, nbytes: int) -> Any:
        """Return a ``cupy.cuda.MemoryPointer`` to at least ``nbytes`` bytes, for use on the current stream.

        Raises:
            OutOfMemoryError: storage cannot allocate a new block.
            DeviceError: this thread is inside :meth:`refused`.
        """
        if self._refusing.on:
            raise DeviceError(f"CuPy takes {int(nbytes):,} bytes by itself")
        cuda = self._xp.cuda
        size = max(_ROUND, -(-int(nbytes) // _ROUND) * _ROUND)
        with self._lock:
            free_blocks = self._free.setdefault(self._stream_number(), deque())
            block = self._take_free(free_blocks, size)
        if block is None:
            block = self._allocate_block(size)
        lease = _Lease(block, free_blocks)
        memory = cuda.UnownedMemory(lease.raw.data.ptr, size, lease, self._context.device_id)
        return cuda.MemoryPointer(memory, 0)

    def _stream_number(self) -> int:
        """Return the key of CuPy's current stream in :attr:`_free`."""
        # CUDA may give the handle of a destroyed stream to a new stream while the old work still runs, so our streams
        # have unique numbers. On any other stream a call waits for its work before it returns; the handle suffices.
        handle, stream = int(self._xp.cuda.get_current_stream().ptr), current_stream()
        ours = stream is not None and int(getattr(stream, "handle", _NO_STREAM).ptr) == handle
        return int(getattr(stream, "number", 0)) if ours else -handle

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Make :meth:`allocate` raise in this thread inside the ``with`` block.

        Used during graph capture: each launch of the graph would write to the temporaries after they were freed.
        """
        self._refusing.on = True
        try:
            yield
        finally:
            self._refusing.on = False

    def _take_free(self, free_blocks: deque[_Block], size: int) -> _Block | None:
        """Remove and return the smallest free block of ``size`` to ``_WASTE * size`` bytes; None if there is none."""
        best: _Block | None = None
        for block in list(free_blocks):  # a copy: a finalizer may append during the loop
            nbytes = block.allocation.nbytes
            if size <= nbytes <= _WASTE * size and (best is None or nbytes < best.allocation.nbytes):
                best = block
        if best is not None:
            free_blocks.remove(best)
        return best

    def _allocate_block(self, size: int) -> _Block:
        resource = slots.TEMPORARY_SOURCE.get()(self._context)
        allocation = resource.allocate(size, name=NAME)
        with self._lock:
            self.reserved += size
        return _Block(allocation, resource)

    def release(self) -> int:
        """Wait for the device; then return to storage all blocks that were free before the wait. Return their bytes."""
        with self._lock:
            # A finalizer may append a block during the wait, and work enqueued after the device became idle may still
            # use it. Appends go to the right, so the first `count` blocks of each list were free before the wait.
            lengths = [(free_blocks, len(free_blocks)) for free_blocks in self._free.values() if free_blocks]
            if not lengths:
                return 0
            self._synchronize()
            released = 0
            for free_blocks, count in lengths:
                for _ in range(count):
                    block = free_blocks.popleft()
                    released += block.allocation.nbytes
                    block.resource.free(block.allocation)
            self.reserved -= released
            return released
