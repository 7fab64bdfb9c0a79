"""Copies between two GPUs: direct for pairs that passed a check, else through page-locked host memory.

A pair is checked once, at its first copy: the setting ``MXNET_ENABLE_GPU_P2P``, the driver, and then a copy of known
bytes, because on some machines (virtual machines, and some with an IOMMU) peer access is offered and brings wrong
bytes. Any thread may call these functions; the first copy of a pair waits for the check.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np

from weftplan import config
from weftplan.locks import ReentrantLock, whole_in_children

PEER = "peer access"
"""What :meth:`Peers.way` says of a pair that copies directly."""
_CHECKED = 1 << 16
_STAGE = 4 << 20


class Peers:
    """How one GPU copies to the others."""

    def __init__(self, place: Any) -> None:
        self._place = place
        self._lock = whole_in_children(ReentrantLock())
        self._ways: dict[int, str] = {}
        self._stages: dict[tuple[int, int], tuple[Any, Any]] = {}
        """By device and stream (its object: CUDA's handle may be a new stream's while copies of the old one are under
        way): page-locked memory, which the stream's copies use one after the other, and the event after the last."""
        self._left: deque[tuple[Any, Any]] = deque()
        """The same of streams that are gone. Finalizers append."""

    def way(self, other: Any) -> str:
        """Return :data:`PEER` if this GPU copies directly to the other, else the reason."""
        answer = self._ways.get(other.index)
        if answer is None:
            with self._lock:
                answer = self._ways.get(other.index)
                if answer is None:
                    answer = self._ways[other.index] = self._asked(other)
        return answer

    def _asked(self, other: Any) -> str:
        place, index = self._place, other.index
        runtime = place.xp.cuda.runtime
        if not config.process("MXNET_ENABLE_GPU_P2P"):
            return "MXNET_ENABLE_GPU_P2P is off"
        if not runtime.deviceCanAccessPeer(place.index, index):
            return "the driver offers no peer access"
        with place.xp.cuda.Device(place.index):
            try:
                runtime.deviceEnablePeerAccess(index)
            except runtime.CUDARuntimeError as error:
                if "PeerAccessAlreadyEnabled" not in str(error):
                    return f"peer access cannot be enabled: {error}"
        if self._brings_other_bytes(other):
            return "a check of peer access brought other bytes"
        return PEER

    def _brings_other_bytes(self, other: Any) -> bool:
        wanted = (np.arange(_CHECKED, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8)
        source, target = self._place.allocate(_CHECKED), other.allocate(_CHECKED)
        xp = self._place.xp
        with xp.cuda.Device(self._place.index):
            stream = xp.cuda.Stream(non_blocking=True)
            source.set(wanted, stream=stream)
            target.data.copy_from_device_async(source.data, _CHECKED, stream)
            received = target.get(stream=stream)
        return not np.array_equal(received, wanted)

    def staged(self, dst: Any, src: Any, stream: Any, pinned: Any) -> None:
        """Enqueue a copy through the host; ``pinned`` is the device that page-locked memory comes from.

        One piece of page-locked memory serves a stream: each copy out is enqueued before the next copy in.
        """
        to, of = (array.reshape(-1).view(np.uint8) for array in (dst, src))
        with self._lock:
            key = self._place.xp.cuda.runtime.getDevice(), id(stream)
            if key not in self._stages:
                self._stages[key] = self._new_stage(stream, pinned)
                weakref.finalize(stream, self._leave, key).atexit = False
            room, event = self._stages[key]
            for start in range(0, of.size, _STAGE):
                part = room[: min(_STAGE, of.size - start)]
                of[start : start + part.size].get(stream=stream, out=part, blocking=False)
                to[start : start + part.size].set(part, stream=stream)
            event.record(stream)

    def _leave(self, key: tuple[int, int]) -> None:
        self._left.append(self._stages.pop(key))

    def _new_stage(self, stream: Any, pinned: Any) -> tuple[Any, Any]:
        """Return (page-locked memory, event for the end of its copies) for a stream, which waits for the last stream's
        copies."""
        event = self._place.xp.cuda.Event(disable_timing=True)
        try:
            room, last = self._left.popleft()
        except IndexError:
            return pinned.allocate(_STAGE), event
        stream.wait_event(last)
        return room, event
