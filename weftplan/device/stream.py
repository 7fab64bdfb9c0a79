"""The current stream of each thread, and the work that it enqueues: ``with stream:`` and ``with work:`` set them.

This file owns a stack of each per thread; other threads never see them. ``Device.launch`` and ``Device.copy`` ask for
the stream, streams whose work fails later ask for the work.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weftplan.device.base import Event, Stream
from weftplan.errors import DeviceError

_local = threading.local()


def current_stream() -> Stream | None:
    """Return the innermost ``with stream:`` of this thread, or None: the device's default stream."""
    stack: list[Stream] | None = getattr(_local, "stack", None)
    return stack[-1] if stack else None


def push_stream(stream: Stream) -> None:
    """Make ``stream`` current in this thread."""
    stack: list[Stream] | None = getattr(_local, "stack", None)
    if stack is None:
        stack = _local.stack = []
    stack.append(stream)


def pop_stream(stream: Stream) -> None:
    """Undo the matching :func:`push_stream`; raises DeviceError when streams are left in the wrong order."""
    stack: list[Stream] = getattr(_local, "stack", [])
    if not stack or stack[-1] is not stream:
        raise DeviceError(f"{stream!r} is not the current stream of this thread: leave `with stream:` blocks in order")
    stack.pop()


def current_work() -> Any:
    """The innermost ``with work:`` of this thread, or None."""
    stack: list[Any] | None = getattr(_local, "work", None)
    return stack[-1] if stack else None


def push_work(work: Any) -> None:
    """Make ``work`` that of this thread."""
    stack: list[Any] | None = getattr(_local, "work", None)
    if stack is None:
        stack = _local.work = []
    stack.append(work)


def pop_work() -> None:
    """Undo the last :func:`push_work`."""
    _local.work.pop()


class NoWork:
    """The work of an operation on a device that does not tell whose an error is: nothing is noted of it."""

    __slots__ = ()

    def record(self, stream: Stream, *of: object) -> Event:
        """An event after what ``stream`` has been given so far."""
        return stream.record()

    def __enter__(self) -> NoWork:
        return self

    def __exit__(self, *exc: object) -> None:
        return


NO_WORK = NoWork()


@contextmanager
def no_stream() -> Iterator[None]:
    """Within the ``with`` block this thread has no current stream: its launches finish before they return."""
    stack: list[Stream] | None = getattr(_local, "stack", None)
    _local.stack = []
    try:
        yield
    finally:
        _local.stack = [] if stack is None else stack
