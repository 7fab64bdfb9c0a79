"""What is exchanged as one: the engine's operation for all arrays of a bucket, and calls whose arrays are known.

A call of a store names its keys at every step of training, and mostly the same arrays. What follows from the keys is
kept in a :class:`Call`, what follows from the arrays in the objects of ``rounds.py``: the first time makes them, later
times look only at what may have changed, with loops within the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

from weftplan.engine import get as get_engine
from weftplan.errors import OutOfMemoryError
from weftplan.kvstore.buckets import BucketRule
from weftplan.kvstore.copies import HOST
from weftplan.kvstore.distributed.group import Group
from weftplan.kvstore.distributed.membership import Steps
from weftplan.kvstore.distributed.moving import Known
from weftplan.kvstore.distributed.rounds import MOST_GIVEN, Arrays, Given, Round
from weftplan.kvstore.distributed.sequencer import OnComplete, Part
from weftplan.kvstore.keys import Key
from weftplan.kvstore.reduce import Array
from weftplan.ndarray import NDArray, pushing
from weftplan.ops.compiled.meeting import DONE, NEW

_failure, _ready = attrgetter("failure"), attrgetter("ready")

_INNER = 3
"""Functions of the package between the user and the engine, at least: who begins a part, and the store's own two."""

_MOST = 256
"""Calls of which a store keeps what follows from their keys."""


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
        if pushing.make_room is not None:
            return False
        if round.known is None:
            for array in self._arrays():
                if array.ready is None and not array.chunk.allocated:
                    return False  # who wants memory may have to wait for others
        end = get_engine().begin(self.start, round.reads, round.writes, name, _INNER)
        if end is None:
            return False
        if round.known is not None:  # whoever needs the arrays themselves will look for them
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
            if pushing.make_room is None:
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
        known = yield from group.sum(shares, totals, what, failure, self.also, begun)
        if known is None or known.rows != 2 + len(self.also):
            return
        if all(map(_all_ready, (self._sources, self.round.totals, *self._rows))):
            self.round.known = known
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
        if pushing.make_room is not None or self.over:
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


class Bucket:
    """Keys of a call that are exchanged as one.

    Attributes:
        places: of them among the keys of the call.
        part: of the last push of them.
    """

    __slots__ = ("_pick", "description", "keys", "part", "places")

    def __init__(self, places: Sequence[int], keys: Sequence[Key], description: str) -> None:
        self.places, self.keys, self.description = places, keys, description
        self._pick = itemgetter(*places)
        self.part: JointPart | None = None

    def of(self, arrays: Sequence[NDArray]) -> Sequence[NDArray]:
        """Those of the bucket, of one array for each key of the call."""
        return self._pick(arrays) if len(self.places) > 1 else (self._pick(arrays),)


