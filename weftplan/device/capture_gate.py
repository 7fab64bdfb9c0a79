"""Mutual exclusion between graph captures on one GPU and calls that would invalidate a capture.

While any stream of a device is captured, a call that waits for the device fails in CUDA, in any thread, and invalidates
the capture. A capture therefore waits until such calls have returned, and such calls wait until the capture has ended.
The capturing thread's own calls pass. CUDA then refuses the call, and :meth:`CupyDevice.capture` reports that the work
cannot be captured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 10.0
"""Maximum seconds that a capture waits for other threads' calls and captures to end."""


class CaptureGate:
    """A lock shared by any number of calls outside captures, or held by one capture."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        """Guards the fields below; notified when ``_outside`` falls to 0 or a capture ends."""
        self._outside = 0
        self._captures = 0
        """Threads that wait to capture. New outermost calls wait for them, so that captures do not starve."""
        self._capturer: int | None = None
        """Identifier of the capturing thread."""
        self._depth = threading.local()
        """Nesting depth of :meth:`outside` in this thread."""

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Wait until no other thread captures; keep other threads from capturing during the ``with`` block."""
        me, depth = threading.get_ident(), getattr(self._depth, "value", 0)
        if self._capturer == me:  # only this thread can have set it to `me`, so no lock is needed
            yield
            return
        with self._changed:
            # A nested call must not wait for `_captures`: the waiting capture in turn waits for the outer call.
            while self._capturer is not None or (self._captures and not depth):
                self._changed.wait()
            self._outside += 1
        self._depth.value = depth + 1
        try:
            yield
        finally:
            self._depth.value = depth
            with self._changed:
                self._outside -= 1
                self._changed.notify_all()

    @contextmanager
    def capturing(self) -> Iterator[bool]:
        """Wait at most :data:`PATIENCE_S` s for other calls and captures, and keep them out of the ``with`` block.

        Yields:
            False after the timeout; the caller must not capture then.
        """
        end = time.monotonic() + PATIENCE_S
        with self._changed:
            self._captures += 1
            try:
                while (self._capturer is not None or self._outside) and time.monotonic() < end:
                    self._changed.wait(end - time.monotonic())
                granted = self._capturer is None and not self._outside
                if granted:
                    self._capturer = threading.get_ident()
            finally:
                self._captures -= 1
                self._changed.notify_all()
        try:
            yield granted
        finally:
            if granted:
                with self._changed:
                    self._capturer = None
                    self._changed.notify_all()
