"""Short deferral of Ctrl-C on the main thread, for code that an interrupt would corrupt.

The interpreter calls signal handlers between bytecodes. A function that must not be interrupted replaces the SIGINT
handler while it runs, then calls the deferred handler. Only handlers written in Python are deferred; other signals are
not, except by :func:`signals_deferred`.
"""

from __future__ import annotations

import os
import threading
from _signal import SIGINT, getsignal, valid_signals  # type: ignore[import-not-found]  # `signal` takes 10 µs
from _signal import signal as set_handler
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import get_ident
from time import perf_counter_ns
from typing import Any

PATIENCE_NS = 50_000_000
"""After this time a deferred interrupt is raised on arrival, because only a user function takes this long."""


NEVER = 1 << 62
"""Value of ``since`` for code that is never interrupted."""


class _Clock(threading.local):
    """Start of the current shielded section, per thread; other threads set it without a shield."""

    since = 0


clock = _Clock()


class Shield:
    """Context manager that defers Ctrl-C on the main thread, and the handler that does so.

    The only instance is ``shield``; nested sections use ``_Inner``.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        """The replaced handler. Never cleared, as a shielded function may later restore the shield as the old one."""
        self._up = False
        self.held = False
        """Whether an interrupt is pending."""

    def __call__(self, number: int, frame: object) -> None:
        if not self._up or perf_counter_ns() - clock.since > PATIENCE_NS:
            self._handler(number, frame)
        else:
            self.held = True

    def __enter__(self) -> None:
        handler = getsignal(SIGINT)
        if callable(handler):
            if handler is not self:  # otherwise the user restored the shield, see above
                self._handler = handler
            clock.since = perf_counter_ns()
            self._up = True
            try:  # noqa: SIM105  # `suppress` is slow
                set_handler(SIGINT, self)
            except ValueError:  # the main thread of a subinterpreter receives no signals
                pass

    def __exit__(self, *_: object) -> None:
        if not self._up:
            return
        self._up = False
        if getsignal(SIGINT) is self:  # otherwise the function installed another handler, which stays
            set_handler(SIGINT, self._handler)
        if self.held:
            self.release()

    def release(self) -> None:
        """Call the handler for the deferred interrupt."""
        self.held = False
        self._handler(SIGINT, None)


class _Inner:
    """Nested section on the main thread: restarts the time, then the outer section goes on."""

    def __init__(self) -> None:
        self._outer = 0

    def __enter__(self) -> None:
        self._outer, clock.since = clock.since, perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        clock.since = self._outer
        if shield.held and perf_counter_ns() - clock.since > PATIENCE_NS:
            shield.release()


class _Undisturbed(threading.local):
    """Context manager that defers interrupts in shielded code without a time limit."""

    def __init__(self) -> None:
        self._saved: list[int] = []

    def __enter__(self) -> None:
        self._saved.append(clock.since)
        clock.since = NEVER

    def __exit__(self, *_: object) -> None:
        clock.since = self._saved.pop()
        if shield.held and perf_counter_ns() - clock.since > PATIENCE_NS:
            shield.release()


undisturbed = _Undisturbed()
shield = Shield()
_NONE: AbstractContextManager[None] = nullcontext()
_main = threading.main_thread().ident
"""The main thread. A variable of the module, because every shielded section reads it; only a fork replaces it."""


def _forked() -> None:
    global _main
    _main = get_ident()  # the forking thread is the main thread of the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def unbroken() -> None:
    """Remove the time limit of the current shielded section, for example on a loaded machine.

    Only for sections without user code. A nested section has its own time limit.
    """
    clock.since = NEVER


def shielded() -> AbstractContextManager[None]:
    """Return a context manager that defers an interrupt of the main thread to its end. No effect on other threads.

    Raises:
        KeyboardInterrupt: at the end of the block, or before it has begun.
    """
    if get_ident() != _main:
        return _NONE
    # An interrupt, or a function that restores the shield, can leave one condition without the other.
    return _Inner() if shield._up and getsignal(SIGINT) is shield else shield


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer every signal handler written in Python to the end of the block. No effect on threads but the main thread.

    For rare sections: it costs about 15 microseconds. Handlers get no frame.
    """
    handlers: dict[int, Any] = {}
    arrived: list[int] = []

    def note(number: int, frame: object) -> None:
        arrived.append(number)

    def restore() -> None:
        try:
            for number in list(handlers):
                # Forgotten first: the restored handler may raise at once, and the others are restored all the same.
                handler = handlers.pop(number)
                if getsignal(number) is note:
                    set_handler(number, handler)
        finally:
            if handlers:
                restore()

    def deliver() -> None:
        try:
            while arrived:
                number = arrived.pop(0)
                originals[number](number, None)
        finally:
            if arrived:
                deliver()

    try:
        for number in valid_signals() if get_ident() == _main else ():
            handler = getsignal(number)
            if callable(handler):
                handlers[number] = handler
                try:
                    set_handler(number, note)
                except ValueError:  # the main thread of a subinterpreter receives no signals
                    del handlers[number]
        yield
    finally:
        originals = dict(handlers)
        try:
            restore()
        finally:
            deliver()
