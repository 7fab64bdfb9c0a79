"""The engine operation that exchanges all arrays of a bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter, is_

from weftplan.engine import get as get_engine
from weftplan.errors import OutOfMemoryError
from weftplan.kvstore.distributed.arrays.exchange_cache import Given, Round
from weftplan.kvstore.distributed.arrays.piece_copies import Known
from weftplan.kvstore.distributed.exchange.tickets import OnComplete, Part
from weftplan.kvstore.distributed.group.group import Group
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.transport.wire import Kind
from weftplan.kvstore.reduce import Array
from weftplan.ndarray import NDArray, pushing
from weftplan.ops.compiled.exchange.rendezvous import DONE, NEW
from weftplan.support.slots import MAKE_ROOM

_failure, _ready = attrgetter("failure"), attrgetter("ready")

_INNER = 3
"""Functions of the package between the user and the engine, at least: who begins a part, and the store's own two."""


class JointPart(Part):
    """Results on the host, each with its source; :meth:`start` is the function of the operation for all of them.

    They share its fate: should one of their sources have failed, all of them have.

    Args:
        round: what follows from the arrays.
        sources: arrays on the host that are exchanged, one for each result; may be the result itself.
        add: makes the last of its arrays the sum of the others.
        rows: rows of arrays, one for each result, which are to become like the results; a source may be one of them.
        first: (result, terms): sums that make a source.
    """

    __slots__ = ("_add", "_first", "_rows", "_sources", "also", "round")

    kind = Kind.READY
    """Of the first message."""

    def __init__(
        self,
        round: Round,
        sources: Sequence[NDArray],
        add: Callable[..., None],
        rows: Sequence[Sequence[NDArray]] = (),
        first: Sequence[tuple[NDArray, Sequence[NDArray]]] = (),
    ) -> None:
        super().__init__()
        self.round, self._sources, self._add, self._first = round, sources, add, first
        self._rows = list(rows)
        self.also: list[Sequence[Array]] = []
        """Rows of raw arrays to be like the results; belongs to whoever drives, until the part is complete."""

    @classmethod
    def of(cls, result: NDArray, sources: Sequence[NDArray], add: Callable[..., None]) -> JointPart:
        """The sum of the sources, arrays on the host, is exchanged; the result where there is none."""
        reads, writes = tuple(dict.fromkeys([source.var for source in sources])), (result.var,)
        round = Round((result,), reads or writes, reads, writes)
        if len(sources) == 1:
            return cls(round, sources, add)
        return cls(round, (result,), add, first=[(result, sources)] if sources else ())

    def _arrays(self) -> list[NDArray]:
        terms = [array for _, terms in self._first for array in terms]
        return [*self._sources, *self.round.totals, *terms]

    def begin(self, name: str) -> bool:
        """Begin the operation on this thread, where nobody uses the arrays; Ctrl-C must be held back.

        False: nothing is done, and :meth:`start` is to be pushed.
        """
        round = self.round
        if MAKE_ROOM.value is not None:
            return False
        if not round.moved[0]:
            for array in self._arrays():
                if array.ready is None and not array.chunk.allocated:
                    return False  # who wants memory may have to wait for others
        end = get_engine().begin(self.start, round.reads, round.writes, name, _INNER)
        if end is None:
            return False
        if round.moved[0]:  # whoever needs the arrays themselves will look for them
            for row in self._rows:
                self.also.append(_raws_of(row))
            self.arrive((), (), None, end)
            return True
        try:
            self.arrive(*self._raws(), None, end)  # nothing has failed, or it would not have begun
        except BaseException as error:
            self.arrive((), (), error, end)
        return True

    def start(self, on_complete: OnComplete) -> None:
        """Let the sequencer have the arrays; the operation ends when they have been exchanged."""
        for var in self.round.needed:
            if var.failure is not None:
                self.arrive((), (), var.failure.exception(), on_complete)
                return
        try:
            if MAKE_ROOM.value is None:
                self._arrive(on_complete)
            else:
                rows = [array for row in self._rows for array in row]
                pushing.holding([*self._arrays(), *rows], self._arrive)(on_complete)
        except OutOfMemoryError as error:
            self.arrive((), (), error, on_complete)

    def _arrive(self, on_complete: OnComplete) -> None:
        shares, totals = self._raws()
        failures = [var.failure for var in self.round.writes if var.failure is not None]
        failed = next((one for one in failures if one.observed_seq is None), None)
        if failed is not None:  # it stays failed until somebody was told
            self.arrive(shares, totals, None, lambda error=None: on_complete(error or failed.exception()))
            return
        self.arrive(shares, totals, None, on_complete)

    def _raws(self) -> tuple[list[Array], list[Array]]:
        """What is exchanged and where the sums go; ``also`` is filled."""
        for result, terms in self._first:
            self._add([term.raw() for term in terms], result.raw())
        for row in self._rows:
            self.also.append(_raws_of(row))
        return _raws_of(self._sources), _raws_of(self.round.totals)

    def complete(self, error: BaseException | None) -> None:
        self._sources = self._first = ()
        self._rows, self.also = [], []
        super().complete(error)
        self.ticket = None  # whose exchange is this part's

    @property
    def over(self) -> bool:
        """True once the arrays have been exchanged, or lost."""
        return not self._sources

    @property
    def nbytes(self) -> int:
        return self.round.nbytes if self.failure is None else 0

    def sum(
        self, group: Group, shares: Sequence[Array], totals: Sequence[Array], what: str, failure: str | None
    ) -> Iterable[None]:
        """The exchange that gives all arrays the sum over processes; no steps where one call has made it."""
        known = self.round.known
        stage = NEW if known is None or failure is not None else group.again(known)
        if stage == DONE:
            return ()
        if not shares and failure is None:
            if stage == NEW:
                group.settle()
            late = known and known.late and known.late.places
            shares, totals = _raws_of(self._sources), late or _raws_of(self.round.totals)
        return self._sum(group, shares, totals, what, failure, known if stage else None)

    def _sum(
        self,
        group: Group,
        shares: Sequence[Array],
        totals: Sequence[Array],
        what: str,
        failure: str | None,
        begun: Known | None,
    ) -> Steps[None]:
        known = yield from group.sum(shares, totals, what, failure, self.also, begun, self.kind)
        if known is None or known.rows != 2 + len(self.also):
            return
        if all(map(_all_ready, (self._sources, self.round.totals, *self._rows))):
            self.round.known, self.round.moved[0] = known, True
            if known.late is not None:
                known.late.be_of(self.round.totals)

    def take(self, given: Given, row: Sequence[NDArray]) -> bool:
        """Let the operation, which is pending and which nobody drives meanwhile, write a row of arrays as ``also``.

        Args:
            given: whose arrays they are.
            row: arrays of the bucket, no var twice.

        Returns:
            False: nothing is done, and they are to be copied.
        """
        if MAKE_ROOM.value is not None or self.over:
            return False
        raws = list(map(_ready, row))
        if any(map(is_, raws, repeat(None))):
            return False
        wider = self.round.wider(given, row)
        if not get_engine().write_too(self, self.round.totals[0].chunk.var, wider.added, wider.writes):
            return False
        self.round = wider
        self.also.append(raws)
        return True


def _all_ready(arrays: Iterable[NDArray]) -> bool:
    return not any(map(is_, map(_ready, arrays), repeat(None)))


def _raws_of(arrays: Sequence[NDArray]) -> list[Array]:
    return list(map(_ready, arrays)) if _all_ready(arrays) else [array.raw() for array in arrays]
