"""Devices, streams, events and graphs of the stand-in, and the clocks by which they are ordered.

Work runs in the call that enqueues it, so a missing event never shows as a wrong value. It shows as a
:class:`~tests.standin_cupy.machine.StreamRaceError` instead: every access to device memory is stamped with its stream
and its place there (``memory.py``), and every stream knows how far into the other streams it has waited. What the host
has waited for counts for all streams, because the work of a later call starts later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.standin_cupy.machine import DEVICES, Clock, CUDARuntimeError, ids, lock, machine, merge, thread
from tests.standin_cupy.meter import meter
from weftplan.locks import members


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
        not_while_capturing("Device.synchronize")
        meter.syncs["Device.synchronize"] += 1
        with lock:
            for stream in members(machine.streams):
                if stream.device_id == self.id:
                    merge(machine.host, stream.now())

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


class Stream:
    """``cupy.cuda.Stream``."""

    null: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        machine.check()
        self.device_id = thread.device
        self.ptr = 0 if null else next(ids)
        self.key = -1 - self.device_id if null else self.ptr
        self.count = 0
        self.seen: Clock = {}
        self.priority = priority
        self.captured: list[Any] | None = None
        self.broken = ""
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
        with lock:
            merge(machine.host, self.now())
        return True

    def synchronize(self) -> None:
        """Block the host until the stream is empty."""
        machine.check()
        not_while_capturing("Stream.synchronize")
        meter.syncs["Stream.synchronize"] += 1
        with lock:
            merge(machine.host, self.now())

    def record(self, event: Event | None = None) -> Event:
        """An event behind the work so far."""
        made = event or Event()
        made.record(self)
        return made

    def wait_event(self, event: Event) -> None:
        """Later work starts after ``event``."""
        machine.check()
        not_while_capturing("wait_event")
        assert isinstance(event, Event), f"wait_event takes an Event, got {event!r}"
        with lock:
            merge(self.seen, event.clock)

    def begin_capture(self, mode: int | None = None) -> None:
        """From now on work is not run but kept, until :meth:`end_capture`."""
        machine.check()
        if self.ptr == 0:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: the default stream cannot be captured")
        if self.captured is not None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream is being captured already")
        self.captured, self.broken = [], ""
        thread.capturing = self
        meter.thread.capturing = meter.thread.silent = True

    def is_capturing(self) -> bool:
        """Whether work is kept instead of run."""
        return self.captured is not None

    def end_capture(self) -> Graph:
        """What has been kept, as a graph."""
        calls, self.captured = self.captured, None
        thread.capturing = None
        meter.thread.capturing = meter.thread.silent = False
        if calls is None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream is not being captured")
        if self.broken:
            raise CUDARuntimeError(f"cudaErrorStreamCaptureInvalidated: because of {self.broken}")
        return Graph(calls, self.device_id)


def not_while_capturing(what: str) -> None:
    """Refuse what CUDA refuses while a stream is captured; the capture is spoiled."""
    if thread.capturing is not None:
        thread.capturing.broken = what
        raise CUDARuntimeError(
            f"cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing ({what})"
        )


def capturable(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that enqueues work: while a stream is captured it is checked, and kept with its arguments."""

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        stream = thread.capturing
        if stream is None or thread.inside:
            return call(*args, **kwargs)
        thread.inside = True
        try:
            result = call(*args, **kwargs)
        finally:
            thread.inside = False
        stream.captured.append((call, args, kwargs))
        return result

    return wrapper


class Graph:
    """``cupy.cuda.graph.Graph``: calls with the arguments that they had, run again at each launch."""

    def __init__(self, calls: list[Any], device_id: int) -> None:
        self._calls = calls
        self._device_id = device_id

    def launch(self, stream: Stream | None = None) -> None:
        """Enqueue everything, as one launch."""
        machine.check()
        not_while_capturing("graph launch")
        where = stream or get_current_stream()
        meter.launch("graph")
        with Device(self._device_id), where, _silently():
            for call, args, kwargs in self._calls:
                call(*args, **kwargs)


@contextmanager
def _silently() -> Iterator[None]:
    meter.thread.silent = True
    try:
        yield
    finally:
        meter.thread.silent = False


class Event:
    """``cupy.cuda.Event``."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        machine.check()
        self.device_id = thread.device
        self.clock: Clock = {}
        self.timed = not disable_timing
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work of ``stream`` so far; an event belongs to the device that was current when it was made."""
        where = stream or get_current_stream()
        if where.device_id != self.device_id:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle: the event and the stream are of different devices")
        with lock:
            self.clock = where.now()
            self.time = machine.clock

    @property
    def done(self) -> bool:
        """Work runs at once; the host learns of it here."""
        machine.check()
        with lock:
            merge(machine.host, self.clock)
        return True

    def synchronize(self) -> None:
        """Block the host until the event has passed."""
        machine.check()
        not_while_capturing("Event.synchronize")
        meter.syncs["Event.synchronize"] += 1
        with lock:
            merge(machine.host, self.clock)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds between two events that have passed."""
    if not (start_event.timed and end_event.timed):
        raise CUDARuntimeError("cudaErrorInvalidResourceHandle: an event was made without timing")
    return end_event.time - start_event.time


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
