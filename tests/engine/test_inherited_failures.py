"""Inherited failures: an operation that reads a failed array, or overwrites only a part of it, fails.

An operation that overwrites the whole array without reading it runs and clears the failure.
"""

import functools

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine


class Half(Exception):
    """The error of a task that has written a part of its array."""


@pytest.fixture(params=["ThreadedEngine", "ThreadedEnginePerDevice"])
def threads(request):
    """The current engine of the test, with two workers."""
    with engine.using(engine.create(request.param, cpu_workers=2)) as eng:
        yield eng
    eng.stop()


def write_half_and_fail(array):
    """Run a task that writes the first element along the last axis and fails; expect the failure."""

    def half(out):
        out[..., :1] = 9
        raise Half

    with pytest.raises(Half):
        engine.submit(half, out=array).result()


IN_PLACE = {
    "ufunc": lambda a: engine.submit(np.add, a, 1, out=a),
    "view": lambda a: engine.submit(np.add, a[::-1], 1, out=a),
    "slice": lambda a: engine.submit(np.add, 1, 1, out=a[1:]),
    "stride": lambda a: engine.submit(np.add, 1, 1, out=a[::2]),
    "where": lambda a: engine.submit(functools.partial(np.add, where=[True, False, False]), 1, 1, out=a),
    "where option": lambda a: engine.submit(np.add, 1, 1, out=a, where=[True, False, False]),
    "element": lambda a: engine.submit(a.__setitem__, 1, 4),
    "writes": lambda a: engine.submit(lambda x: x.__setitem__(1, 4), a, writes=[a]),
    "closure": lambda a: engine.submit(lambda: a.__setitem__(1, 4), writes=[a]),
    "sort": lambda a: engine.submit(a.sort),
    "operator": lambda a: engine.submit(a.__iadd__, 1),
    "one element as three": lambda a: engine.submit(np.lib.stride_tricks.as_strided(a, (3,), (0,)).fill, 2),
    "overlapping windows": lambda a: engine.submit(np.lib.stride_tricks.as_strided(a, (2, 2), (8, 8)).fill, 2),
    "copy of itself": lambda a: engine.submit(np.copyto, a, a),
    "position": lambda a: engine.submit(np.add, 1, 1, a),
}
WHOLE = {
    "out": lambda a: engine.submit(np.add, 1, 1, out=a),
    "transposed": lambda a: engine.submit(np.add, 1, 1, out=a.T),
    "reversed": lambda a: engine.submit(np.add, 1, 1, out=a[::-1]),
    "out in kwargs": lambda a: engine.submit(np.add, 1, 1, kwargs={"out": a}),
    "fill": lambda a: engine.submit(a.fill, 4),
    "copyto": lambda a: engine.submit(np.copyto, a, 4),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_work_in_place_inherits(threads, name):
    """A task that reads or partly overwrites a failed array does not run; it and later reads raise the failure."""
    array = np.full(3, 5.0)
    write_half_and_fail(array)
    with pytest.raises(Half):
        IN_PLACE[name](array).result()
    with pytest.raises(Half):
        engine.submit(np.sum, array).result()
    assert array.tolist() == [9, 5, 5]


@pytest.mark.parametrize("name", WHOLE)
def test_a_full_overwrite_heals(threads, name):
    """A task that overwrites all of a failed array runs and clears the failure."""
    array = np.full(3, 5.0)
    write_half_and_fail(array)
    WHOLE[name](array).result()
    assert engine.submit(np.sum, array).result() in (6, 12)


def test_tiles_heal_one_by_one(threads):
    """Overwriting a whole tile clears the failure of that tile; a partial write or another tile does not."""
    field = np.zeros((4, 4))
    parts = engine.tiles(field, (2, 3))
    write_half_and_fail(parts[0, 0])
    with pytest.raises(Half):
        engine.submit(np.add, 1, 1, out=parts[0, 0][:1]).result()
    with pytest.raises(Half):  # as many elements as the tile, but one of them six times
        engine.submit(np.lib.stride_tricks.as_strided(parts[0, 0], (2, 3), (0, 0)).fill, 1).result()
    engine.submit(np.add, 1, 1, out=parts[1, 1]).result()
    with pytest.raises(Half):
        engine.submit(np.sum, field).result()
    engine.submit(np.add, 1, 1, out=parts[0, 0]).result()
    assert engine.submit(np.sum, field).result() == 16


ND_IN_PLACE = {
    "iadd": lambda y: y.__iadd__(1),
    "iadd of arrays": lambda y: y.__iadd__(mx.nd.ones((3,))),
    "slice": lambda y: y.__setitem__(slice(1, None), 4),
    "element": lambda y: y.__setitem__(1, 4),
    "array into a slice": lambda y: y.__setitem__(slice(1, None), mx.nd.ones((2,))),
    "indices": lambda y: y.__setitem__(mx.nd.array([1, 2], dtype="int32"), 4),
    "view": lambda y: mx.nd.ones((2,)).copyto(y[1:]),
    "out": lambda y: mx.nd.elemwise_add(y, mx.nd.ones((3,)), out=y),
    "bulk": lambda y: add_in_bulk(y),
}


def add_in_bulk(y):
    """Add 1 in place, as a member of a bulk."""
    with engine.bulk(4):
        y += 1


@pytest.mark.parametrize("name", ND_IN_PLACE)
def test_arrays_of_the_library(threads, name):
    """If a failed NDArray is read or partly overwritten, ``asnumpy()`` raises its failure; ``y[:] = 3`` clears it."""
    y = mx.nd.zeros((3,))
    y.wait_to_read()
    write_half_and_fail(y)
    ND_IN_PLACE[name](y)
    with pytest.raises(Half):
        y.asnumpy()
    y[:] = 3
    assert y.asnumpy().tolist() == [3, 3, 3]
