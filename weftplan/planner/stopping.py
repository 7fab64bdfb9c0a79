"""Ending a search early, with the best that it has found.

Searches ask :func:`asked` between two prices. Whoever has a reason to end them, such as a signal handler of the command
line, calls :func:`stop`; any thread may. Nothing else in the planner depends on when something happens: without a call
of ``stop`` equal questions get equal plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_asked: list[bool] = []


def stop() -> None:
    """Let the searches of this process end with what they have found; outside of :func:`stoppable` nothing happens."""
    _asked[:] = [True] * len(_asked)


def asked() -> bool:
    """Whether a search is to end now."""
    return True in _asked


@contextmanager
def stoppable() -> Iterator[None]:
    """What is planned in the block may be stopped; afterwards nothing is asked any more."""
    _asked.append(False)
    try:
        yield
    finally:
        _asked.pop()
