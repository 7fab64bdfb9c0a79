"""Ctrl-C during ``fit``: where an interrupt takes effect, and what it leaves.

An interrupt in a callback after a batch saves a checkpoint of that moment and is raised again (:func:`saving_first`).
:class:`StopAtBatchEnd` makes every first Ctrl-C arrive there, so that no update is interrupted.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def saving_first(save: Callable[[], None]) -> Iterator[None]:
    """Call ``save`` before a KeyboardInterrupt of the body goes on; the body must lie between two batches."""
    try:
        yield
    except KeyboardInterrupt:
        save()
        raise


class StopAtBatchEnd:
    """Handler that turns Ctrl-C into a stop between two batches, so that no update is interrupted.

    As a context manager it handles SIGINT; as a batch-end callback it raises KeyboardInterrupt after a signal. A second
    Ctrl-C interrupts immediately. It works only in the main thread and does nothing in other threads.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None
        self._installed = False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __enter__(self) -> StopAtBatchEnd:
        try:
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
            self._installed = True
        except ValueError:  # not the main thread
            self._installed = False
        return self

    def __exit__(self, *exc: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._previous)

    def __call__(self, param: object) -> None:
        if self.requested:
            raise KeyboardInterrupt
