"""Attribution of errors of simulated work that fails after its operation has returned.

A stream runs the work of many operations, so a failure must not spread to unrelated operations. Each operation
therefore knows the fault of its own work, on any stream, or of work whose results it used; every wait for the
operation's event reports it. All state changes under the lock of simulated work; the fault of a completed event does
not change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weftplan.device.base import Owner
from weftplan.device.stream import pop_work, push_work


class Fault:
    """An error of simulated work.

    ``owner`` is that of :meth:`weftplan.device.base.Stream.work`, or None for work without an owner; ``kept`` is the
    engine's failure for the fault, created at the first report, and knows the operations that it still ``blocks``.
    """

    __slots__ = ("error", "kept", "moot", "owner")

    def __init__(self, error: BaseException, owner: Owner | None) -> None:
        self.error = error
        self.owner = owner
        self.kept: Any = None
        self.moot = False
        """Of work that would not have run had what it was made of been known to have failed."""

    @property
    def untold(self) -> bool:
        """Whether a report is still due."""
        return self.kept is None and not self.moot

    def blocks(self, number: int) -> bool:
        """False when the user had been told before the operation with this number was pushed: it may overwrite."""
        return self.kept is None or bool(self.kept.blocks(number))


class SimWork:
    """Work of one operation: ``with work:`` attributes this thread's enqueued work to it."""

    __slots__ = ("_after", "_number", "_over", "_own", "owner")

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self._own: list[Fault] = []
        self._number = 0
        self._after: tuple[Any, ...] = ()
        """Simulated events, as in ``_over``."""
        self._over: tuple[Any, ...] = ()

    def fail(self, error: BaseException) -> Fault:
        """Note that a piece of this work has raised ``error``."""
        fault = Fault(error, self.owner)
        self._own.append(fault)
        return fault

    def fault(self) -> Fault | None:
        """Return, after all of it has run, the fault of its inputs or of overwritten work, or else its own."""
        read: list[Fault | None] = [event.fault for event in self._after]
        written: list[Fault | None] = [event.fault for event in self._over]
        inherited = next((fault for fault in read if fault), None) or next(
            (fault for fault in written if fault and fault.blocks(self._number)), None
        )
        self._after = self._over = ()  # an event that is kept keeps none of those before it
        if inherited is None:
            return self._own[0] if self._own else None
        for fault in self._own:
            fault.moot = True
        return inherited

    def record(self, stream: Any, number: int, after: Iterable[Any], over: Iterable[Any]) -> Any:
        """An event of the simulated ``stream`` that completes when this work has run, and then knows its fault."""
        self._number, self._after, self._over = number, tuple(after), tuple(over)
        return stream.record(self)

    def __enter__(self) -> SimWork:
        push_work(self)
        return self

    def __exit__(self, *exc: object) -> None:
        pop_work()
