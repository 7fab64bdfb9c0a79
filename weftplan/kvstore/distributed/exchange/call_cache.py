"""The call cache: store calls whose keys, and usually arrays, recur at every training step.

What follows from the keys is kept in a :class:`Call`, what follows from the arrays in the objects of
``arrays/exchange_cache.py``: the first time makes them, later times look only at what may have changed, with loops
within the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any

from weftplan.kvstore.buckets import TOGETHER, BucketRule
from weftplan.kvstore.copies import HOST
from weftplan.kvstore.distributed.arrays.exchange_cache import MOST_GIVEN, Arrays, Given, Round
from weftplan.kvstore.distributed.exchange.bucket_operation import JointPart
from weftplan.kvstore.keys import Key
from weftplan.ndarray import NDArray

_MOST = 256
"""Calls of which a store keeps what follows from their keys."""

_TRIED = 8
"""Pushes of which one tries to exchange all buckets as one, where the last one that did so could not."""


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

    Attributes:
        whole: all buckets as one, where they may be exchanged so.
        together: the last push that tried this has succeeded; belongs to whoever drives exchanges.
        pushed: the buckets of the last push.
    """

    __slots__ = (
        "_given",
        "_kinds",
        "_merged",
        "_pushes",
        "_stored",
        "_written",
        "buckets",
        "keys",
        "pushed",
        "rule",
        "together",
        "whole",
    )

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
        self.pushed: Sequence[Bucket] = ()
        self.whole: Bucket | None = None
        self.together, self._pushes = False, -1
        one_dtype = len({array.dtype for array in stored}) == 1
        if len(self.buckets) > 1 and one_dtype and sum([array.nbytes for array in stored]) <= TOGETHER:
            what = " and ".join([bucket.description for bucket in self.buckets])
            self.whole = Bucket(order, [keys[place] for place in order], f"together {what}")

    def holds(self, keys: Sequence[Any], stored: Stored, rule: BucketRule) -> bool:
        """Whether it still is what follows from these keys, which equal its own."""
        if rule is not self.rule:
            return False
        if not all(map(is_, keys, self.keys)) and not all(map(is_, map(type, keys), self._kinds)):
            return False  # 1.0 is no key, but equals 1
        return all(map(is_, map(stored.__getitem__, keys), self._stored))

    def given(self, values: object, *, listed: bool) -> Arrays | None:
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

    def _looked_at(self, values: Sequence[object]) -> Arrays | None:
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

    def tries(self) -> Bucket | None:
        """:attr:`whole`, if this push is to try to exchange all buckets as one."""
        self._pushes += 1
        return self.whole if self.together or self._pushes % _TRIED == 0 else None

    def rounds(self, given: Given, arrays: Sequence[NDArray], *, updates: bool | None) -> list[Round]:
        """What follows for each bucket where these, of ``given``, are pushed; ``updates``: an updater wants sums; None:
        for all buckets as one, and none does."""
        rounds = given.rounds.get(updates)
        if rounds is None:
            rounds, results = [], self._merged if updates else self._stored
            for bucket in self.buckets if updates is not None or self.whole is None else (self.whole,):
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
        self._known: dict[tuple[object, ...], Call] = {}
        self._last: tuple[Call | None, int] = None, 0
        """The last one, and the version of what was stored then."""

    def of(self, key: object, stored: Stored, rule: BucketRule) -> Call | None:
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

    def _looked_up(self, key: object, stored: Stored, rule: BucketRule) -> Call | None:
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
