"""What is exchanged as one: the engine's operation for all arrays of a bucket, and calls whose buckets are known.

A call of a store names its keys at every step of training, and what follows from the keys alone is always the same: a
:class:`Call` keeps it. The arrays may be others each time; what must hold for them is looked at each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, call, is_
from typing import Any
from weakref import ref

from weftplan.engine import get as get_engine
from weftplan.errors import OutOfMemoryError
from weftplan.kvstore.buckets import BucketRule
from weftplan.kvstore.copies import HOST
from weftplan.kvstore.distributed.group import Group
from weftplan.kvstore.distributed.membership import Steps
from weftplan.kvstore.distributed.sequencer import OnComplete, Part
from weftplan.kvstore.keys import Key
from weftplan.kvstore.reduce import Array
from weftplan.ndarray import NDArray, pushing

_failure = attrgetter("failure")

_GIVEN = 4
"""Rows of arrays that a call knows again: what is pushed, what is pulled."""

_MOST = 256
"""Calls of which a store keeps what follows from their keys."""


class JointPart(Part):
    """Results on the host, each with its sources; :meth:`start` is the function of the operation for all of them.

    They share its fate: should one of their sources have failed, all of them have.

    Args:
        results: (result, sources): the sum of the sources, arrays on the host, is exchanged; the result where there is
            none.
        needed: vars of what is exchanged.
        writes: vars of what the operation writes.
        add: makes the last of its arrays the sum of the others.
        also: rows of arrays, one for each result, which are to become like the results; a source may be one of them.
    """

    __slots__ = ("_add", "_needed", "_results", "_rows", "_writes", "also")

    def __init__(
        self,
        results: Sequence[tuple[NDArray, Sequence[NDArray]]],
        needed: Sequence[Any],
        writes: Sequence[Any],
        add: Callable[..., None],
        also: Sequence[Sequence[NDArray]] = (),
    ) -> None:
        super().__init__()
        self._results, self._needed, self._writes, self._add, self._rows = results, needed, writes, add, also
        self.also: list[Sequence[Array]] = []
        """Rows of raw arrays to be like the results; belongs to whoever drives, until the part is complete."""

    def begin(self, reads: Sequence[Any], writes: Sequence[Any], name: str) -> bool:
        """Begin the operation on this thread, where nobody uses the arrays; Ctrl-C must be held back.

        False: nothing is done, and :meth:`start` is to be pushed.
        """
        if pushing.make_room is not None:
            return False
        for result, sources in self._results:
            for array in (result, *sources):
                if array.ready is None and not array.chunk.allocated:
                    return False  # who wants memory may have to wait for others
        end = get_engine().begin(self.start, reads, writes, name)
        if end is None:
            return False
        try:
            self.arrive(*self._raws(), None, end)  # nothing has failed, or it would not have begun
        except BaseException as error:
            self.arrive((), (), error, end)
        return True

    def start(self, on_complete: OnComplete) -> None:
        """Let the sequencer have the arrays; the operation ends when they have been exchanged."""
        for var in self._needed:
            if var.failure is not None:
                self.arrive((), (), var.failure.exception(), on_complete)
                return
        try:
            if pushing.make_room is None:
                self._arrive(on_complete)
            else:
                arrays = [array for result, sources in self._results for array in (*sources, result)]
                pushing.holding([*arrays, *(array for row in self._rows for array in row)], self._arrive)(on_complete)
        except OutOfMemoryError as error:
            self.arrive((), (), error, on_complete)

    def _arrive(self, on_complete: OnComplete) -> None:
        shares, totals = self._raws()
        failures = [var.failure for var in self._writes if var.failure is not None]
        failed = next((one for one in failures if one.observed_seq is None), None)
        if failed is not None:  # it stays failed until somebody was told
            self.arrive(shares, totals, None, lambda error=None: on_complete(error or failed.exception()))
            return
        self.arrive(shares, totals, None, on_complete)

    def _raws(self) -> tuple[list[Array], list[Array]]:
        """What is exchanged and where the sums go; ``also`` is filled."""
        shares, totals = [], []
        for result, sources in self._results:
            total = share = result.raw() if result.ready is None else result.ready
            if len(sources) == 1:
                source = sources[0]
                share = source.raw() if source.ready is None else source.ready
            elif sources:
                self._add([source.raw() for source in sources], total)
            shares.append(share)
            totals.append(total)
        for row in self._rows:
            self.also.append([array.raw() for array in row])
        return shares, totals

    def complete(self, error: BaseException | None) -> None:
        self._results = self._rows = ()
        self.also = []
        super().complete(error)
        self.ticket = None  # whose exchange is this part's

    @property
    def over(self) -> bool:
        """True once the arrays have been exchanged, or lost."""
        return not self._results

    def sum(
        self, group: Group, shares: Sequence[Array], totals: Sequence[Array], what: str, failure: str | None
    ) -> Steps[None]:
        """The exchange that gives all arrays the sum over processes."""
        return group.sum(shares, totals, what, failure, also=self.also)

    def take(self, arrays: Sequence[NDArray], writes: Sequence[Any]) -> bool:
        """Let the operation, which is pending and which nobody drives meanwhile, write these arrays as ``also``.

        Args:
            writes: their vars, no var twice.

        Returns:
            False: nothing is done, and they are to be copied.
        """
        if pushing.make_room is not None or self.over:
            return False
        for array in arrays:
            if array.ready is None:
                return False
        if not get_engine().write_too(self, self._writes[0], writes):
            return False
        self.also.append([array.ready for array in arrays])
        return True


class Bucket:
    """Keys of a call that are exchanged as one.

    Attributes:
        places: of them among the keys of the call.
        part: of the last push of them.
    """

    __slots__ = ("description", "keys", "part", "places", "stored", "writes")

    def __init__(self, places: Sequence[int], keys: Sequence[Key], stored: Sequence[NDArray], description: str) -> None:
        self.places, self.keys, self.stored, self.description = places, keys, stored, description
        self.writes = tuple([array.var for array in stored])
        self.part: JointPart | None = None


class Call:
    """What follows from the keys of a call.

    Args:
        keys: no key twice.
        stored: what the store holds for each.
        rule: which keys are exchanged as one.
        number: of a key; the largest is exchanged first.
        described: a key and its array in words.
    """

    __slots__ = ("_given", "_kinds", "_stored", "_written", "buckets", "keys", "rule")

    def __init__(
        self,
        keys: Sequence[Key],
        stored: Sequence[NDArray],
        rule: BucketRule,
        number: Callable[[Key], int],
        described: Callable[[Key, NDArray], str],
    ) -> None:
        self.keys, self._stored, self.rule = keys, stored, rule
        self._kinds = [key.__class__ for key in keys]
        self._written = {array.var for array in stored}
        self._given: list[tuple[list[ref[NDArray]], list[Any]]] = []
        """Arrays that were as they should be, and the vars of which none may have failed: the same ones come again at
        every step."""
        order = sorted(range(len(keys)), key=lambda place: -number(keys[place]))
        self.buckets = [
            Bucket(
                places,
                [keys[place] for place in places],
                [stored[place] for place in places],
                f"sum {', '.join([described(keys[place], stored[place]) for place in places])}",
            )
            for places in rule.cut([(place, stored[place].nbytes, stored[place].dtype) for place in order])
        ]

    def holds(self, keys: Sequence[Any], stored: Any, rule: BucketRule) -> bool:
        """Whether it still is what follows from these keys, which equal its own."""
        if rule is not self.rule:
            return False
        # Loops within the interpreter take half the time. 1.0 is no key, but equals 1.
        if not all(map(is_, map(type, keys), self._kinds)):
            return False
        return all(map(is_, map(stored.__getitem__, keys), self._stored))

    def arrays(self, values: Any, *, listed: bool) -> list[NDArray] | None:
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
        for given, watched in self._given:
            if all(map(is_, map(call, given), values)) and not any(map(_failure, watched)):
                if any(map(is_, values, repeat(None))):  # as a reference to what is gone is
                    return None
                return list(values)
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
        if len(self._given) == _GIVEN:
            del self._given[0]
        self._given.append(([ref(array) for array in found], [*used, *self._written]))
        return found


class Calls:
    """The calls of a store, by their keys.

    Args:
        number, described: as for :class:`Call`.
    """

    def __init__(self, number: Callable[[Key], int], described: Callable[[Key, NDArray], str]) -> None:
        self._number, self._described = number, described
        self._known: dict[tuple[Any, ...], Call] = {}

    def of(self, keys: tuple[Any, ...], stored: Mapping[Key, NDArray], rule: BucketRule) -> Call | None:
        """The call of these keys, of a user, anything; None where one of them is not stored, not on the host, or comes
        twice."""
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
