"""Early end of searches, which then return their best result.

A search calls :func:`asked` between two prices. A caller ends it by :func:`stop`, from any thread, for example in a
signal handler. Nothing else in the planner depends on time: without a call of ``stop`` equal input gives equal plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_asked: list[bool] = []


def stop() -> None:
    """End the searches of this process with their best results; no effect outside of :func:`stoppable`."""
    _asked[:] = [True] * len(_asked)


def asked() -> bool:
    """Return whether a search has to end now."""
    return True in _asked


@contextmanager
def stoppable() -> Iterator[None]:
    """Return a ``with`` block whose searches may be stopped."""
    _asked.append(False)
    try:
        yield
    finally:
        _asked.pop()
