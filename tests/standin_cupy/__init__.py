"""A strict stand-in for CuPy, with four GPUs, for machines that have none. See README.md for its rules."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Iterator
from importlib._bootstrap import _ModuleLockManager
from typing import Any

import numpy as np

from tests.standin_cupy import names
from tests.standin_cupy.array import ndarray
from tests.standin_cupy.cublas import Cublas, handle
from tests.standin_cupy.cuda.raw import RawKernel
from tests.standin_cupy.cuda.syntax import CompileException
from tests.standin_cupy.functions import Namespace
from tests.standin_cupy.kernels import ElementwiseKernel
from tests.standin_cupy.machine import DEVICES, CUDARuntimeError, OutOfMemoryError, machine, thread
from tests.standin_cupy.memory import (
    Attributes,
    Memory,
    MemoryPointer,
    PinnedMemory,
    PinnedMemoryPointer,
    UnownedMemory,
    alloc,
    default_pool,
    set_allocator,
    using_allocator,
)
from tests.standin_cupy.meter import meter
from tests.standin_cupy.streams import Device, Event, Stream, get_current_stream, get_elapsed_time
from weftplan import engine
from weftplan.device import registry as devices
from weftplan.ndarray.memory.release import drain
from weftplan.storage import registry

__all__ = ["CUDARuntimeError", "installed", "machine", "meter", "ndarray"]

_OURS = ("gpu", "cpu_pinned")


def _device_count() -> int:
    machine.check()
    return DEVICES


def _enable_peer(peer: int) -> None:
    machine.check()
    pair = (thread.device, peer)
    if pair in machine.apart:
        raise CUDARuntimeError("cudaErrorPeerAccessUnsupported: peer access is not supported between these two devices")
    if pair in machine.peers:
        raise CUDARuntimeError("cudaErrorPeerAccessAlreadyEnabled: peer access is already enabled")
    machine.peers.add(pair)


def _set_compute_type(dtype: Any, compute_type: int) -> None:
    machine.check()  # it asks for the compute capability of the current device
    machine.compute_types[np.dtype(dtype).name] = {7: "TF32"}[compute_type]


def _memory_info() -> tuple[int, int]:
    machine.check()
    total = machine.capacity[thread.device]
    return total - machine.used[thread.device] - machine.library_bytes(thread.device), total


def _module() -> types.ModuleType:
    cupy = Namespace()
    cupy.__version__ = names.VERSION
    cupy.ndarray = ndarray
    cupy.ElementwiseKernel = ElementwiseKernel
    cupy.RawKernel = RawKernel
    cupy.get_default_memory_pool = lambda: default_pool
    cupy._core = types.SimpleNamespace(
        _routines_linalg=types.SimpleNamespace(COMPUTE_TYPE_TF32=7), set_compute_type=_set_compute_type
    )
    runtime = types.SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=_device_count,
        getDevice=lambda: thread.device,
        memGetInfo=_memory_info,
        runtimeGetVersion=lambda: 12090,
        driverGetVersion=lambda: 12090,
        pointerGetAttributes=Attributes,
        deviceCanAccessPeer=lambda device, peer: int(device != peer and (device, peer) not in machine.apart),
        deviceEnablePeerAccess=_enable_peer,
        deviceGetPCIBusId=lambda device: f"0000:{0x40 - device:02x}:00.0",
        getDeviceProperties=lambda device: {"name": b"stand-in", "multiProcessorCount": 132},
    )
    cupy.cuda = types.SimpleNamespace(
        Memory=Memory,
        MemoryPointer=MemoryPointer,
        UnownedMemory=UnownedMemory,
        PinnedMemory=PinnedMemory,
        PinnedMemoryPointer=PinnedMemoryPointer,
        Device=Device,
        Stream=Stream,
        Event=Event,
        alloc=alloc,
        get_current_stream=get_current_stream,
        get_elapsed_time=get_elapsed_time,
        cublas=Cublas,
        get_cublas_handle=handle,
        set_allocator=set_allocator,
        using_allocator=using_allocator,
        memory=types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        curand=types.SimpleNamespace(getVersion=lambda: machine.library("cuRAND") or 10310),
        nvrtc=types.SimpleNamespace(getVersion=lambda: machine.library("NVRTC") or (12, 9)),
        compiler=types.SimpleNamespace(CompileException=CompileException),
        runtime=runtime,
    )
    return cupy


def _memory_in_use() -> bool:
    """Return whether arrays still occupy memory of the stand-in's devices."""
    ours = [resource for ctx, resource in registry._resources.items() if ctx.device_type in _OURS]
    return any(resource.statistics().requested_bytes for resource in ours)


@contextlib.contextmanager
def installed(kind: str | None = "ThreadedEnginePerDevice", **engine_settings: int) -> Iterator[types.ModuleType]:
    """Install the stand-in as ``cupy``, with no GPU used yet and with its own engine.

    The process's state about real GPUs and pinned memory is saved and restored.

    Args:
        kind: kind of the engine.
        engine_settings: arguments of ``engine.create``.
    """
    before = sys.modules.get("cupy")
    tables: list[dict[Any, Any]] = [devices._devices, registry._resources]
    kept = [{ctx: table.pop(ctx) for ctx in list(table) if ctx.device_type in _OURS} for table in tables]
    machine.reset()
    meter.reset()
    meter.dry = False
    # An array that outlived the previous stand-in may have made a worker import the real CuPy. Wait for that import, or
    # it would replace this stand-in.
    with _ModuleLockManager("cupy"):
        module = sys.modules["cupy"] = _module()
    try:
        result = engine.create(kind, **engine_settings)
        with engine.using(result):
            try:
                yield module
            finally:
                machine.sticky, meter.dry = None, False
                for last in (False, True):  # arrays of pending operations are freed after those have run
                    if last and _memory_in_use():
                        gc.collect()  # frees objects in a failure's frames while the device still exists
                    drain()
                    result.stop()
            result.wait_for_all()
    finally:
        if before is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = before
        for table, entries in zip(tables, kept, strict=True):
            for ctx in [ctx for ctx in table if ctx.device_type in _OURS]:
                del table[ctx]
            table.update(entries)
