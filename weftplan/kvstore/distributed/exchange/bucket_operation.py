"""The engine operation that exchanges all arrays of a bucket."""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.engine import FnProperty
from weftplan.engine import get as get_engine
from weftplan.kvstore.distributed.exchange.tickets import OnComplete, TicketPart
from weftplan.ndarray import NDArray, pushing
from weftplan.support.slots import MAKE_ROOM

OPERATION = "KVStoreExchange"

_INNER = 3
"""Minimum number of package frames between the user's call and :meth:`BucketPart._begin`'s call of the engine."""


class BucketPart(TicketPart):
    """An asynchronous engine operation that ends when the arrays of a bucket, all on the host, have been exchanged.

    If one of the sources has failed, all results fail.

    Args:
        sources: arrays to exchange, one for each result; may be the result itself.
        totals: arrays that receive the results.
    """

    __slots__ = ("_reads", "_sources", "_totals", "_writes")

    def __init__(self, sources: Sequence[NDArray], totals: Sequence[NDArray]) -> None:
        super().__init__()
        self._sources, self._totals = sources, totals
        self._writes = tuple([total.chunk.var for total in totals])
        written = {*self._writes}
        self._reads = tuple(dict.fromkeys([var for source in sources if (var := source.chunk.var) not in written]))

    def push(self, priority: int) -> None:
        """Start the operation on this thread if no other operation uses its arrays, else push it.

        The caller must defer Ctrl-C (:mod:`weftplan.engine.shield`).
        """
        if not priority and self._begin():
            return
        # NO_SKIP: run even if a source has failed, because the other processes wait for this part and must be notified.
        get_engine().push_async(
            self._start, self._reads, self._writes, prop=FnProperty.NO_SKIP, priority=priority, name=OPERATION
        )

    def _begin(self) -> bool:
        """Start the operation inline; return False if it must be pushed."""
        if MAKE_ROOM.value is not None:
            return False
        for array in (*self._sources, *self._totals):
            if array.ready is None and not array.chunk.allocated:
                return False  # allocating may wait for other operations, which this thread must not do here
        end = get_engine().begin(self._start, self._reads, self._writes, OPERATION, _INNER)
        if end is None:
            return False
        try:
            self._arrive(end)  # no source has failed: `begin` returns None after a failure
        except BaseException as error:
            self.arrive((), (), error, end)
        return True

    def _start(self, on_complete: OnComplete) -> None:
        """Hand the arrays, or the failure of a source, to the exchange; the engine calls this when they are ready."""
        try:
            for source in self._sources:
                if (failure := source.var.failure) is not None:
                    raise failure.exception()
            if MAKE_ROOM.value is None:
                self._arrive(on_complete)
            else:  # the arrays may be offloaded: keep them in memory until the exchange has ended
                pushing.holding([*self._sources, *self._totals], self._arrive)(on_complete)
        except BaseException as error:  # a part that never arrives would stop the queue for ever
            self.arrive((), (), error, on_complete)

    def _arrive(self, on_complete: OnComplete) -> None:
        shares = [source.raw() for source in self._sources]
        totals = [total.raw() for total in self._totals]
        failures = [total.var.failure for total in self._totals if total.var.failure is not None]
        failed = next((failure for failure in failures if failure.observed_seq is None), None)
        # Exchange all the same, so that the other ranks get this process's shares. A result whose failure the user has
        # not seen yet stays failed.
        if failed is not None:
            error = failed.exception()
            self.arrive(shares, totals, None, lambda other=None: on_complete(other or error))
            return
        self.arrive(shares, totals, None, on_complete)

    def complete(self, error: BaseException | None) -> None:
        """Complete the engine operation and drop the arrays."""
        self._sources = self._totals = ()
        super().complete(error)
        self.ticket = None  # breaks the reference cycle of ticket and part
