"""Tickets of exchanges, and calls that a thread waits for.

A :class:`Ticket` has one *part* for each operation that waits for it. The engine calls ``Part.arrive`` (on any thread)
when its arrays are ready; the driver answers by calling ``on_complete`` of the operation. The sequencer decides on
order and threads.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.group.group import Group
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.transport.wire import INLINE
from weftplan.kvstore.reduce import Array

OnComplete = Callable[..., None]
Exchange = Callable[[Group, Sequence[Array], Sequence[Array], str, "str | None"], Iterable[None]]
"""Called as (group, contiguous shares, contiguous arrays for results, description, failure or None) by the driver, who
waits at each step until there is none left."""

_nbytes = attrgetter("nbytes")


class Part:
    """Arrays of a ticket, and the engine's operation that waits for them.

    Attributes:
        shares: what this process has; none where it failed.
        arrays: where the results go; may be ``shares`` themselves.
    """

    __slots__ = ("_complete", "arrays", "arrived", "failure", "shares", "ticket")

    def __init__(self) -> None:
        self.arrived = False
        self._complete: OnComplete | None = None
        self.shares: Sequence[Array] = ()
        self.arrays: Sequence[Array] = ()
        self.failure: BaseException | None = None
        self.ticket: Ticket | None = None

    def arrive(
        self, shares: Sequence[Array], arrays: Sequence[Array], failure: BaseException | None, on_complete: OnComplete
    ) -> None:
        """The arrays may be exchanged now, or ``failure`` says why there are none; called once, by the engine."""
        self.shares, self.arrays, self.failure, self._complete = shares, arrays, failure, on_complete
        self.arrived = True
        ticket = self.ticket  # looked at behind `arrived`, as `put` looks at `arrived` behind it: one sees the other
        if ticket is not None and ticket.ready():
            ticket.ring()

    @property
    def nbytes(self) -> int:
        """Of what this process has."""
        return sum(map(_nbytes, self.shares))

    def complete(self, error: BaseException | None) -> None:
        """Tell the engine; arrays that had failed before keep their own error."""
        complete, self._complete = self._complete, None
        self.shares = self.arrays = ()
        if complete is not None:
            complete(self.failure or error)


class Ticket:
    """One exchange: what is exchanged, and how."""

    repairs = False

    def __init__(self, description: str, parts: Sequence[Part], exchange: Exchange) -> None:
        self.description = description
        self.parts = tuple(parts)
        self.exchange = exchange
        self.ring: Callable[[], None] = _nothing
        self._nbytes = -1

    def ready(self) -> bool:
        """All arrays are there, or have failed."""
        for part in self.parts:  # noqa: SIM110  # a generator costs more than the rest
            if not part.arrived:
                return False
        return True

    @property
    def small(self) -> bool:
        """Its arrays, which have arrived, travel within messages."""
        if self._nbytes < 0:
            nbytes = 0
            for part in self.parts:
                nbytes += part.nbytes
            self._nbytes = nbytes
        return self._nbytes <= INLINE

    def steps(self, group: Group) -> Iterable[None]:
        """Exchange the arrays of all parts as one."""
        part = self.parts[0]
        if len(self.parts) == 1 and part.failure is None:
            return self.exchange(group, part.shares, part.arrays, self.description, None)
        failed = next((part.failure for part in self.parts if part.failure is not None), None)
        failure = None if failed is None else f"{type(failed).__name__}: {failed}"
        shares = [share for part in self.parts for share in part.shares]
        arrays = [array for part in self.parts for array in part.arrays]
        return self.exchange(group, shares, arrays, self.description, failure)

    def tell(self, error: BaseException | None) -> None:
        """Tell every part's operation."""
        for part in self.parts:
            part.complete(error)


class Call:
    """Work that a thread waits for, behind all exchanges so far."""

    small = False
    description = "the work of a call"

    def __init__(self, work: Callable[[Group], object], *, repairs: bool) -> None:
        self._work, self.repairs = work, repairs
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def ready(self) -> bool:
        return True

    def steps(self, group: Group) -> Steps[None]:
        result = self._work(group)
        self.result = (yield from result) if inspect.isgenerator(result) else result

    def tell(self, error: BaseException | None) -> None:
        self.error = error
        self.done.set()


def give_up(item: Ticket | Call) -> None:
    """Let the others know that what has not arrived never will."""
    for part in item.parts if isinstance(item, Ticket) else ():
        if not part.arrived:
            part.arrive((), (), KVStoreError("its process ended before it was computed"), lambda error=None: None)


def _nothing() -> None:
    """Wake nobody."""
