"""Copies between arrays, on one context or between two contexts.

The queue of a copy follows MXNet 1.9.1: host to device uses the device's copy-to queue; device to host and device to
device use the source's copy-from queue; all other copies are normal operations of the source's context. A file has two
such queues as well, so that the host computes during file reads and writes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from weftplan import device, engine
from weftplan.device.base import Device
from weftplan.device.context import Context
from weftplan.device.interconnect import way
from weftplan.device.peers import PEER
from weftplan.engine import FnProperty
from weftplan.errors import ShapeError
from weftplan.ndarray.base import Array, NDArrayBase, pending
from weftplan.ndarray.pushing import KernelValue, computing, push_kernel
from weftplan.ndarray.small_calls import copy_inline
from weftplan.support.array_types import RawArray
from weftplan.support.slots import ARRAY_CHUNK, MAKE_ROOM


def copy_into(source: NDArrayBase, target: NDArrayBase, *, priority: int = 0, name: str = "copy") -> None:
    """Push a copy of ``source`` into ``target``, cast to its dtype; copying an array onto itself does nothing.

    Raises:
        ShapeError: the shapes differ.
    """
    if source.shape != target.shape:
        raise ShapeError(f"copyto: the source has shape {source.shape}, the target {target.shape}; they must be equal")
    same_start = source.chunk is target.chunk and source.offset == target.offset
    if source.size == 0 or (same_start and source.np_dtype == target.np_dtype):
        return
    if not priority and source.chunk is not target.chunk and copy_inline(source, target):
        return
    prop, context = route(source.context, target.context, same_dtype=source.np_dtype == target.np_dtype)
    reads: tuple[Any, ...] = () if source.var is target.var else (source.var,)
    if prop == FnProperty.NORMAL:
        push_kernel(_cast, [target, source], reads, (target.var,), context, priority=priority, name=name)
        return
    if (make_room := MAKE_ROOM.value) is not None:
        for end in dict.fromkeys((source.context, target.context)):
            reads = (*reads, *make_room(end, [target, source]))
    transfer = partial(_transfer, device.get(device_end(source.context, target.context)))
    fn = computing(transfer, [target, source])
    # No launch around it: Device.copy enqueues by itself.
    engine.get().push(
        fn, reads, (target.var,), context, prop=prop, priority=priority, name=name + passing(source, target)
    )


def passing(source: NDArrayBase, target: NDArrayBase) -> str:
    """Return the suffix of a copy's name in traces, which tells whether a copy between two GPUs is direct."""
    copy_route = way(source.context, target.context)
    return "" if not copy_route else " (peer access)" if copy_route == PEER else " (through the host)"


def on_context(array: Array, context: Context) -> Array:
    """Return ``array`` if it is on ``context``, else a copy there."""
    if array.context == context:
        return array
    out = pending(array.__class__, context, array.shape, array.np_dtype, "copy")
    copy_into(array, out)
    return out


def from_host(kind: type[Array], values: RawArray, context: Context) -> Array:
    """Make a new array on ``context`` with a copy of ``values``; return when they have been read."""
    out = kind(ARRAY_CHUNK.get()(context, values.nbytes), values.shape, values.dtype)
    if values.size:
        if is_device(context):
            # No launch around it: Device.copy enqueues by itself.
            fill = computing(device.get(context).copy, [out, KernelValue(np.array(values, order="C"))])
            engine.get().push(fill, (), (out.var,), context, prop=FnProperty.COPY_TO_GPU, name="array")
        else:
            # No other code has the new array yet: every operation pushed later sees the values that are filled in here.
            np.copyto(out.raw(), values)
    return out


def route(source: Context, target: Context, *, same_dtype: bool = True) -> tuple[FnProperty, Context]:
    """Return (queue, context to run on) of a copy from ``source`` to ``target``."""
    from_device, to_device = is_device(source), is_device(target)
    if from_device:
        if to_device and source == target and not same_dtype:
            return FnProperty.NORMAL, source
        return (FnProperty.NORMAL if source == target else FnProperty.COPY_FROM_GPU), source
    if to_device or target.device_type == "file":
        return FnProperty.COPY_TO_GPU, target
    return (FnProperty.COPY_FROM_GPU if source.device_type == "file" else FnProperty.NORMAL), source


def is_device(context: Context) -> bool:
    """Return whether a context has its own streams: ``gpu`` and ``sim``."""
    return context.device_type in ("gpu", "sim")


def device_end(source: Context, target: Context) -> Context:
    """Return the end whose device makes the copy."""
    return source if is_device(source) else target


def _cast(target: RawArray, source: RawArray) -> None:
    """Copy on one array module, casting."""
    if isinstance(target, np.ndarray):
        with np.errstate(all="ignore"):
            np.copyto(target, source, casting="unsafe")
    else:
        target[...] = source


def _transfer(target_device: Device, target: RawArray, source: RawArray) -> None:
    """Copy between contexts. Casts between NumPy arrays are direct; others use a temporary on the source's context."""
    if source.dtype == target.dtype:
        target_device.copy(target, source)
    elif isinstance(source, np.ndarray) and isinstance(target, np.ndarray):
        target_device.launch(partial(_cast, target, source))
    else:
        target_device.copy(target, source.astype(target.dtype))
