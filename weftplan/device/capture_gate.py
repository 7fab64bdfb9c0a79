"""Keeps the captures of one GPU apart from calls that CUDA refuses, or that would spoil a capture, while it lasts.

CUDA refuses to wait for a device while any of its streams is captured, whichever thread asks, and the capture is lost.
So a capture waits for such calls to return, and such calls wait for the capture to end. A thread that captures passes:
its call is refused by CUDA, which is how :meth:`CupyDevice.capture` learns that the work cannot be captured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 10.0
"""Seconds that a capture waits for other threads."""


class CaptureGate:
    """Many calls outside of captures, or one capture."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._outside = 0
        self._wanted = 0
        """Threads that wait to capture; new calls wait for them, or a stream of calls would keep them off."""
        self._capturer: int | None = None
        self._depth = threading.local()

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Around a call that must not fall into another thread's capture."""
        me, depth = threading.get_ident(), getattr(self._depth, "value", 0)
        if self._capturer == me:
            yield
            return
        with self._changed:
            while self._capturer is not None or (self._wanted and not depth):
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
        """Around a capture. False: others have not left for :data:`PATIENCE_S` seconds, and there must be none."""
        end = time.monotonic() + PATIENCE_S
        with self._changed:
            self._wanted += 1
            try:
                while (self._capturer is not None or self._outside) and time.monotonic() < end:
                    self._changed.wait(end - time.monotonic())
                granted = self._capturer is None and not self._outside
                if granted:
                    self._capturer = threading.get_ident()
            finally:
                self._wanted -= 1
                self._changed.notify_all()
        try:
            yield granted
        finally:
            if granted:
                with self._changed:
                    self._capturer = None
                    self._changed.notify_all()