class Call:
    """What follows from the keys of a call.

    Args:
        keys: no key twice.
        stored: what the store holds for each.
        rule: which keys are exchanged as one.
        number: of a key; the largest is exchanged first.
        described: a key and its array in words.
    """

    __slots__ = ("_given", "_kinds", "_merged", "_stored", "_written", "buckets", "keys", "rule")

    def __init__(
        self,
        keys: Sequence[Key],
        stored: Sequence[NDArray],
        rule: BucketRule,
        number: Callable[[Key], int],
        described: Callable[[Key, NDArray], str],
    ) -> None:
        self.keys, self._stored, self.rule = keys, stored, rule
        self._merged: Sequence[NDArray] = ()
        """Where an updater wants the sums, as soon as all have been there."""
        self._kinds = [key.__class__ for key in keys]
        self._written = {array.var for array in stored}
        self._given: list[Given] = []
        order = sorted(range(len(keys)), key=lambda place: -number(keys[place]))
        self.buckets = [
            Bucket(
                places,
                [keys[place] for place in places],
                f"sum {', '.join([described(keys[place], stored[place]) for place in places])}",
            )
            for places in rule.cut([(place, stored[place].nbytes, stored[place].dtype) for place in order])
        ]

    def holds(self, keys: Sequence[Any], stored: Any, rule: BucketRule) -> bool:
        """Whether it still is what follows from these keys, which equal its own."""
        if rule is not self.rule:
            return False
        if not all(map(is_, keys, self.keys)) and not all(map(is_, map(type, keys), self._kinds)):
            return False  # 1.0 is no key, but equals 1
        return all(map(is_, map(stored.__getitem__, keys), self._stored))

    def given(self, values: Any, *, listed: bool) -> Arrays | None:
        """The arrays of a call, by key, where there is one for each, on the host and as it should be; else None.

        None of them has failed, none is of a chunk that the store or another one of them is of.

        Args:
            values: of a user, anything.
            listed: the keys are a list, and so are the values.
        """
        if not listed:
            values = (values,)
        elif (values.__class__ is not list and values.__class__ is not tuple) or len(values) != len(self.keys):
            return None
        found = tuple(values)  # another thread may change a list
        places = list(map(id, found))
        for given in self._given:
            if given.are(places) and given.whole:
                return given, found
        return self._looked_at(found)

    def _looked_at(self, values: Sequence[Any]) -> Arrays | None:
        found, used = [], set()
        for value, stored in zip(values, self._stored, strict=True):
            array = value[0] if value.__class__ is list and len(value) == 1 else value
            if array.__class__ is not NDArray or array.shape != stored.shape:
                return None
            if array.dtype is not stored.dtype and array.dtype != stored.dtype:
                return None
            chunk = array.chunk
            var = chunk.var
            if var.failure is not None or stored.chunk.var.failure is not None:
                return None
            if chunk.context.device_type not in HOST:
                return None
            used.add(var)
            found.append(array)
        if len(used) < len(found) or not used.isdisjoint(self._written):
            return None
        for given in self._given:
            if given.are(list(map(id, found))):  # as lists of one array
                return given, found
        if len(self._given) == MOST_GIVEN:
            del self._given[0]
        given = Given(found, [*used, *self._written])
        self._given.append(given)
        return given, found

    def merges(self, merged: Mapping[Key, NDArray]) -> bool:
        """Whether there is a merge buffer for each key, on the host: sums for an updater are written there."""
        found, known = list(map(merged.get, self.keys)), self._merged
        if known and all(map(is_, found, known)):
            return True
        results = [array for array in found if array is not None and array.context.device_type in HOST]
        if len(results) < len(found):
            return False
        for given in self._given:
            given.rounds.pop(True, None)
        self._merged = results
        return True

    def rounds(self, given: Given, arrays: Sequence[NDArray], *, updates: bool) -> list[Round]:
        """What follows for each bucket where these, of ``given``, are pushed; ``updates``: an updater wants sums."""
        rounds = given.rounds.get(updates)
        if rounds is None:
            rounds, results = [], self._merged if updates else self._stored
            for bucket in self.buckets:
                totals = bucket.of(results)
                needed = tuple([array.chunk.var for array in bucket.of(arrays)])
                rounds.append(Round(totals, needed, needed, tuple([total.chunk.var for total in totals])))
            given.rounds[updates] = rounds
        return rounds


class Stored(dict[Key, NDArray]):
    """What a store has by key; ``version`` is another number after each change."""

    version = 0

    def __setitem__(self, key: Key, value: NDArray) -> None:
        self.version += 1
        super().__setitem__(key, value)


class Calls:
    """The calls of a store, by their keys.

    Args:
        number, described: as for :class:`Call`.
    """

    def __init__(self, number: Callable[[Key], int], described: Callable[[Key, NDArray], str]) -> None:
        self._number, self._described = number, described
        self._known: dict[tuple[Any, ...], Call] = {}
        self._last: tuple[Call | None, int] = None, 0
        """The last one, and the version of what was stored then."""

    def of(self, key: Any, stored: Stored, rule: BucketRule) -> Call | None:
        """The call of a key or a list of keys, of a user, anything; None where one of them is not stored, not on the
        host, or comes twice."""
        last, version = self._last
        if last is not None and version == stored.version and last.rule is rule and key.__class__ is list:
            keys = last.keys
            if len(key) == len(keys) and all(map(is_, key, keys)):
                return last
        version = stored.version
        found = self._looked_up(key, stored, rule)
        self._last = found, version  # at once, since several threads pull
        return found

    def _looked_up(self, key: Any, stored: Stored, rule: BucketRule) -> Call | None:
        keys = tuple(key) if key.__class__ is list or key.__class__ is tuple else (key,)
        try:
            known = self._known.get(keys)
        except TypeError:  # a list within a list
            return None
        if known is not None and known.holds(keys, stored, rule):
            return known
        if not keys or len(set(keys)) < len(keys):
            return None
        for key in keys:
            if (key.__class__ is not str and key.__class__ is not int) or key not in stored:
                return None
        values = [stored[key] for key in keys]
        if any(value.context.device_type not in HOST for value in values):
            return None
        if len(self._known) >= _MOST:
            self._known.clear()
        found = self._known[keys] = Call(keys, values, rule, self._number, self._described)
        return found
