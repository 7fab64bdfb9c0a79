"""Ending a search early, with the best that it has found.

Searches ask :func:`asked` between two prices. A caller with a reason to end them, such as a signal handler of the
command line, calls :func:`stop`; any thread may. Nothing else in the planner depends on time: without a call of
``stop`` equal questions get equal plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_asked: list[bool] = []


def stop() -> None:
    """Let the searches of this process end with their best results; outside of :func:`stoppable` nothing happens."""
    _asked[:] = [True] * len(_asked)


def asked() -> bool:
    """Whether a search is to end now."""
    return True in _asked


@contextmanager
def stoppable() -> Iterator[None]:
    """Return a ``with`` block whose searches may be stopped."""
    _asked.append(False)
    try:
        yield
    finally:
        _asked.pop()
