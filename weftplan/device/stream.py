"""The current stream and the current operation's work of each thread, set by ``with stream:`` and ``with work:``.

Both are thread-local stacks. ``Device.launch`` and ``Device.copy`` enqueue on the current stream; a simulated stream
attributes what it enqueues to the current work.
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
    """Return the stream of this thread's innermost ``with stream:``, or None, which means the default stream."""
    stack: list[Stream] | None = getattr(_local, "stack", None)
    return stack[-1] if stack else None


def push_stream(stream: Stream) -> None:
    """Make ``stream`` current in this thread."""
    stack: list[Stream] | None = getattr(_local, "stack", None)
    if stack is None:
        stack = _local.stack = []
    stack.append(stream)


def pop_stream(stream: Stream) -> None:
    """Undo the matching :func:`push_stream`; raises DeviceError if ``stream`` is not the current stream."""
    stack: list[Stream] = getattr(_local, "stack", [])
    if not stack or stack[-1] is not stream:
        raise DeviceError(f"{stream!r} is not the current stream of this thread: leave `with stream:` blocks in order")
    stack.pop()


def current_work() -> Any:
    """Return the work of this thread's innermost ``with work:``, or None."""
    stack: list[Any] | None = getattr(_local, "work", None)
    return stack[-1] if stack else None


def push_work(work: Any) -> None:
    """Make ``work`` the current work of this thread."""
    stack: list[Any] | None = getattr(_local, "work", None)
    if stack is None:
        stack = _local.work = []
    stack.append(work)


def pop_work() -> None:
    """Undo the last :func:`push_work`."""
    _local.work.pop()


class NoWork:
    """Placeholder for an operation's work on devices that do not attribute errors to operations."""

    __slots__ = ()

    def record(self, stream: Stream, *of: object) -> Event:
        """Return ``stream.record()``; further arguments are ignored."""
        return stream.record()

    def __enter__(self) -> NoWork:
        return self

    def __exit__(self, *exc: object) -> None:
        return


NO_WORK = NoWork()


@contextmanager
def no_stream() -> Iterator[None]:
    """Unset this thread's current stream inside the ``with`` block, so that its launches finish before they return."""
    stack: list[Stream] | None = getattr(_local, "stack", None)
    _local.stack = []
    try:
        yield
    finally:
        _local.stack = [] if stack is None else stack
