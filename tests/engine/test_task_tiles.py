"""Tiles: which tiles a view overlaps; tasks on disjoint tiles run concurrently, others in order."""

import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftplan import engine
from weftplan.errors import EngineError
from weftplan.tasks.tiles import TileGrid

ENGINE = engine.create("NaiveEngine")


def tiles_in_memory(array, tile, view):
    """Return for each tile whether it shares memory with ``view``, by NumPy's exact test."""
    counts = [-(-n // t) for n, t in zip(array.shape, tile, strict=True)]
    places = itertools.product(*map(range, counts))
    return [
        np.shares_memory(array[tuple(slice(i * t, i * t + t) for i, t in zip(place, tile, strict=True))], view)
        for place in places
    ]


def tiles_reported(array, tile, view):
    """Return for each tile whether the grid reports it for ``view``, and whether the view extends beyond the array."""
    grid = TileGrid(array, tile, ENGINE)
    actual, beyond = grid.touched(view)
    return [var in set(actual) for var in grid.vars], beyond


@st.composite
def views(draw):
    """Draw an array, a tile shape, a view made by one or two steps, and whether every step is a plain slice."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    array = np.zeros(shape, draw(st.sampled_from(["f4", "f8", "c16"])), order=draw(st.sampled_from("CF")))
    tile = tuple(draw(st.integers(1, n + 1)) for n in shape)
    view, plain = array, True
    for _ in range(draw(st.integers(1, 2))):
        kind = draw(st.sampled_from(["slice", "slice", "reshape", "transpose", "bytes", "diagonal"]))
        if kind == "slice" and view.size:
            view = view[
                tuple(
                    slice(draw(st.integers(0, n)), draw(st.integers(0, n)), draw(st.sampled_from([1, 1, 2, -1, 3])))
                    for n in view.shape
                )
            ]
            plain = plain and all(abs(s) == t for s, t in zip(view.strides, array.strides, strict=False))
        elif kind == "reshape" and view.flags.c_contiguous:
            view, plain = view.reshape(-1), False
        elif kind == "transpose":
            view, plain = view.T, False
        elif kind == "bytes" and view.flags.c_contiguous and view.ndim:
            view, plain = view.view("u1"), False
        elif kind == "diagonal" and view.ndim > 1:
            view, plain = view.diagonal(), False
    return array, tile, view, plain


@settings(max_examples=150, deadline=None)
@given(views())
def test_no_tile_is_missed(case):
    """A grid reports every tile that shares memory with a view; for a slice with step 1 it reports no other tile."""
    array, tile, view, plain = case
    named, beyond = tiles_reported(array, tile, view)
    shared = tiles_in_memory(array, tile, view)
    assert not beyond
    assert all(n or not s for n, s in zip(named, shared, strict=True))
    if plain and view.size:
        assert named == shared


def test_views_beyond_the_array():
    """A grid reports the overlapped tiles and whether the view extends beyond the array.

    For a view across the border it reports all tiles; for a view outside, or an empty view, none.
    """
    buffer = np.zeros(100)
    array = buffer[20:60]
    assert tiles_reported(array, (10,), buffer[:20]) == ([False] * 4, True)
    assert tiles_reported(array, (10,), buffer[60:]) == ([False] * 4, True)
    assert tiles_reported(array, (10,), buffer[10:30]) == ([True] * 4, True)
    assert tiles_reported(array, (10,), buffer[30:30]) == ([False] * 4, False)
    assert tiles_reported(array, (10,), buffer[25:45]) == ([True, True, True, False], False)


@pytest.mark.parametrize(
    ("array", "tile", "message"),
    [
        (np.zeros((4, 4)), (2,), "expected 2 integers >= 1"),
        (np.zeros((4, 4)), (2, 0), "got .2, 0."),
        (np.zeros((4, 4)), (2, 2.0), "got .2, 2.0."),
        (np.zeros((0, 4)), (2, 2), "no elements"),
        (np.zeros(4)[::-1], (2,), "positive strides"),
        (np.broadcast_to(np.zeros(4), (3, 4)), (1, 4), "no element in two places"),
        ([1, 2], (1,), "got list"),
    ],
)
def test_indivisible_objects_are_refused(array, tile, message):
    """An array that cannot be divided raises EngineError with the expected form, and stays undivided."""
    with pytest.raises(EngineError, match=message):
        engine.tiles(array, tile)
    if isinstance(array, np.ndarray) and array.size:
        assert engine.var_of(array) is engine.var_of(array[:1])


def test_disjoint_tiles_run_concurrently():
    """Two tasks that write different tiles run concurrently: both reach one barrier."""
    eng = engine.create("ThreadedEnginePerDevice", task_workers=2)
    with engine.using(eng):
        field = np.zeros((4, 4))
        parts = engine.tiles(field, (2, 4))
        meeting = threading.Barrier(2)

        def meet(out):
            meeting.wait(60)
            out += 1

        for part in parts:
            engine.submit(meet, out=part)
        engine.wait(field)
        assert field.tolist() == [[1] * 4] * 4
    eng.stop()


def test_the_whole_and_parts_are_ordered(driver):
    """Tasks on the whole array, on tiles and on a view across tiles run in submission order."""
    field, log = np.zeros((6, 6)), []
    engine.submit(lambda out: log.append("before"), out=field)
    parts = engine.tiles(field, (3, 3))
    for _ in range(3):
        for i, j in itertools.product(range(2), range(2)):
            engine.submit(np.add, parts[i, j], 10 * i + j, out=parts[i, j])
        engine.submit(lambda out: log.append(out[::3, ::3].tolist()), out=field)
    engine.submit(np.multiply, field[2:4, 2:4], 0, out=field[2:4, 2:4])  # overlaps all four tiles
    engine.wait(field)
    assert log == ["before"] + [[[0, n], [10 * n, 11 * n]] for n in (1, 2, 3)]
    assert field[2:4, 2:4].tolist() == [[0, 0], [0, 0]]
    assert field[0, 0] == 0
    assert field[5, 5] == 33


def test_stencil_in_two_buffers_equals_the_loop(driver):
    """Ten steps of a stencil between two tiled buffers, submitted without a wait, equal ten steps of plain NumPy."""
    rng = np.random.default_rng(3)
    start = rng.random((32, 32))

    def step(source, target):
        target[1:-1, 1:-1] = (source[:-2, 1:-1] + source[2:, 1:-1] + source[1:-1, :-2] + source[1:-1, 2:]) / 4

    a, b = start.copy(), start.copy()
    expected, second = start.copy(), start.copy()
    engine.tiles(a, (8, 32))
    engine.tiles(b, (8, 32))
    for _ in range(10):
        for low in range(0, 32, 8):
            high = min(low + 8, 31)
            rows = slice(max(low, 1) - 1, high + 1)
            inner = slice(max(low, 1), high)

            def part(source, out):
                out[:, 1:-1] = (source[:-2, 1:-1] + source[2:, 1:-1] + source[1:-1, :-2] + source[1:-1, 2:]) / 4

            engine.submit(part, a[rows], out=b[inner])
        step(expected, second)
        a, b, expected, second = b, a, second, expected
    engine.wait(a)
    assert np.array_equal(a, expected)


def test_vars_of_tiles(driver):
    """A view within a tile has the tile's var; ``var_of`` raises EngineError for a view that touches several tiles."""
    field = np.zeros((4, 4))
    parts = engine.tiles(field, (2, 2))
    assert engine.var_of(field[:1, :1]) is engine.var_of(parts[0, 0])
    assert engine.var_of(parts[0, 1]) is not engine.var_of(parts[0, 0])
    with pytest.raises(EngineError, match="touches 4 of them"):
        engine.var_of(field)
    assert len(parts) == 4
    assert parts.shape == (2, 2)
    assert [part.shape for part in engine.tiles(field, (3, 4))] == [(3, 4), (1, 4)]
    assert parts[-1, -1].base is field
    with pytest.raises(IndexError, match="none at"):
        parts[2, 0]
    with pytest.raises(EngineError, match="2 indices"):
        parts[1]


def test_idle_tiled_array_moves_to_another_engine(threaded):
    """While one tile is in use, a second engine raises EngineError for the other tile; later it runs the task."""
    field, door = np.zeros(8), threading.Event()
    parts = engine.tiles(field, 4)
    engine.wait(field)
    other_engine = engine.create("ThreadedEngine")
    before = engine.set_engine(other_engine)
    try:
        engine.submit(lambda out: door.wait(60), out=parts[1])
    finally:
        engine.set_engine(before)
    with pytest.raises(EngineError, match="still used by operations"):
        engine.submit(np.add, parts[0], 1, out=parts[0])
    door.set()
    other_engine.stop()
    engine.submit(np.add, parts[0], 1, out=parts[0]).result()
    assert field.tolist() == [1] * 4 + [0] * 4
