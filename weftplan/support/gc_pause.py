"""A pause of Python's cyclic garbage collector while a graph is loaded or bound.

Loading and binding create many long-lived objects and no cyclic garbage. The collector would scan them repeatedly as
their number grows: at 20,000 nodes this took two fifths of the time. The collector belongs to the process, so the pause
holds for all threads. Each thread that has paused the collector enables it when done; if another thread is still
pausing, that thread only takes longer. A collector that the user has disabled stays disabled. Any thread may call
functions decorated with :func:`resting`.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_calls: list[None] = []
"""One item per call that has paused the collector; a child forked meanwhile has to enable it."""


def resting(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate ``function`` so that the collector is paused during its calls.

    >>> @resting
    ... def awake():
    ...     return gc.isenabled()
    >>> awake(), gc.isenabled()
    (False, True)
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        _calls.append(None)
        try:
            gc.disable()
            return function(*args, **kwargs)
        finally:
            # Ctrl-C cannot interrupt before the first call of a `finally` block if that is a C function.
            try:
                gc.enable()
            finally:
                _calls.pop()

    return call


def _wake_in_child() -> None:
    """Enable the collector in a forked child, whose only thread is the forking thread."""
    if _calls:
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_wake_in_child)
