"""Items of the sequencer's queue: exchanges (:class:`Ticket`) and blocking calls (:class:`SequencedCall`).

A ticket has a :class:`TicketPart` for each engine operation that waits for the exchange. The engine calls
``TicketPart.arrive``, on any thread, as soon as the operation's arrays are ready. After the exchange, the driving
thread calls the operation's ``on_complete``. The sequencer decides the order of items and the thread that runs them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.group.group import RankGroup
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.transport.wire import INLINE
from weftplan.kvstore.fixed_order_sums import Array

OnComplete = Callable[..., None]
Exchange = Callable[[RankGroup, Sequence[Array], Sequence[Array], str, "str | None"], Iterable[None]]
"""Function of (group, contiguous shares, contiguous arrays for results, description, failure or None). It returns the
steps of the exchange: an iterator that yields whenever it has to wait, which the driving thread runs to its end."""

_nbytes = attrgetter("nbytes")


class TicketPart:
    """The arrays of an engine operation, and the operation itself, which waits for their exchange.

    Attributes:
        arrays: destinations of the results; may be ``shares`` themselves.
        arrived: whether :meth:`arrive` was called.
        failure: the error that keeps this process from providing its arrays; None without an error.
        shares: this process's summands; empty after a failure.
        ticket: the exchange of this part; None before it is queued.
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
        """Make the arrays available to the exchange, or report the ``failure`` that prevented them.

        The engine's operation calls this once. ``on_complete(error)`` completes the operation after the exchange.
        """
        # Publish in this order: another thread that sees `arrived` may read the arrays and complete the part.
        self.shares, self.arrays, self.failure, self._complete = shares, arrays, failure, on_complete
        self.arrived = True
        # Interleaving: this thread writes `arrived`, then reads `ticket`; `Sequencer.put` writes `ticket`, then reads
        # `arrived`. So at least one of the two threads sees both, finds the ticket ready, and rings.
        ticket = self.ticket
        if ticket is not None and ticket.ready():
            ticket.ring()

    def fail(self, error: BaseException) -> None:
        """Report an error to the exchange instead of arrays, without an operation to complete; no effect if arrived."""
        if not self.arrived:
            self.arrive((), (), error, _nothing)

    @property
    def nbytes(self) -> int:
        """Bytes of this process's shares."""
        return sum(map(_nbytes, self.shares))

    def complete(self, error: BaseException | None) -> None:
        """Complete the engine operation, with the part's own failure if it has one, else with ``error``."""
        complete, self._complete = self._complete, None
        self.shares = self.arrays = ()
        if complete is not None:
            complete(self.failure or error)


class Ticket:
    """One exchange: its description, the parts with its arrays, and the function that exchanges them."""

    repairs = False

    def __init__(self, description: str, parts: Sequence[TicketPart], exchange: Exchange) -> None:
        self.description = description
        self.parts = tuple(parts)
        self.exchange = exchange
        self.ring: Callable[[], None] = _nothing
        self._nbytes = -1

    def ready(self) -> bool:
        """Return whether all parts have arrived, with arrays or with a failure."""
        for part in self.parts:  # noqa: SIM110  # a generator costs more than the rest
            if not part.arrived:
                return False
        return True

    @property
    def small(self) -> bool:
        """Whether the arrays are small enough to be sent within messages. All parts must have arrived."""
        if self._nbytes < 0:
            nbytes = 0
            for part in self.parts:
                nbytes += part.nbytes
            self._nbytes = nbytes
        return self._nbytes <= INLINE

    def steps(self, group: RankGroup) -> Iterable[None]:
        """Return steps that exchange the arrays of all parts, or report the first failure of a part to all ranks."""
        part = self.parts[0]
        if len(self.parts) == 1 and part.failure is None:
            return self.exchange(group, part.shares, part.arrays, self.description, None)
        failed = next((part.failure for part in self.parts if part.failure is not None), None)
        failure = None if failed is None else f"{type(failed).__name__}: {failed}"
        shares = [share for part in self.parts for share in part.shares]
        arrays = [array for part in self.parts for array in part.arrays]
        return self.exchange(group, shares, arrays, self.description, failure)

    def tell(self, error: BaseException | None) -> None:
        """Complete the engine operations of all parts: with ``error``, or successfully if it is None."""
        for part in self.parts:
            part.complete(error)


class SequencedCall:
    """Work that runs after all exchanges queued so far, while the calling thread waits for ``done``."""

    small = False
    description = "the work of a call"

    def __init__(self, work: Callable[[RankGroup], object], *, repairs: bool) -> None:
        self._work, self.repairs = work, repairs
        self.completed = threading.Event()  # set last: a thread that sees it may read `result` and `error`
        self.result: Any = None
        self.error: BaseException | None = None

    def ready(self) -> bool:
        return True

    def steps(self, group: RankGroup) -> Steps[None]:
        result = self._work(group)
        self.result = (yield from result) if inspect.isgenerator(result) else result

    def tell(self, error: BaseException | None) -> None:
        self.error = error
        self.completed.set()


def give_up(item: Ticket | SequencedCall) -> None:
    """Mark missing parts of a ticket as failed, so that its exchange can run and notify the other ranks."""
    for part in item.parts if isinstance(item, Ticket) else ():
        part.fail(KVStoreError("its process ended before it was computed"))


def _nothing(error: BaseException | None = None) -> None:
    """Do nothing: the function ``ring`` of a ticket that is not in a queue, ``on_complete`` of no operation."""
