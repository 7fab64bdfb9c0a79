"""Random programs of arrays and stores on hosts, page-locked memory and devices with streams match NumPy."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.device.links import connect, matrix, nvlink_mesh, pcie_tree, ports
from weftplan.device.simulated import configure

CONTEXTS = [mx.cpu(0), mx.cpu(1), mx.cpu_pinned(0), mx.sim(0), mx.sim(1), mx.sim(2)]
ENGINES = ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"]
SHAPE = (4, 6)
STEPS = 100
MOST = 14


@dataclass
class Pair:
    """An array and its expected value."""

    array: mx.nd.NDArray
    value: np.ndarray


def sum_like_store(kind: str, values: list[np.ndarray]) -> np.ndarray:
    """Return the sum of ``values`` in a store's order of additions.

    A store ``device`` adds from left to right, a store ``local`` in groups of four after the first array.
    """
    step = 1 if kind == "device" else 4
    result = values[0].copy()
    for first in range(1, len(values), step):
        group = values[first : first + step]
        part = group[0]
        for value in group[1:]:
            part = part + value
        result = result + part
    return result


def exchange(choice: random.Random, pairs: list[Pair], store: mx.kv.KVStore, key: int) -> list[Pair]:
    """Push a random choice of arrays under the new ``key``, and return the arrays that were pulled."""
    pushed = choice.sample(pairs, choice.randrange(1, min(len(pairs), 6) + 1))
    store.init(key, mx.nd.zeros(SHAPE, ctx=choice.choice(CONTEXTS)))
    store.push(key, [pair.array for pair in pushed])
    outs = [mx.nd.empty(SHAPE, ctx=choice.choice(CONTEXTS)) for _ in range(2)]
    store.pull(key, out=outs)
    return [Pair(out, sum_like_store(store.type, [pair.value for pair in pushed])) for out in outs]


def step(choice: random.Random, draw: np.random.Generator, one: Pair, other: Pair) -> list[Pair]:
    """Apply one random operation to ``one``, which may read ``other``, and return new arrays."""
    verb = choice.choice(["new", "scalar", "add", "copyto", "row", "rows", "move", "view", "combine"])
    a, b = one.array, other.array
    if verb == "new":
        value = draw.standard_normal(SHAPE).astype(np.float32)
        return [Pair(mx.nd.array(value, ctx=choice.choice(CONTEXTS)), value.copy())]
    if verb == "move":
        return [Pair(a.as_in_context(choice.choice(CONTEXTS)).copy(), one.value.copy())]
    if verb == "combine":
        return [Pair(a - b.as_in_context(a.context) * 0.5, one.value - other.value * np.float32(0.5))]
    if verb == "scalar":
        a *= 0.5
        a += 1.5
        one.value[...] = one.value * np.float32(0.5) + np.float32(1.5)
    elif verb == "add":
        a += b.as_in_context(a.context)
        one.value += other.value.copy()
    elif verb == "copyto" and one is not other:
        b.copyto(a)
        one.value[...] = other.value
    elif verb == "row":
        a[1] = b[2].as_in_context(a.context)
        one.value[1] = other.value[2]
    elif verb == "rows":
        a[1:3] = 2.0
        one.value[1:3] = 2
    elif verb == "view":
        view = a[2:4]
        view *= 2.0
        one.value[2:4] *= np.float32(2)
    return []


def run(seed: int) -> None:
    """Run the random program of ``seed`` and check its arrays.

    Arrays are read only now and then, so that many operations are pending at a time.
    """
    choice, draw = random.Random(seed), np.random.default_rng(seed)
    for index in range(3):
        configure(index, order=choice.choice(["lazy", "random"]), seed=seed)
    store = mx.kv.create(choice.choice(["local", "device"]))
    pairs = [Pair(mx.nd.full(SHAPE, i, ctx=ctx), np.full(SHAPE, i, np.float32)) for i, ctx in enumerate(CONTEXTS)]
    for number in range(STEPS):
        if choice.random() < 0.1:
            pairs += exchange(choice, pairs, store, number)
        else:
            pairs += step(choice, draw, choice.choice(pairs), choice.choice(pairs))
        while len(pairs) > MOST or (len(pairs) > 3 and choice.random() < 0.05):
            pairs.pop(choice.randrange(len(pairs)))  # the next array may reuse its memory, in another stream
        if choice.random() < 0.02:
            seen = choice.choice(pairs)
            np.testing.assert_array_equal(seen.array.asnumpy(), seen.value, err_msg=f"step {number}")
    for pair in pairs:
        np.testing.assert_array_equal(pair.array.asnumpy(), pair.value, err_msg=f"at the end, on {pair.array.context}")


@pytest.fixture(params=ENGINES)
def driver(request: pytest.FixtureRequest):
    """Install each kind of engine; afterwards restore the order of streams on simulated devices."""
    result = engine.create(request.param)
    with engine.using(result):
        yield result
        result.wait_for_all()
    result.stop()
    for index in range(3):
        configure(index, order="lazy", seed=0)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(driver: engine.Engine, seed: int) -> None:
    """On every engine each array of a random program has NumPy's bits."""
    run(seed)


