"""NVIDIA GPUs through CuPy. Imported when a ``gpu(i)`` or ``cpu_pinned(i)`` is first used, or GPUs are counted.

Memory comes from the CUDA allocator, not from CuPy's pool, so that only the storage layer has pools and its
statistics are complete. CuPy's allocations inside our operations come from these pools, too
(``temporaries.py``). CuPy enqueues work on its own thread-local current stream; ``with stream:`` sets both this and
:func:`weftplan.device.current_stream`.
"""

from __future__ import annotations

import importlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import numpy as np

from weftplan.device import capture_gate
from weftplan.device.base import Device, Event, Owner
from weftplan.device.capture_gate import CaptureGate
from weftplan.device.context import Context
from weftplan.device.cost_model import CostModel
from weftplan.device.cublas import fix_workspaces
from weftplan.device.numpy_device import ALIGNMENT, NumpyDevice
from weftplan.device.peers import PEER, Peers
from weftplan.device.stream import NO_WORK, NoWork, current_stream, pop_stream, push_stream
from weftplan.device.temporaries import Temporaries
from weftplan.errors import DeviceError, OutOfMemoryError
from weftplan.support.array_types import RawArray
from weftplan.support.tensor_cores import allows_tf32

_numbers = itertools.count(1)
_HOST_MEMORY = 1
"""CUDA's constant ``cudaMemoryTypeHost``, the type of page-locked memory."""

_INSTALL = "install it with `pip install 'weftplan[cuda12]'` or `pip install 'weftplan[cuda13]'`, as your driver allows"


def load_cupy(context: Context) -> ModuleType:
    """Import and return CuPy.

    Raises:
        DeviceError: CuPy, the driver or the GPU of ``context`` is missing.
    """
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        raise DeviceError(f"{context} needs CuPy, which cannot be imported ({error}); {_INSTALL}") from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise DeviceError(
            f"{context}: CuPy is installed but finds no usable NVIDIA driver or GPU ({error}); "
            f"check `nvidia-smi`, or {_INSTALL}"
        ) from error
    if context.device_type == "gpu" and context.device_id >= count:
        legal = ", ".join(f"gpu({i})" for i in range(count)) or "none"
        raise DeviceError(f"{context} does not exist: this machine has {count} GPU(s): {legal}")
    return cupy


def count_gpus() -> int:
    """Return the number of GPUs that CuPy and the driver find; 0 if either is missing."""
    try:
        return int(importlib.import_module("cupy").cuda.runtime.getDeviceCount())
    except Exception:  # CuPy's exception classes have no name if CuPy is missing
        return 0


class CupyEvent:
    """A CUDA event without timing. Its queries and waits first wait until no other thread captures a graph."""

    __slots__ = ("_event", "_gate")

    def __init__(self, event: Any, gate: CaptureGate) -> None:
        self._event = event
        self._gate = gate

    @property
    def handle(self) -> Any:
        """The wrapped ``cupy.cuda.Event``."""
        return self._event

    def query(self) -> bool:
        """Return whether the work before the event has finished."""
        with self._gate.outside():
            return bool(self._event.done)

    def synchronize(self) -> None:
        """Block the host until the event is complete."""
        with self._gate.outside():
            self._event.synchronize()


class CupyStream:
    """A CUDA stream that does not synchronise with CUDA's default stream."""

    def __init__(self, device: CupyDevice, priority: int) -> None:
        self.context = device.context
        self.number = next(_numbers)
        """Number unique in this process; CUDA may reuse the handle of a destroyed stream."""
        self._device = device
        cupy = device.xp
        with cupy.cuda.Device(device.index):
            # In CUDA a lower number means a higher priority; values outside the device's range are clipped.
            self.handle = cupy.cuda.Stream(non_blocking=True, priority=-priority)

    def record(self) -> CupyEvent:
        """Return an event that completes when the work enqueued so far has run."""
        cupy = self._device.xp
        with cupy.cuda.Device(self._device.index):
            event = cupy.cuda.Event(disable_timing=True)
            event.record(self.handle)
        return CupyEvent(event, self._device.captures)

    def wait(self, event: Event) -> None:
        """Make later work wait for ``event``; for an event of another device type, block the host instead."""
        if isinstance(event, CupyEvent):
            self.handle.wait_event(event.handle)
        else:
            event.synchronize()

    def synchronize(self) -> None:
        """Block the host until the stream is empty."""
        with self._device.captures.outside():
            self.handle.synchronize()

    def finish(self) -> tuple[()]:
        """Block the host until the stream is empty; return no faults, since errors are raised."""
        self.synchronize()
        return ()

    def clock(self) -> float:
        """Return the host's ``time.perf_counter()``."""
        return time.perf_counter()

    def work(self, owner: Callable[[], Owner]) -> NoWork:
        """Return a placeholder: CUDA does not attribute errors of enqueued work to operations."""
        return NO_WORK

    def __enter__(self) -> CupyStream:
        # CUDA's current device, CuPy's allocator and its current stream are thread-local, as our current stream is.
        guard = ExitStack()
        guard.enter_context(self._device.xp.cuda.Device(self._device.index))
        guard.enter_context(self._device.xp.cuda.using_allocator(self._device.temporaries.allocate))
        self.handle.__enter__()
        push_stream(self)
        self._device.guards.append(guard)
        return self

    def __exit__(self, *exc: object) -> None:
        pop_stream(self)
        self.handle.__exit__(None, None, None)
        self._device.guards.pop().__exit__(None, None, None)


