"""Items of the sequencer's queue: exchanges and blocking calls.

A :class:`Ticket` is one exchange with a :class:`Part` for each engine operation that waits for it. The engine calls
``Part.arrive`` on any thread as soon as the arrays of the operation are ready. After the exchange the driving thread
calls the operation's ``on_complete``. Order and threads are the sequencer's decision.
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
"""Called as (group, contiguous shares, contiguous arrays for results, description, failure or None). The driving thread
runs the steps to their end and waits at each."""

_nbytes = attrgetter("nbytes")


class Part:
    """Arrays of a ticket, and the engine operation that waits for their exchange.

    Attributes:
        shares: this process's summands; empty after a failure.
        arrays: destinations of the results; may be ``shares`` themselves.
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
        """Release the arrays for the exchange, or report the ``failure`` that left none; called once, by the engine."""
        self.shares, self.arrays, self.failure, self._complete = shares, arrays, failure, on_complete
        self.arrived = True
        # Here `arrived` is written before `ticket` is read; `Sequencer.put` writes `ticket` before it reads `arrived`.
        # So at least one of the two threads sees that the ticket is ready, and rings.
        ticket = self.ticket
        if ticket is not None and ticket.ready():
            ticket.ring()

    @property
    def nbytes(self) -> int:
        """Size of this process's shares."""
        return sum(map(_nbytes, self.shares))

    def complete(self, error: BaseException | None) -> None:
        """Complete the engine operation; arrays that failed before the exchange keep their own error."""
        complete, self._complete = self._complete, None
        self.shares = self.arrays = ()
        if complete is not None:
            complete(self.failure or error)


class Ticket:
    """One exchange: its arrays and the function that exchanges them."""

    repairs = False

    def __init__(self, description: str, parts: Sequence[Part], exchange: Exchange) -> None:
        self.description = description
        self.parts = tuple(parts)
        self.exchange = exchange
        self.ring: Callable[[], None] = _nothing
        self._nbytes = -1

    def ready(self) -> bool:
        """Return whether every part has arrived, with arrays or with a failure."""
        for part in self.parts:  # noqa: SIM110  # a generator costs more than the rest
            if not part.arrived:
                return False
        return True

    @property
    def small(self) -> bool:
        """Whether the arrays, all of which have arrived, are small enough to be sent within control messages."""
        if self._nbytes < 0:
            nbytes = 0
            for part in self.parts:
                nbytes += part.nbytes
            self._nbytes = nbytes
        return self._nbytes <= INLINE

    def steps(self, group: Group) -> Iterable[None]:
        """Return the steps of one exchange over the arrays of all parts."""
        part = self.parts[0]
        if len(self.parts) == 1 and part.failure is None:
            return self.exchange(group, part.shares, part.arrays, self.description, None)
        failed = next((part.failure for part in self.parts if part.failure is not None), None)
        failure = None if failed is None else f"{type(failed).__name__}: {failed}"
        shares = [share for part in self.parts for share in part.shares]
        arrays = [array for part in self.parts for array in part.arrays]
        return self.exchange(group, shares, arrays, self.description, failure)

    def tell(self, error: BaseException | None) -> None:
        """Complete the operation of every part."""
        for part in self.parts:
            part.complete(error)


class Call:
    """Work that runs after all exchanges queued so far, and that a thread waits for."""

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
    """Mark missing parts as failed, so that the other ranks hear that they will never arrive."""
    for part in item.parts if isinstance(item, Ticket) else ():
        if not part.arrived:
            part.arrive((), (), KVStoreError("its process ended before it was computed"), lambda error=None: None)


def _nothing() -> None:
    """Ring no bell."""
