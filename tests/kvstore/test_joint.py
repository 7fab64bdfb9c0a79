"""Calls whose keys come again: which arrays may travel together, looked at or known from before. Without MPI."""

from __future__ import annotations

import pytest

import weftplan as mx
from weftplan.kvstore.buckets import BucketRule
from weftplan.kvstore.distributed.joint import Call

SHAPES = ((3,), (2, 2))


@pytest.fixture
def call(eng):
    """A call of two keys, and what the store holds for them."""
    stored = [mx.nd.zeros(shape) for shape in SHAPES]
    keys = ["a", "b"]
    return Call(keys, stored, BucketRule(-1, None), keys.index, lambda key, array: key), stored


def arrays():
    """What is as it should be."""
    return [mx.nd.ones(shape) for shape in SHAPES]


def test_arrays_that_come_again_are_looked_at_anew_where_they_differ(call):
    """One of them is another one, of another shape, dtype or chunk: as in the first call, whatever came before."""
    known, stored = call
    good = arrays()
    for _ in range(2):
        assert known.arrays(good, listed=True) == good
        assert known.arrays(tuple(good), listed=True) == good
        assert known.arrays([[good[0]], good[1]], listed=True) == good
        for wrong in (
            [good[0], mx.nd.ones((4,))],
            [good[0], mx.nd.ones((2, 2), dtype="float64")],
            [good[0], stored[1]],
            [good[0], good[0]],
            [good[0], None],
            good[:1],
            good[0],
        ):
            assert known.arrays(wrong, listed=True) is None
    for _ in range(10):  # more rows than are kept
        assert known.arrays(more := arrays(), listed=True) == more
    assert known.arrays(good, listed=True) == good


@pytest.mark.parametrize("which", ["given", "stored"])
def test_arrays_that_have_failed_since_are_refused(call, which):
    """An operation for all of them would hand the failure of one to the others."""
    known, stored = call
    good = arrays()
    assert known.arrays(good, listed=True) == good

    def fail():
        raise ValueError("no gradient")

    failed = (good if which == "given" else stored)[1]
    mx.engine.get().push(fail, (), (failed.var,))
    with pytest.raises(ValueError, match="no gradient"):
        failed.wait_to_read()
    assert known.arrays(good, listed=True) is None
    others = arrays()
    assert known.arrays(others, listed=True) == (None if which == "stored" else others)
    mx.engine.get().push(lambda: None, (), (failed.var,))
    mx.nd.waitall()
    assert known.arrays(good, listed=True) == good