_devices: weakref.WeakValueDictionary[int, CupyDevice] = weakref.WeakValueDictionary()
"""Live devices by index, for copies that know only an array's device number."""


class CapturedGraph:
    """A CUDA graph: work that one launch enqueues; made by :meth:`CupyDevice.capture`."""

    __slots__ = ("_device", "_graph")

    def __init__(self, device: CupyDevice, graph: Any) -> None:
        self._device = device
        self._graph = graph

    def launch(self) -> None:
        """Enqueue the graph on CuPy's current stream."""
        cuda = self._device.xp.cuda
        with cuda.Device(self._device.index):
            self._graph.launch(cuda.get_current_stream())


class CupyDevice:
    """One NVIDIA GPU."""

    alignment = 256
    asynchronous = True
    cost = CostModel()

    def __init__(self, context: Context) -> None:
        self.context = context
        self.index = context.device_id
        fix_workspaces()
        self.xp: ModuleType = load_cupy(context)
        if allows_tf32():
            with self.xp.cuda.Device(self.index):
                self.xp._core.set_compute_type(np.float32, self.xp._core._routines_linalg.COMPUTE_TYPE_TF32)
        self.guards = _GuardStack()
        self.captures = CaptureGate()
        self._capture_stream: CupyStream | None = None
        """Stream used only for captures: a capture takes all work on its stream, of any thread, into the graph."""
        self.temporaries = Temporaries(context, self.xp, self.synchronize)
        self.peers = Peers(self)
        self.offload_links: dict[Context, Any] = {}
        """By destination: the link that :mod:`weftplan.device.offload_links` measured, or None if measuring failed."""
        _devices[self.index] = self

    def allocate(self, nbytes: int) -> RawArray:
        """Return ``nbytes`` > 0 undefined bytes of device memory.

        Raises:
            OutOfMemoryError: the driver refused the allocation.
            DeviceError: an earlier kernel failed, after which every CUDA call fails.
        """
        cupy = self.xp
        try:
            with cupy.cuda.Device(self.index):
                memory = cupy.cuda.Memory(nbytes)
        except (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError) as error:
            try:
                free, total = self.memory_info()
            except Exception:
                raise DeviceError(
                    f"{self.context} takes no more work: {error}. CUDA repeats the error of an earlier kernel at every "
                    f"call; this is not a lack of memory. Start the process again"
                ) from error
            raise OutOfMemoryError(
                f"{self.context}: the driver refused {nbytes:,} bytes; {free:,} of {total:,} are free ({error})"
            ) from error
        raw: RawArray = cupy.ndarray((nbytes,), cupy.uint8, memptr=cupy.cuda.MemoryPointer(memory, 0))
        return raw

    def free(self, raw: RawArray) -> None:
        """Do nothing: CuPy frees the memory with its last view."""

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of device memory."""
        with self.xp.cuda.Device(self.index):
            free, total = self.xp.cuda.runtime.memGetInfo()
        return int(free), int(total)

    def new_stream(self, *, priority: int = 0) -> CupyStream:
        """Return a new stream; a GPU that supports priorities runs work of a higher ``priority`` first."""
        return CupyStream(self, priority)

    def launch(self, fn: Callable[[], object], modelled: float | None = 0.0) -> None:
        """Call ``fn`` with this GPU current, so that its CuPy work is enqueued on the current stream.

        Without a current stream, no event could be recorded after the work, so this call waits for it.
        """
        cuda = self.xp.cuda
        with cuda.Device(self.index), cuda.using_allocator(self.temporaries.allocate):
            try:
                fn()
            except cuda.memory.OutOfMemoryError as error:  # from outside our allocator, for example in a library
                free, total = self.memory_info()
                raise OutOfMemoryError(
                    f"{self.context}: CUDA ran out of memory inside an operation; {free:,} of {total:,} are free "
                    f"({error})"
                ) from error
            if current_stream() is None:
                cuda.get_current_stream().synchronize()

    def capture(self, fn: Callable[[], object]) -> CapturedGraph | str:
        """Record the work that ``fn`` enqueues, without running it, and return it as a graph.

        ``fn`` must have run before, so that its kernels are compiled and its libraries are loaded. Its arrays must keep
        their addresses as long as the graph is used. During the capture, calls of other threads that would invalidate
        it wait.

        Returns:
            The graph, or the reason why the work could not be captured.
        """
        if not isinstance(current_stream(), CupyStream):
            return "no stream of this GPU is current"
        with self.captures.capturing() as granted:
            if not granted:
                return f"other threads have waited for {self.context} for {capture_gate.PATIENCE_S:.0f} s"
            if self._capture_stream is None:
                self._capture_stream = CupyStream(self, 0)
            with self._capture_stream as stream:  # also the stream that `fn` finds as the current stream
                return self._run_capture(stream.handle, fn)

    def _run_capture(self, handle: Any, fn: Callable[[], object]) -> CapturedGraph | str:
        why = ""
        try:
            handle.begin_capture()
        except self.xp.cuda.runtime.CUDARuntimeError as error:
            return f"CUDA does not capture the stream: {error}"
        try:
            with self.temporaries.refused():
                fn()
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
        finally:
            try:
                graph = handle.end_capture()
            except self.xp.cuda.runtime.CUDARuntimeError as error:
                graph, why = None, why or str(error)
        return why if graph is None or why else CapturedGraph(self, graph)

    def copy(self, dst: RawArray, src: RawArray) -> None:
        """Copy between host and device, or between devices, on CuPy's current stream.

        Without a current stream of ours the call waits for the copy; so does every copy to host memory that is not
        page-locked. Other copies are only enqueued: a reader waits for an event of the stream.
        """
        cupy = self.xp
        with cupy.cuda.Device(self.index):
            stream = cupy.cuda.get_current_stream()
            finish = current_stream() is None
            if isinstance(dst, np.ndarray):
                if isinstance(src, np.ndarray):
                    np.copyto(dst, src)
                else:
                    waits = finish or not self._page_locked(dst)
                    src.get(stream=stream, out=dst, blocking=waits)
                    finish = False
            elif isinstance(src, np.ndarray):
                dst.set(np.asarray(src, order="C"), stream=stream)  # ascontiguousarray would turn shape () into (1,)
            elif dst.device.id == src.device.id:
                cupy.copyto(dst, src)
            else:
                self._copy_to_other(dst, src, stream)
            if finish:
                stream.synchronize()

    def copy_seconds(self, dst: RawArray, src: RawArray) -> float:
        """Copy on a new stream, wait for the copy, and return its seconds by CUDA events."""
        cupy = self.xp
        with self.new_stream() as stream:
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream.handle)
            self.copy(dst, src)
            end.record(stream.handle)
            end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) * 1e-3

    def _copy_to_other(self, dst: Any, src: Any, stream: Any) -> None:
        source, target = (_devices[array.device.id] for array in (src, dst))
        if source.peers.way(target) == PEER:
            dst.data.copy_from_device_async(src.data, src.nbytes, stream)
        else:
            source.peers.staged(dst, src, stream, pinned_device(Context("cpu_pinned", 0)))

    def _page_locked(self, array: RawArray) -> bool:
        attributes = self.xp.cuda.runtime.pointerGetAttributes(array.__array_interface__["data"][0])
        return int(attributes.type) == _HOST_MEMORY

    def synchronize(self) -> None:
        """Wait until no other thread captures on this device, then block the host until the device is idle."""
        with self.captures.outside():
            self.xp.cuda.Device(self.index).synchronize()

    def __repr__(self) -> str:
        return f"<CupyDevice {self.context}>"


class _GuardStack:
    """Thread-local stack of the contexts (device, allocator) that each ``with stream:`` has entered."""

    def __init__(self) -> None:
        self._local = threading.local()

    def append(self, guard: Any) -> None:
        stack = getattr(self._local, "stack", None)
        if stack is None:
            stack = self._local.stack = []
        stack.append(guard)

    def pop(self) -> Any:
        return self._local.stack.pop()


class PinnedDevice(NumpyDevice):
    """A device of page-locked host memory, which a GPU accesses by DMA."""

    def __init__(self, context: Context, cupy: ModuleType) -> None:
        super().__init__(context)
        self._cupy = cupy

    def allocate(self, nbytes: int) -> RawArray:
        """Return ``nbytes`` > 0 page-locked bytes, aligned to 64 bytes; raises OutOfMemoryError."""
        try:
            memory = self._cupy.cuda.PinnedMemory(nbytes + ALIGNMENT - 1)
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            raise OutOfMemoryError(f"{self.context}: the driver refused {nbytes:,} pinned bytes ({error})") from error
        pointer = self._cupy.cuda.PinnedMemoryPointer(memory, 0)
        padded = np.frombuffer(pointer, np.uint8, nbytes + ALIGNMENT - 1)
        start = -padded.ctypes.data % ALIGNMENT
        return padded[start : start + nbytes]


def pinned_device(context: Context) -> Device:
    """Return a device of page-locked memory, or of plain host memory if CuPy, the driver or a GPU is missing."""
    try:
        return PinnedDevice(context, load_cupy(context))
    except DeviceError:
        return NumpyDevice(context)
