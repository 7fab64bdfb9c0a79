"""Calls whose keys come again: which arrays may travel together, looked at or known from before. Without MPI."""

from __future__ import annotations

from weakref import ref

import pytest

import weftplan as mx
from weftplan.kvstore.buckets import BucketRule
from weftplan.kvstore.distributed.exchange.call_cache import Call, Calls, Stored

SHAPES = ((3,), (2, 2))


@pytest.fixture
def call(eng):
    """A call of two keys, and what the store holds for them."""
    stored = [mx.nd.zeros(shape) for shape in SHAPES]
    keys = ["a", "b"]
    return Call(keys, stored, BucketRule(-1, None), keys.index, lambda key, array: key), stored


def found(call, values):
    """The arrays of a call, or None."""
    given = call.given(values, listed=True)
    return given and list(given[1])


def arrays():
    """What is as it should be."""
    return [mx.nd.ones(shape) for shape in SHAPES]


def test_arrays_that_come_again_are_looked_at_anew_where_they_differ(call):
    """One of them is another one, of another shape, dtype or chunk: as in the first call, whatever came before."""
    known, stored = call
    good = arrays()
    for _ in range(2):
        assert found(known, good) == good
        assert found(known, tuple(good)) == good
        assert found(known, [[good[0]], good[1]]) == good
        for wrong in (
            [good[0], mx.nd.ones((4,))],
            [good[0], mx.nd.ones((2, 2), dtype="float64")],
            [good[0], stored[1]],
            [good[0], good[0]],
            [good[0], None],
            good[:1],
            good[0],
        ):
            assert found(known, wrong) is None
    for _ in range(10):  # more rows than are kept
        assert found(known, (more := arrays())) == more
    assert found(known, good) == good


@pytest.mark.parametrize("which", ["given", "stored"])
def test_arrays_that_have_failed_since_are_refused(call, which):
    """An operation for all of them would hand the failure of one to the others."""
    known, stored = call
    good = arrays()
    assert found(known, good) == good

    def fail():
        raise ValueError("no gradient")

    failed = (good if which == "given" else stored)[1]
    mx.engine.get().push(fail, (), (failed.var,))
    with pytest.raises(ValueError, match="no gradient"):
        failed.wait_to_read()
    assert found(known, good) is None
    others = arrays()
    assert found(known, others) == (None if which == "stored" else others)
    mx.engine.get().push(lambda: None, (), (failed.var,))
    mx.nd.waitall()
    assert found(known, good) == good


def test_what_follows_from_arrays_is_kept_with_them(call):
    """The same arrays find it again, others do not; it keeps none of them alive, and not more than a few rows."""
    known, _ = call
    good, outs = arrays(), arrays()
    given, _ = known.given(good, listed=True)
    [first] = known.rounds(given, good, updates=False)
    assert known.rounds(known.given(good, listed=True)[0], good, updates=False) == [first]
    assert [var in first.writes for var in first.needed] == [False, False]
    pulled, _ = known.given(outs, listed=True)
    wider = first.wider(pulled, outs)
    assert wider is first.wider(known.given(outs, listed=True)[0], outs)
    assert list(wider.writes) == [*first.writes, *[out.var for out in outs]]
    for _ in range(10):
        others = arrays()
        again = first.wider(known.given(others, listed=True)[0], others)
        assert again is not wider
        assert again.added == tuple(other.var for other in others)
    assert len(first._wider) <= 4
    kept = [ref(array) for array in (*good, *outs, *others)]
    del good, outs, others
    assert [one() for one in kept] == [None] * 6


def test_another_array_at_the_place_of_one_that_is_gone(call):
    """Is another one: the places are those of objects, which may be used again."""
    good = arrays()
    given = call[0].given(good, listed=True)[0]
    places = list(map(id, good))
    assert given.are(places)
    assert not given.are(places[:1])
    del good[1]
    assert not given.are(places)


def test_the_last_call_is_known_until_what_is_stored_changes(eng):
    """And only for the same keys."""
    stored = Stored()
    stored["a"], stored["b"] = arrays()
    calls, rule = Calls("abc".index, lambda key, array: key), BucketRule(-1, None)
    keys = ["a", "b"]
    first = calls.of(keys, stored, rule)
    assert first is calls.of(list(keys), stored, rule)
    assert calls.of(keys, stored, BucketRule(1, None)) is not first
    for change in ({"a": mx.nd.zeros((3,))}, {"c": mx.nd.zeros((5,))}):
        before = calls.of(keys, stored, rule)
        for key, value in change.items():
            stored[key] = value
        assert (calls.of(keys, stored, rule) is before) == ("c" in change)
    keys.append("c")
    assert list(calls.of(keys, stored, rule).keys) == keys
    keys[0] = "no such key"
    assert calls.of(keys, stored, rule) is None
    assert calls.of(["a", 1.0], stored, rule) is None


def test_what_is_pulled_into_what_is_pushed_is_read_by_no_operation(call):
    """It writes that, and an operation that read and wrote a var would wait for itself."""
    known, _ = call
    good = arrays()
    given, _ = known.given(good, listed=True)
    round = known.rounds(given, good, updates=False)[0].wider(given, good)
    assert round.reads == ()
    assert set(round.needed) < set(round.writes)


def test_new_merge_buffers_are_what_an_updater_gets(call):
    """What followed from the old ones is forgotten; as long as one is missing, there is nothing to be summed into."""
    known, _ = call
    good, merged = arrays(), dict(zip("ab", arrays(), strict=True))
    given, _ = known.given(good, listed=True)
    assert not known.merges({"a": merged["a"]})
    for _ in range(2):
        assert known.merges(merged)
        [round] = known.rounds(given, good, updates=True)
        assert sorted(map(id, round.totals)) == sorted(map(id, merged.values()))
        merged["b"] = mx.nd.zeros((2, 2))
