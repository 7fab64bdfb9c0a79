"""The engine operation that exchanges all arrays of a bucket."""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.engine import FnProperty
from weftplan.engine import get as get_engine
from weftplan.errors import OutOfMemoryError
from weftplan.kvstore.distributed.exchange.tickets import OnComplete, Part
from weftplan.ndarray import NDArray, pushing
from weftplan.support.slots import MAKE_ROOM

OPERATION = "KVStoreExchange"

_INNER = 3
"""Functions of the package between the user and the engine, at least: the push of a part, and the store's own two."""


class BucketPart(Part):
    """Arrays on the host and their results: an operation that ends when they have been exchanged.

    They share its fate: if one of the sources has failed, all results have.

    Args:
        sources: arrays that are exchanged, one for each result; may be the result itself.
        totals: the results.
    """

    __slots__ = ("_reads", "_sources", "_totals", "_writes")

    def __init__(self, sources: Sequence[NDArray], totals: Sequence[NDArray]) -> None:
        super().__init__()
        self._sources, self._totals = sources, totals
        self._writes = tuple([total.chunk.var for total in totals])
        written = {*self._writes}
        self._reads = tuple(dict.fromkeys([var for source in sources if (var := source.chunk.var) not in written]))

    def push(self, priority: int) -> None:
        """Begin the operation on this thread if no other uses the arrays, or push it; Ctrl-C must be held back.

        It runs even when a source has failed: the others wait for this process, and must be told.
        """
        if not priority and self._begin():
            return
        get_engine().push_async(
            self._start, self._reads, self._writes, prop=FnProperty.NO_SKIP, priority=priority, name=OPERATION
        )

    def _begin(self) -> bool:
        if MAKE_ROOM.value is not None:
            return False
        for array in (*self._sources, *self._totals):
            if array.ready is None and not array.chunk.allocated:
                return False  # a thread that wants memory may have to wait for others
        end = get_engine().begin(self._start, self._reads, self._writes, OPERATION, _INNER)
        if end is None:
            return False
        try:
            self._arrive(end)  # nothing has failed, or it would not have begun
        except BaseException as error:
            self.arrive((), (), error, end)
        return True

    def _start(self, on_complete: OnComplete) -> None:
        """Let the sequencer have the arrays; the operation ends when they have been exchanged."""
        for source in self._sources:
            if (failure := source.var.failure) is not None:
                self.arrive((), (), failure.exception(), on_complete)
                return
        try:
            if MAKE_ROOM.value is None:
                self._arrive(on_complete)
            else:  # they may be offloaded, and stay in memory until the exchange is over
                pushing.holding([*self._sources, *self._totals], self._arrive)(on_complete)
        except OutOfMemoryError as error:
            self.arrive((), (), error, on_complete)

    def _arrive(self, on_complete: OnComplete) -> None:
        shares = [source.raw() for source in self._sources]
        totals = [total.raw() for total in self._totals]
        failures = [total.var.failure for total in self._totals if total.var.failure is not None]
        failed = next((one for one in failures if one.observed_seq is None), None)
        if failed is not None:  # it stays failed until the user was told
            error = failed.exception()
            self.arrive(shares, totals, None, lambda other=None: on_complete(other or error))
            return
        self.arrive(shares, totals, None, on_complete)

    def complete(self, error: BaseException | None) -> None:
        """Tell the engine, and drop the arrays."""
        self._sources = self._totals = ()
        super().complete(error)
        self.ticket = None  # whose exchange is this part's
