"""Copies between two GPUs: direct for pairs that passed a check, else through page-locked host memory.

A pair is checked once, at its first copy: the setting ``MXNET_ENABLE_GPU_P2P``, then the driver, then a copy of known
bytes. The copy is needed because on some machines (virtual machines, or with an IOMMU) the driver offers peer access
that corrupts data. Any thread may call these functions; the first copy of a pair waits for the check.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import numpy as np

from weftplan import config
from weftplan.locks import ReentrantLock, consistent_in_children

PEER = "peer access"
"""Result of :meth:`Peers.way` for a pair that copies directly."""
_CHECKED = 1 << 16
"""Bytes of the copy that checks a pair of devices."""
_STAGE = 4 << 20
"""Bytes of a staging buffer; larger copies go through it in pieces."""


class Peers:
    """The peer-access checks and staging buffers of one GPU, for its copies to other GPUs."""

    def __init__(self, device: Any) -> None:
        self._device = device
        # Guards `_answers` and `_stages`.
        self._lock = consistent_in_children(ReentrantLock())
        self._answers: dict[int, str] = {}
        self._stages: dict[tuple[int, int], tuple[Any, Any]] = {}
        """By device and id of the stream object: page-locked staging buffer, and event at the end of its last copy."""
        # Not by CUDA's handle: a new stream may get the handle of a destroyed stream whose copies still run.
        self._free_stages: deque[tuple[Any, Any]] = deque()
        """Buffers and events of garbage-collected streams, for reuse. Finalizers append without a lock."""

    def way(self, other: Any) -> str:
        """Return :data:`PEER` if this GPU copies directly to device ``other``, else the reason why not."""
        answer = self._answers.get(other.index)
        if answer is None:
            with self._lock:
                answer = self._answers.get(other.index)
                if answer is None:
                    answer = self._answers[other.index] = self._check_peer(other)
        return answer

    def _check_peer(self, other: Any) -> str:
        device, index = self._device, other.index
        runtime = device.xp.cuda.runtime
        if not config.process("MXNET_ENABLE_GPU_P2P"):
            return "MXNET_ENABLE_GPU_P2P is off"
        if not runtime.deviceCanAccessPeer(device.index, index):
            return "the driver offers no peer access"
        with device.xp.cuda.Device(device.index):
            try:
                runtime.deviceEnablePeerAccess(index)
            except runtime.CUDARuntimeError as error:
                if "PeerAccessAlreadyEnabled" not in str(error):
                    return f"peer access cannot be enabled: {error}"
        if self._corrupts_bytes(other):
            return "a check of peer access brought other bytes"
        return PEER

    def _corrupts_bytes(self, other: Any) -> bool:
        expected = (np.arange(_CHECKED, dtype=np.uint32) * 2654435761 >> 13).astype(np.uint8)
        source, target = self._device.allocate(_CHECKED), other.allocate(_CHECKED)
        xp = self._device.xp
        with xp.cuda.Device(self._device.index):
            stream = xp.cuda.Stream(non_blocking=True)
            source.set(expected, stream=stream)
            target.data.copy_from_device_async(source.data, _CHECKED, stream)
            received = target.get(stream=stream)
        return not np.array_equal(received, expected)

    def staged(self, dst: Any, src: Any, stream: Any, pinned: Any) -> None:
        """Enqueue a copy through the host on ``stream``; ``pinned`` is the device that allocates page-locked memory."""
        to, of = (array.reshape(-1).view(np.uint8) for array in (dst, src))
        with self._lock:
            key = self._device.xp.cuda.runtime.getDevice(), id(stream)
            if key not in self._stages:
                self._stages[key] = self._new_stage(stream, pinned)
                weakref.finalize(stream, self._retire_stage, key).atexit = False
            buffer, event = self._stages[key]
            # One buffer suffices: the stream runs each copy out of the buffer before the next copy into it.
            for start in range(0, of.size, _STAGE):
                part = buffer[: min(_STAGE, of.size - start)]
                of[start : start + part.size].get(stream=stream, out=part, blocking=False)
                to[start : start + part.size].set(part, stream=stream)
            event.record(stream)

    def _retire_stage(self, key: tuple[int, int]) -> None:
        self._free_stages.append(self._stages.pop(key))

    def _new_stage(self, stream: Any, pinned: Any) -> tuple[Any, Any]:
        """Return (page-locked buffer, new event) for a stream.

        A collected stream's buffer is reused if there is one; ``stream`` then first waits for that stream's copies.
        """
        event = self._device.xp.cuda.Event(disable_timing=True)
        try:
            buffer, copied = self._free_stages.popleft()
        except IndexError:
            return pinned.allocate(_STAGE), event
        stream.wait_event(copied)
        return buffer, event
