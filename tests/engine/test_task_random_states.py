"""Random generators: draws happen in the order of their submission, whatever the engine and the route."""

import functools
import random
import threading
import types

import numpy as np
import pytest

from weftplan import engine
from weftplan.tasks.random_states import state_of

ROUTES = {
    "method": lambda rng, out: engine.submit(rng.standard_normal, out=out),
    "partial": lambda rng, out: engine.submit(functools.partial(rng.standard_normal, out=out)),
    "argument": lambda rng, out: engine.submit(lambda rng, out: rng.standard_normal(out=out), rng, out=out),
    "attribute": lambda rng, out: engine.submit(
        lambda model, out: model.rng.standard_normal(out=out), types.SimpleNamespace(rng=rng), out=out
    ),
    "bit generator": lambda rng, out: engine.submit(
        lambda bits, out: np.random.Generator(bits).standard_normal(out=out), rng.bit_generator, out=out
    ),
    "declared": lambda rng, out: engine.submit(lambda out: rng.standard_normal(out=out), out=out, writes=[rng]),
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_draws_equal_the_serial_program(threaded, route):
    """Draws of one generator give the numbers of the plain loop, although no array connects them."""
    rng, serial = np.random.default_rng(3), np.random.default_rng(3)
    door = threading.Event()
    outs = [np.zeros(50) for _ in range(8)]
    engine.submit(lambda _: door.wait(60), rng)
    tasks = [route(rng, out) for out in outs]
    early = [task.wait(0.02) for task in tasks[:2]]
    door.set()
    engine.wait(*outs, rng)
    assert early == [False, False]
    for out in outs:
        assert out.tobytes() == serial.standard_normal(50).tobytes()


@pytest.mark.parametrize(
    ("draw", "other"),
    [
        (np.random.RandomState(1).rand, np.random.RandomState(1).rand),
        (np.random.rand, None),
        (random.Random(1).random, random.Random(1).random),
    ],
    ids=["RandomState", "numpy.random", "random.Random"],
)
def test_old_generators_are_ordered(threaded, draw, other):
    """RandomState, the functions of numpy.random and Python's generators are ordered like a Generator."""
    owner, door = draw.__self__, threading.Event()
    before = engine.submit(lambda _: door.wait(60), owner)
    first, second = engine.submit(draw), engine.submit(draw)
    assert not first.wait(0.02)
    door.set()
    values = [first.result(), second.result()]
    assert before.result()
    if other is not None:
        assert values == [other(), other()]


@pytest.mark.parametrize(
    "spawn", [lambda seeds: engine.submit(seeds.spawn, 1), lambda seeds: engine.submit(_spawn, seeds)]
)
def test_seed_sequences_are_ordered(threaded, spawn):
    """Children of a seed sequence are those of the serial program: it counts them."""
    seeds, door = np.random.SeedSequence(3), threading.Event()
    engine.submit(lambda _: door.wait(60), seeds)
    tasks = [spawn(seeds) for _ in range(4)]
    assert not tasks[0].wait(0.02)
    door.set()
    assert [task.result()[0].spawn_key for task in tasks] == [(0,), (1,), (2,), (3,)]


def _spawn(seeds):
    return seeds.spawn(1)


def test_a_failed_draw_stops_no_later_draw(threaded):
    """A call that fails leaves its generator usable, once its error has been raised."""
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match=r"shape|size"):
        engine.submit(rng.standard_normal, (3, 3), out=np.zeros(2)).result()
    assert engine.submit(rng.integers, 5).result() in range(5)


def test_generators_share_the_state_of_their_bits():
    """Two generators over one bit generator have one state; a state ends with its generator."""
    bits = np.random.PCG64(0)
    assert state_of(np.random.Generator(bits)) is state_of(np.random.Generator(bits)) is state_of(bits)
    assert state_of(np.random.PCG64(0)) is not state_of(bits)
    assert engine.var_of(bits) is engine.var_of(np.random.Generator(bits))
