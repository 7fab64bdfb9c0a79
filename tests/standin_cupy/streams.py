"""Devices, streams, events and graphs of the stand-in, and the clocks that order them.

Work runs in the call that enqueues it, so a missing event never leads to a wrong value. It raises a
:class:`~tests.standin_cupy.machine.StreamRaceError` instead. Every access to device memory is stamped with its stream
and its position there (``memory.py``), and every stream records how far into the other streams it has waited. A wait of
the host counts for all streams, because work of a later call starts later.
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
        """Make this device current."""
        thread.device = self.id

    def synchronize(self) -> None:
        """Wait for every stream; raise an error while one of them is captured, by any thread."""
        machine.check()
        not_while_capturing("Device.synchronize")
        mine = [stream for stream in members(machine.streams) if stream.device_id == self.id]
        for stream in mine:
            refuse(stream.captured, "Device.synchronize")
        meter.syncs["Device.synchronize"] += 1
        _arrive_at(*(stream.now for stream in mine))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return self.id

    def __int__(self) -> int:
        return self.id

    @property
    def attributes(self) -> dict[str, int]:
        """The attributes that weftplan reads."""
        return {"MultiProcessorCount": 132, "AsyncEngineCount": 3}

    @property
    def cublas_handle(self) -> int:
        """A cuBLAS handle."""
        machine.library("cuBLAS")
        return 1

    @property
    def compute_capability(self) -> str:
        """The compute capability of an H100."""
        return "90"


class Stream:
    """``cupy.cuda.Stream``."""

    null: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        machine.check()
        self.device_id = thread.device
        self.ptr = 0 if null else _pointer()
        self.key = -1 - self.device_id if null else next(ids)
        self.count = 0
        self.seen: Clock = {}
        self.priority = priority
        self.captured: Capture | None = None
        self._era = machine.era
        machine.streams.add(self)
        self._pointers = machine.pointers

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            self._pointers.append(self.ptr)

    def now(self) -> Clock:
        """Return the clocks after all work enqueued so far."""
        return {**self.seen, self.key: self.count}

    def __enter__(self) -> Stream:
        thread.streams.setdefault(self.device_id, []).append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        top = thread.streams[self.device_id].pop()
        assert top is self, "`with stream:` blocks left in the wrong order"

    def use(self) -> Stream:
        """Make this stream current until another stream is."""
        thread.streams[self.device_id] = [self]
        return self

    @property
    def done(self) -> bool:
        """True, because work runs when it is enqueued; reading it counts as a wait of the host."""
        if self._era is machine.era:
            not_while_capturing("Stream.done", self)
            _arrive_at(self.now)
        return True

    def synchronize(self) -> None:
        """Block the host until the stream is empty."""
        if self._era is machine.era:
            machine.check()
            not_while_capturing("Stream.synchronize", self)
            meter.syncs["Stream.synchronize"] += 1
            _arrive_at(self.now)

    def record(self, event: Event | None = None) -> Event:
        """Record and return an event after the work enqueued so far."""
        result = event or Event()
        result.record(self)
        return result

    def wait_event(self, event: Event) -> None:
        """Start later work after ``event``; an event of a capture adds this stream to the capture."""
        machine.check()
        assert isinstance(event, Event), f"wait_event takes an Event, got {event!r}"
        capture = event.capture
        if capture is None:
            if self.captured is not None:
                refuse(self.captured, "wait_event", "cudaErrorStreamCaptureIsolation: the event is of uncaptured work")
            with lock:
                merge(self.seen, event.clock)
        elif self.captured is None:
            self.captured = capture
            capture.joined[self.key] = self
        elif self.captured is capture and self is capture.origin:
            capture.returned.add(event.stream_key)

    def begin_capture(self, mode: int | None = None) -> None:
        """Record work instead of running it, whichever thread enqueues it, until :meth:`end_capture`."""
        machine.check()
        if self.ptr == 0:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: the default stream cannot be captured")
        if self.captured is not None:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream is being captured already")
        self.captured = Capture(self)
        thread.capturing = self

    def is_capturing(self) -> bool:
        """Return whether work is recorded instead of run."""
        return self.captured is not None

    def end_capture(self) -> Graph:
        """Return the captured work as a graph."""
        capture, self.captured = self.captured, None
        thread.capturing = None
        if capture is None or capture.origin is not self:
            raise CUDARuntimeError("cudaErrorIllegalState: the stream is not being captured")
        for stream in capture.joined.values():
            stream.captured = None
        if capture.broken:
            raise CUDARuntimeError(f"cudaErrorStreamCaptureInvalidated: because of {capture.broken}")
        if set(capture.joined) - capture.returned:
            raise CUDARuntimeError(
                "cudaErrorStreamCaptureUnjoined: a stream of the capture was not joined to its origin"
            )
        return Graph(capture.calls, self.device_id)


def _arrive_at(*clocks: Callable[[], Clock]) -> None:
    """The host has waited for the work before each of ``clocks``."""
    with lock:
        for clock in clocks:
            merge(machine.host, clock())
    machine.arrive()


def _pointer() -> int:
    """Return a handle for a new stream: the handle of a destroyed stream, if any."""
    try:
        return machine.pointers.pop()
    except IndexError:
        return next(ids)


class Capture:
    """The work enqueued on streams while they are captured."""

    def __init__(self, origin: Stream) -> None:
        self.origin = origin
        self.calls: list[Any] = []
        self.broken = ""
        self.joined: dict[int, Stream] = {}
        """Streams that have waited for an event of the capture, by key."""
        self.returned: set[int] = set()
        """Keys of the joined streams that the origin has waited for."""


def refuse(capture: Capture | None, what: str, why: str = "") -> None:
    """Invalidate a capture and raise an error; do nothing if ``capture`` is None."""
    if capture is not None:
        capture.broken = what
        why = why or "cudaErrorStreamCaptureUnsupported: operation not permitted when stream is capturing"
        raise CUDARuntimeError(f"{why} ({what})")


def not_while_capturing(what: str, stream: Stream | None = None) -> None:
    """Raise an error for a call that CUDA forbids during a capture, and invalidate the capture.

    The call is forbidden on a captured stream, in any thread, and in the thread that captures.
    """
    if stream is not None:
        refuse(stream.captured, what)
    if thread.capturing is not None:
        refuse(thread.capturing.captured, what)


def capturable(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call that enqueues work: while its stream is captured, the call is checked and recorded.

    The record contains the call's arguments.
    """

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if thread.inside:
            return call(*args, **kwargs)
        capture = next((x for x in (*args, *kwargs.values()) if isinstance(x, Stream)), get_current_stream()).captured
        if capture is None:
            return call(*args, **kwargs)
        thread.inside = meter.thread.capturing = meter.thread.silent = True
        try:
            result = call(*args, **kwargs)
        finally:
            thread.inside = meter.thread.capturing = meter.thread.silent = False
        capture.calls.append((call, args, kwargs))
        return result

    return wrapper


