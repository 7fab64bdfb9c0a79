"""Attribution of errors in simulated work to the operations that enqueued it.

A stream runs the work of many operations, and a failure must not spread to unrelated operations. The event at the end
of an operation's work therefore stores one fault: that of an operation whose results it used, or else of its own work.
All state changes under the global lock of simulated work; the fault of a completed event never changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weftplan.device.base import Owner
from weftplan.device.stream import pop_work, push_work


class SimFault:
    """An error of simulated work; implements :class:`weftplan.device.base.SimFault`."""

    __slots__ = ("error", "failure", "moot", "owner")

    def __init__(self, error: BaseException, owner: Owner | None) -> None:
        self.error = error
        self.owner = owner
        self.failure: Any = None
        self.moot = False
        """True if an input of the operation had failed too; only the input's fault is then reported."""

    @property
    def is_unreported(self) -> bool:
        """True if the error must still be reported to the user."""
        return self.failure is None and not self.moot

    def blocks(self, number: int) -> bool:
        """Return whether this fault also fails an operation with this push number that overwrites the failed result.

        False if the user had been notified of the error before that operation was pushed.
        """
        return self.failure is None or bool(self.failure.blocks(number))


class SimWork:
    """The work of one operation: work that this thread enqueues inside ``with work:``."""

    __slots__ = ("_faults", "_number", "_over", "_predecessors", "owner")

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self._faults: list[SimFault] = []
        self._number = 0
        self._predecessors: tuple[Any, ...] = ()
        """Simulated events of the operations whose results are read."""
        self._over: tuple[Any, ...] = ()
        """Simulated events of the operations whose results are overwritten."""

    def fail(self, error: BaseException) -> SimFault:
        """Store and return the fault for an ``error`` that part of this work raised."""
        fault = SimFault(error, self.owner)
        self._faults.append(fault)
        return fault

    def fault(self) -> SimFault | None:
        """Return the first fault of an input, of a blocking overwritten result, or of this work; None without one.

        To be called once, after all of this work has run. If the fault is inherited, own faults become ``moot``.
        """
        read: list[SimFault | None] = [event.fault for event in self._predecessors]
        written: list[SimFault | None] = [event.fault for event in self._over]
        inherited = next((fault for fault in read if fault), None) or next(
            (fault for fault in written if fault and fault.blocks(self._number)), None
        )
        self._predecessors = self._over = ()  # otherwise each event would keep all earlier events alive
        if inherited is None:
            return self._faults[0] if self._faults else None
        for fault in self._faults:
            fault.moot = True
        return inherited

    def record(self, stream: Any, number: int, predecessors: Iterable[Any], over: Iterable[Any]) -> Any:
        """Return an event at the end of this work on ``stream``; once complete it has the result of :meth:`fault`."""
        self._number, self._predecessors, self._over = number, tuple(predecessors), tuple(over)
        return stream.record(self)

    def __enter__(self) -> SimWork:
        push_work(self)
        return self

    def __exit__(self, *exc: object) -> None:
        pop_work()