@pytest.mark.stress
def test_many_random_programs(driver: engine.Engine) -> None:
    """On every engine each array of a thousand random programs has NumPy's bits."""
    for seed in range(100, 1100):
        run(seed)


LINKS = {"none": None, "mesh": nvlink_mesh(), "tree": pcie_tree(), "switch": ports(8, 1e9, 1e-6)}
SETTINGS = {
    "MXNET_ENABLE_GPU_P2P": "0",
    "MXNET_KVSTORE_USETREE": "1",
    "MXNET_KVSTORE_TREE_ARRAY_BOUND": "100",
    "MXNET_KVSTORE_BIGARRAY_BOUND": "1000",
}


@pytest.mark.parametrize("seed", range(40))
def test_random_stores_keep_what_they_plan(seed: int, no_links: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random stores on random devices and links use exactly the planned bytes.

    Pulls return NumPy's sums if the store has no updater and no compression. As in a Module, values start on the first
    device and are pulled once before the first push.
    """
    choice, draw = random.Random(seed), np.random.default_rng(seed)
    for name, value in SETTINGS.items():
        if choice.random() < 0.3:
            monkeypatch.setenv(name, value)
    uneven = matrix([[choice.choice([0, 1e9, 2e10]) for _ in range(8)] for _ in range(8)], 1e-6)
    connect(choice.choice([uneven, *LINKS.values()]))
    count = choice.randrange(1, 9)
    kinds = choice.choice([["cpu"], ["sim"], ["sim"], ["sim"], ["cpu", "sim"]])
    contexts = [mx.Context(choice.choice(kinds), place) for place in choice.sample(range(8), count)]
    store, updates = mx.kv.create(choice.choice(["local", "device", "device", "device"])), choice.random() < 0.5
    compressed = store.type == "device" and choice.random() < 0.3
    if compressed:
        store.set_gradient_compression({"type": choice.choice(["1bit", "2bit"])})
    if updates:
        store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1))
    shapes = [choice.choice([(1,), (7,), (7, 24), (8, 301), (64, 64)]) for _ in range(choice.randrange(1, 8))]
    keys = list(range(len(shapes)))
    outs = [[mx.nd.empty(shape, ctx=ctx) for ctx in contexts] for shape in shapes]
    store.init(keys, [mx.nd.zeros(shape, ctx=contexts[0]) for shape in shapes])
    store.pull(keys, out=outs)
    values = [draw.integers(-8, 8, (count, *shape)).astype(np.float32) for shape in shapes]
    for _ in range(2):
        for key in keys:
            pushed = [mx.nd.array(value, ctx=ctx) for value, ctx in zip(values[key], contexts, strict=True)]
            store.pushpull(key, pushed, out=outs[key], priority=-key)
    sizes = [(int(np.prod(shape)), 4 * int(np.prod(shape))) for shape in shapes]
    planned = store.buffer_bytes(sizes, contexts, updates=updates)
    assert {name: store.statistics()[f"{name}_bytes"] for name in planned} == planned
    for value, some in zip(values, outs, strict=True):
        for out in some:
            if not (updates or compressed):
                np.testing.assert_array_equal(out.asnumpy(), value.sum(axis=0))