class Graph:
    """``cupy.cuda.graph.Graph``: recorded calls with their arguments, repeated at each launch."""

    def __init__(self, calls: list[Any], device_id: int) -> None:
        self._calls = calls
        self._device_id = device_id

    def launch(self, stream: Stream | None = None) -> None:
        """Enqueue all calls on one stream, as one launch."""
        machine.check()
        where = stream or get_current_stream()
        not_while_capturing("graph launch", where)
        meter.launch("graph")
        with Device(self._device_id), where, _silently():
            for call, args, kwargs in self._calls:
                # A stream among the arguments belongs to the capture.
                now = [where if isinstance(x, Stream) else x for x in args]
                call(*now, **{k: where if isinstance(x, Stream) else x for k, x in kwargs.items()})


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
        self.capture: Capture | None = None
        self.stream_key = 0
        self.timed = not disable_timing
        self.time = 0.0
        self._era = machine.era

    def record(self, stream: Stream | None = None) -> None:
        """Record the work of ``stream`` so far.

        The stream must belong to the device that was current when the event was created.
        """
        where = stream or get_current_stream()
        if where.device_id != self.device_id:
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle: the event and the stream are of different devices")
        with lock:
            self.capture, self.stream_key = where.captured, where.key
            self.clock = {} if where.captured is not None else where.now()
            self.time = machine.clock

    def _of_no_capture(self, what: str) -> None:
        not_while_capturing(what)
        refuse(self.capture, what, "cudaErrorCapturedEvent: the event was last recorded in a capturing stream")

    @property
    def done(self) -> bool:
        """True, because work runs when it is enqueued; reading it counts as a wait of the host."""
        if self._era is machine.era:
            machine.check()
            self._of_no_capture("Event.done")
            _arrive_at(lambda: self.clock)
        return True

    def synchronize(self) -> None:
        """Block the host until the event has passed."""
        if self._era is machine.era:
            machine.check()
            self._of_no_capture("Event.synchronize")
            meter.syncs["Event.synchronize"] += 1
            _arrive_at(lambda: self.clock)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Return the milliseconds between two completed events."""
    if not (start_event.timed and end_event.timed):
        raise CUDARuntimeError("cudaErrorInvalidResourceHandle: an event was made without timing")
    return end_event.time - start_event.time


def _null_stream(device: int) -> Stream:
    stream = machine.null_streams.get(device)
    if stream is None:
        with Device(device):
            stream = machine.null_streams[device] = Stream(null=True)
    return stream


def get_current_stream(device_id: int = -1) -> Stream:
    """Return this thread's current stream of the current device, or of ``device_id``."""
    device = thread.device if device_id < 0 else device_id
    stack = thread.streams.get(device)
    return stack[-1] if stack else _null_stream(device)
