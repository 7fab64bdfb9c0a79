"""The current stream of each thread: ``with stream:`` sets it, ``current_stream()`` reads it.

This file owns one stack of streams per thread; other threads never see it. ``Device.launch`` and ``Device.copy`` read
it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from weftplan.device.base import Stream
from weftplan.errors import DeviceError

_local = threading.local()


def current_stream() -> Stream | None:
    """The innermost ``with stream:`` of this thread, or None: the device's default stream."""
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


@contextmanager
def no_stream() -> Iterator[None]:
    """Within the ``with`` block this thread has no current stream: what it launches is over when the call returns."""
    stack: list[Stream] | None = getattr(_local, "stack", None)
    _local.stack = []
    try:
        yield
    finally:
        _local.stack = [] if stack is None else stack
