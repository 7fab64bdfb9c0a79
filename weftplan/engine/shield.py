"""A short delay of Ctrl-C on the main thread, for code that an interrupt would corrupt.

The interpreter calls signal handlers between any two bytecodes of a certain kind, so a function that must not be broken
off replaces the handler of SIGINT while it runs, and raises afterwards what the handler would have raised. Only for
handlers written in Python: others raise nothing. Other signals' handlers are not held back.
"""

from __future__ import annotations

import os
import threading
from _signal import SIGINT, getsignal  # type: ignore[import-not-found]  # `signal` makes enumerations of it: 10 µs
from _signal import signal as set_handler
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from time import perf_counter_ns
from typing import Any

PATIENCE_NS = 50_000_000
"""Held back longer than this, an interrupt is raised where it comes: what takes so long is a user's function."""


NEVER = 1 << 62
"""``since`` of what is not interrupted however long it takes."""


class _Clock(threading.local):
    """When what is shielded on this thread began; set anew for each part. Other threads use it without a shield, and
    must not change how long the main thread holds back."""

    since = 0


clock = _Clock()


class Shield:
    """A context manager for the main thread; there is one, ``shield``, and it is not entered twice (see ``_Inner``)."""

    def __init__(self) -> None:
        self._handler: Any = None
        """What was installed before; kept, since a shielded function may put the shield back later as what it found."""
        self._up = False
        self.held = False
        """An interrupt has come and waits."""

    def __call__(self, number: int, frame: object) -> None:
        if not self._up or perf_counter_ns() - clock.since > PATIENCE_NS:
            self._handler(number, frame)
        else:
            self.held = True

    def __enter__(self) -> None:
        handler = getsignal(SIGINT)
        if callable(handler):
            if handler is not self:  # else it has been put back, see above
                self._handler = handler
            clock.since = perf_counter_ns()
            self._up = True
            try:  # noqa: SIM105  # `suppress` is slow
                set_handler(SIGINT, self)
            except ValueError:  # the main thread of a subinterpreter gets no signals
                pass

    def __exit__(self, *_: object) -> None:
        if not self._up:
            return
        self._up = False
        if getsignal(SIGINT) is self:  # or the function has installed another, which stays
            set_handler(SIGINT, self._handler)
        if self.held:
            self.release()

    def release(self) -> None:
        """Raise what was held back."""
        self.held = False
        self._handler(SIGINT, None)


class _Inner:
    """The shield within what is shielded already, on the main thread: it begins anew, then the outer part goes on."""

    def __init__(self) -> None:
        self._outer = 0

    def __enter__(self) -> None:
        self._outer, clock.since = clock.since, perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        clock.since = self._outer
        if shield.held and perf_counter_ns() - clock.since > PATIENCE_NS:
            shield.release()


class _Undisturbed(threading.local):
    """A context manager in which nothing that is shielded is interrupted, however long it takes."""

    def __init__(self) -> None:
        self._kept: list[int] = []

    def __enter__(self) -> None:
        self._kept.append(clock.since)
        clock.since = NEVER

    def __exit__(self, *_: object) -> None:
        clock.since = self._kept.pop()
        if shield.held and perf_counter_ns() - clock.since > PATIENCE_NS:
            shield.release()


undisturbed = _Undisturbed()
shield = Shield()
_NONE: AbstractContextManager[None] = nullcontext()
_main = threading.main_thread().ident


def _forked() -> None:
    global _main
    _main = get_ident()  # whoever forks is the main thread of the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def unbroken() -> None:
    """In a shielded block: hold back what comes from here on however long it takes, as on a machine that is busy with
    other things. Only where no function of a user runs; an inner block that is shielded has its own time."""
    clock.since = NEVER


def shielded() -> AbstractContextManager[None]:
    """``with shielded():`` an interrupt of the main thread comes after the block; nothing on other threads.

    Raises:
        KeyboardInterrupt: at the end of the block, or before it has begun.
    """
    if get_ident() != _main:
        return _NONE
    # Either alone is what an interrupt, or a function that puts the shield back, has left.
    return _Inner() if shield._up and getsignal(SIGINT) is shield else shield
