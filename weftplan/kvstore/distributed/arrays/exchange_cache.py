"""The exchange cache: recurring arrays, with the reads, writes and copies of their exchange.

Nothing of it keeps an array of the user alive.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from weakref import ref

from weftplan.engine import get as get_engine
from weftplan.engine.operation import searchable
from weftplan.engine.var import Var
from weftplan.kvstore.distributed.arrays.piece_copies import Known
from weftplan.ndarray import NDArray

_failure = attrgetter("failure")

MOST_GIVEN = 4
"""Rows of arrays that are known again: what is pushed, what is pulled."""


class Given:
    """Arrays of a call that were as they should be: they come again.

    Args:
        watched: vars of which none may have failed.
    """

    __slots__ = ("__weakref__", "_gone", "_places", "_refs", "_watched", "rounds")

    def __init__(self, arrays: Sequence[NDArray], watched: Sequence[Var]) -> None:
        self._places = list(map(id, arrays))
        self._gone: list[ref[NDArray]] = []
        """Told when one of them is: another object may be at its place then."""
        self._refs, self._watched = [ref(array, self._gone.append) for array in arrays], watched
        self.rounds: dict[bool | None, list[Round]] = {}
        """Of all buckets, where an updater runs and where none does; and of all as one."""

    def are(self, places: list[int]) -> bool:
        """Whether they are the objects with these ``id``: to look at them would bring each into the caches."""
        return places == self._places and not self._gone

    @property
    def whole(self) -> bool:
        """True where nothing has failed."""
        return not get_engine().has_failed or not any(map(_failure, self._watched))


Arrays = tuple[Given, Sequence[NDArray]]
"""What is known of the arrays of a call, and the arrays."""


class Round:
    """What follows from the arrays of an exchange: they come again at every step.

    Args:
        totals: results, arrays of the store.
        needed: vars of what is exchanged.
        reads, writes: vars of the operation.

    Attributes:
        added: vars of the arrays that made it wider.
        known: how they were moved the last time, where each array has memory that stays where it is.
        moved: whether there was such an exchange, of this or a wider one; in a list that all of them have.
        nbytes: of all results.
    """

    __slots__ = ("_wider", "added", "known", "moved", "nbytes", "needed", "reads", "totals", "writes")

    def __init__(
        self, totals: Sequence[NDArray], needed: Sequence[Var], reads: Sequence[Var], writes: Collection[Var]
    ) -> None:
        self.totals, self.needed, self.reads, self.writes = totals, needed, reads, searchable(writes)
        self.nbytes = sum([total.nbytes for total in totals])
        self.added: tuple[Var, ...] = ()
        self.known: Known | None = None
        self.moved = [False]
        self._wider: dict[ref[Given], Round] = {}

    def wider(self, given: Given, row: Sequence[NDArray]) -> Round:
        """With a row of arrays, those of ``given`` in this bucket, that are to become like the results, too."""
        key = ref(given)
        found = self._wider.get(key)
        if found is None:
            added = tuple([array.chunk.var for array in row])
            reads = tuple([var for var in self.reads if var not in added])
            found = Round(self.totals, self.needed, reads, (*self.writes, *added))
            found.added, found.moved = added, self.moved
            if len(self._wider) >= MOST_GIVEN:  # another thread may do the same
                self._wider.pop(next(iter(self._wider), key), None)
            self._wider[key] = found
        return found
