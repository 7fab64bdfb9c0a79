"""Python's collector of cyclic garbage rests while a graph is read or bound.

Both make many objects that stay and no garbage in cycles, and the collector would look through them again and again as
their number grows: at 20,000 nodes for two fifths of the time. The collector belongs to the process, so it rests for
all threads, and each thread that has let it rest wakes it when it is done: at worst too early for another, which then
takes longer. Where the collector is off anyway it stays off. Any thread may call what :func:`resting` makes.
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
"""One item for each call that has let the collector rest: a child that a fork makes meanwhile has to wake it."""


def resting(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, during whose calls the collector rests.

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
            # Ctrl-C cannot come before the first call of a `finally` block where that is one of C.
            try:
                gc.enable()
            finally:
                _calls.pop()

    return call


def _wake_in_child() -> None:
    """In a child there is only the thread that forked: nobody else would wake the collector."""
    if _calls:
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_wake_in_child)
