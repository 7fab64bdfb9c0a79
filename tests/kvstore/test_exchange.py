"""Sums over several devices: each route gives the sum of all gradients in the modelled time; stores use the fastest."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

import weftplan as mx
from tests import standin_cupy
from weftplan import config, device, engine
from weftplan.device import simulated
from weftplan.device.cost_model import CostModel
from weftplan.device.links import connect, matrix, nvlink_mesh, pcie_tree, ports
from weftplan.device.simulated import seconds_of
from weftplan.kvstore.exchange.choice import Chooser, planned
from weftplan.kvstore.exchange.program import BufferKind
from weftplan.kvstore.exchange.runner import Runner
from weftplan.kvstore.exchange.ways import TreeRule, one_step, routes_between

pytestmark = pytest.mark.usefixtures("no_links")

LINKS = {
    "nvlink mesh": nvlink_mesh(),
    "pcie tree": pcie_tree(),
    "switch": ports(8, 450e9, 3e-6),
    "all to all": matrix([[25e9] * 8] * 8, 3e-6),
}
NAMES = ["one_step", "ranges", "ring", "chain", "tree", "trees"]


def make_chooser(**settings):
    """Return a Chooser with the default settings, changed by ``settings``."""
    return Chooser(**{"peers": True, "trees_only": False, "rule": TreeRule(), "log_trees": False, **settings})


def run_steps(program, values, whole, rng):
    """Run the steps of ``program`` with NumPy, in a random order that their dependencies allow.

    ``values`` has the array of each device, and ``whole`` is the sum; both are read or written in place. All buffers
    start as NaN, so that a step that runs too early spoils the result.
    """
    rooms = {place: np.full(size, np.nan, "f4") for place, size in enumerate(program.inboxes)}
    rooms[-1] = np.full(program.hosted, np.nan, "f4")

    def of(piece):
        array = {BufferKind.VALUE: lambda: values[piece.position], BufferKind.TOTAL: lambda: whole}.get(
            piece.buffer, lambda: rooms[piece.position]
        )()
        assert piece.end <= array.size
        return array[piece.begin : piece.end]

    done, left = set(), list(range(len(program.steps)))
    while left:
        index = rng.choice([one for one in left if done.issuperset(program.steps[one].predecessors)])
        step = program.steps[index]
        total = of(step.sources[0]).copy()
        for source in step.sources[1:]:
            total += of(source)
        of(step.target)[...] = total
        done.add(index)
        left.remove(index)


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("peers", [True, False])
def test_every_way_sums_all_and_copies_to_all(count, peers):
    """Each route sums all gradients without changing them, and copies the sum to all devices.

    The links are random, each device once owns the sum, and steps run in a random order that dependencies allow.
    """
    rng = random.Random(count)
    elements = 37
    speeds = [[rng.choice([1e9, 2e9, 0 if rng.random() < 0.3 else 4e9]) for _ in range(count)] for _ in range(count)]
    links = matrix(speeds, 1e-6)
    if not peers:
        links = links.without_peers()
    for home in range(count):
        values = [np.array([2.0**place * 1000 + i for i in range(elements)], "f4") for place in range(count)]
        for way in routes_between(links, elements, home, TreeRule()):
            _, push, pull = planned(way, home, links, 4)
            inputs, whole = [value.copy() for value in values], np.full(elements, np.nan, "f4")
            run_steps(push, inputs, whole, rng)
            np.testing.assert_array_equal(whole, sum(values), err_msg=way.name)
            np.testing.assert_array_equal(inputs, values, err_msg="a gradient was changed")
            outs = [np.full(elements, np.nan, "f4") for _ in range(count)]
            run_steps(pull, outs, whole, rng)
            np.testing.assert_array_equal(outs, [whole] * count, err_msg=way.name)
            assert sum(push.inboxes) == (count - 1) * elements


def run_on_devices(way, links, home, values, seed=None):
    """Push and pull once on simulated devices; return the virtual seconds and the sum.

    Memory is allocated directly from the devices, and no engine is used. With a ``seed`` the streams run in random
    order.
    """
    connect(dataclasses.replace(links))  # a copy, whose wires are unused
    count, elements = len(values), values[0].size
    _, push, pull = planned(way, home, links, 4)
    places = [device.get(mx.sim(index)) for index in range(count)]
    for place in places:
        place.configure(order="lazy" if seed is None else "random", seed=seed)
    held = []

    def room(place, size):
        raw = places[place].allocate(max(4, 4 * size))
        held.append((places[place], raw))
        return raw[: 4 * size].view("f4")

    inputs = [room(place, elements) for place in range(count)]
    for array, value in zip(inputs, values, strict=True):
        array[:] = value
    whole = room(home, elements)
    rooms = {place: room(place, size) for place, size in enumerate(push.inboxes)}
    rooms[-1] = np.empty(max(push.hosted, pull.hosted), "f4")

    def find(piece):
        array = {BufferKind.VALUE: inputs, BufferKind.TOTAL: {home: whole}}.get(piece.buffer, rooms)[piece.position]
        return array[piece.begin : piece.end]

    contexts = [mx.sim(index) for index in range(count)]
    runner, seconds = Runner(contexts), 0.0
    for program in (push, pull):

        def work(program=program):
            with places[home].new_stream() as stream, runner.lanes() as lanes:
                lanes.program(program, find)
            stream.synchronize()

        seconds += seconds_of(work, contexts)
    total = whole.copy()
    for array in inputs:
        np.testing.assert_array_equal(array, total)
    for place, raw in held:
        place.free(raw)
    for place in places:
        place.configure(order="lazy")
    return seconds, total


@pytest.fixture
def kernel(request):
    """The launch time of a kernel in seconds, which the eight simulated devices have during the test."""
    for index in range(8):
        simulated.configure(index, cost=CostModel(launch=request.param))
    yield request.param
    for index in range(8):
        simulated.configure(index, cost=CostModel())


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize(("elements", "kernel"), [(100, 5e-6), (100_000, 5e-6), (100_000, 5e-4)], indirect=["kernel"])
def test_devices_take_the_time_of_the_model_and_the_fastest_is_taken(name, elements, kernel):
    """Each route takes the modelled time on eight simulated devices, and a store chooses the fastest route.

    A slow kernel delays additions, but not copies within a device.
    """
    links = dataclasses.replace(LINKS[name], launch=kernel)
    values = [np.random.default_rng(place).standard_normal(elements).astype("f4") for place in range(8)]
    taken = {}
    for way in routes_between(links, elements, 0, TreeRule()):
        seconds, total = run_on_devices(way, links, 0, values)
        _, push, pull = planned(way, 0, links, 4)
        assert seconds == pytest.approx(push.seconds + pull.seconds, rel=1e-9), way.name
        np.testing.assert_allclose(total, sum(values), rtol=1e-4, atol=1e-4)
        taken[way.name] = min(seconds, taken.get(way.name, 1.0))
    assert list(taken) == NAMES
    connect(links)
    plan = make_chooser().plan([mx.sim(i) for i in range(8)], 0, elements, 4)
    assert taken[plan.way.name] == min(taken.values())
    assert plan.seconds == pytest.approx(taken)


def test_no_way_is_the_best_for_all():
    """The fastest route depends on links and size.

    Small arrays take a tree on a mesh, else one step; large arrays take a chain on a mesh or a PCIe tree, else ranges.
    """
    ways = {
        (name, elements): make_chooser()._choose(LINKS[name], 2, elements, 4).way.name
        for name in LINKS
        for elements in (100, 1_000_000)
    }
    assert ways == {
        ("nvlink mesh", 100): "tree",
        ("nvlink mesh", 1_000_000): "chain",
        ("pcie tree", 100): "one_step",
        ("pcie tree", 1_000_000): "chain",
        ("switch", 100): "one_step",
        ("switch", 1_000_000): "ranges",
        ("all to all", 100): "one_step",
        ("all to all", 1_000_000): "ranges",
    }


def test_the_same_bits_in_whatever_order_streams_run():
    """The order in which streams run changes no bit of a route; only ``ranges`` adds in the order of ``one_step``."""
    links = LINKS["pcie tree"]
    values = [np.random.default_rng(place).standard_normal(999).astype("f4") for place in range(8)]
    sums = {}
    for way in routes_between(links, 999, 3, TreeRule()):
        runs = [run_on_devices(way, links, 3, values, seed)[1] for seed in (None, 1, 2)]
        assert len({run.tobytes() for run in runs}) == 1, way.name
        sums[way.name] = runs[0].tobytes()
    left_to_right = values[0].copy()
    for value in values[1:]:
        left_to_right += value
    assert sums["one_step"] == sums["ranges"] == left_to_right.tobytes()
    assert sums["ring"] != sums["one_step"] != sums["tree"]


def push_and_pull(contexts, values, **pushes):
    """Push and pull twice on ``contexts``; return the pulled values of each device and the store."""
    kv = mx.kv.create("device")
    kv.init("w", mx.nd.zeros(values[0].shape, ctx=contexts[0]))
    gradients = [mx.nd.array(value, ctx=ctx) for value, ctx in zip(values, contexts, strict=True)]
    outs = [mx.nd.empty(values[0].shape, ctx=ctx) for ctx in contexts]
    for _ in range(2):
        kv.push("w", gradients, **pushes)
        kv.pull("w", outs, **pushes)
    return [out.asnumpy() for out in outs], kv


@pytest.mark.parametrize("kind", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice"])
@pytest.mark.parametrize("name", ["nvlink mesh", "pcie tree"])
def test_a_store_makes_the_same_sums_on_every_engine(kind, name):
    """On every engine a store computes the sums of its planned route, and its buffers have the planned sizes."""
    connect(LINKS[name])
    result = engine.create(kind)
    contexts = [mx.sim(index) for index in range(8)]
    with engine.using(result):
        for shape in ((10,), (300, 700)):
            values = [np.random.default_rng(place).standard_normal(shape).astype("f4") for place in range(8)]
            actual, kv = push_and_pull(contexts, values)
            plan = make_chooser().plan(contexts, 0, values[0].size, 4)
            want, _ = np.empty(values[0].size, "f4"), None
            run_steps(plan.push, [value.reshape(-1) for value in values], want, random.Random(0))
            for out in actual:
                np.testing.assert_array_equal(out.reshape(-1), want)
            size, nbytes = values[0].size, values[0].nbytes
            figures = kv.statistics()
            assert kv.buffer_bytes([(size, nbytes)], contexts, updates=True) == {
                name: figures[f"{name}_bytes"] for name in ("stored", "merged", "staging")
            }
    result.stop()


@pytest.mark.parametrize("updates", [False, True])
def test_values_are_stored_where_they_are_summed(updates):
    """The stored value of a key is on the device of its merge buffer, with an updater and without."""
    contexts = [mx.sim(i) for i in range(4)]
    kv = mx.kv.create("device")
    if updates:
        kv.set_updater(lambda key, merged, stored: stored.__iadd__(merged))
    for key in range(4):
        kv.init(key, mx.nd.zeros((5,)))
        kv.push(key, [mx.nd.ones((5,), ctx=ctx) for ctx in contexts])
        assert kv._stored[key].context == kv._merged[key].context == contexts[key]
        assert kv._stored[key].tolist() == [4] * 5


def test_other_links_are_seen_by_a_store_that_has_exchanged():
    """After ``connect()`` the next push uses the planned route on the new links, and exactly its buffers."""
    contexts = [mx.sim(index) for index in range(8)]
    kv = mx.kv.create("device")
    kv.init("w", mx.nd.zeros((200_000,), ctx=contexts[0]))
    kv.set_updater(lambda key, merged, stored: None)
    arrays = [mx.nd.full((200_000,), place + 1.0, ctx=ctx) for place, ctx in enumerate(contexts)]
    ways = []
    for links in (LINKS["pcie tree"], LINKS["switch"], None, LINKS["pcie tree"]):
        connect(links)
        kv.push("w", arrays)
        mx.nd.waitall()
        assert (kv._merged["w"].asnumpy() == 36).all()
        plan = kv._between.plan(contexts, kv._merged["w"].context, 200_000, 4)
        assert kv.statistics()["staging_bytes"] == kv._between.bytes_of(plan, 4)
        ways.append(plan.seconds)
    assert ways[0] == ways[3]
    assert len({tuple(seconds.items()) for seconds in ways}) == 3


def test_an_optimizer_runs_where_the_sum_is():
    """With an optimizer, every device below a PCIe tree pulls the updated weight."""
    connect(LINKS["pcie tree"])
    contexts = [mx.sim(index) for index in range(4)]
    kv = mx.kv.create("device")
    kv.init("w", mx.nd.ones((1000,)))
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5, rescale_grad=1.0, wd=0.0))
    kv.push("w", [mx.nd.full((1000,), place + 1.0, ctx=ctx) for place, ctx in enumerate(contexts)])
    outs = [mx.nd.empty((1000,), ctx=ctx) for ctx in contexts]
    kv.pull("w", outs)
    for out in outs:
        assert (out.asnumpy() == 1 - 0.5 * 10).all()


def test_a_gradient_that_failed_fails_the_push_alone():
    """A failed gradient fails its own push; a pull after the next push returns that push's sum on every device."""
    connect(LINKS["pcie tree"])
    contexts = [mx.sim(index) for index in range(3)]
    kv = mx.kv.create("device")
    kv.init("w", mx.nd.ones((5,), ctx=contexts[0]))
    good = [mx.nd.ones((5,), ctx=ctx) for ctx in contexts]
    bad = mx.nd.ones((5,), ctx=contexts[1])

    def fail():
        raise ValueError("a mistake of mine")

    engine.get().push(fail, (), (bad.var,), contexts[1], name="mine")
    kv.push("w", [good[0], bad, good[2]])
    with pytest.raises(ValueError, match="a mistake of mine"):
        mx.nd.waitall()
    kv.push("w", good)
    outs = [mx.nd.empty((5,), ctx=ctx) for ctx in contexts]
    kv.pull("w", outs)
    assert all(out.tolist() == [3.0] * 5 for out in outs)


@pytest.mark.shows("MXNET_ENABLE_GPU_P2P")
@pytest.mark.parametrize("peers", [True, False])
def test_p2p_of_gpus_is_on_or_off(peers, monkeypatch):
    """With ``MXNET_ENABLE_GPU_P2P=1`` GPUs copy gradients directly; with 0, through page-locked host memory."""
    monkeypatch.setattr(config, "_first_values", {})  # as in a process that has not read the variable yet
    monkeypatch.setenv("MXNET_ENABLE_GPU_P2P", str(int(peers)))
    with standin_cupy.installed():
        contexts = [mx.gpu(index) for index in range(4)]
        values = [np.random.default_rng(place).standard_normal(2000).astype("f4") for place in range(4)]
        actual, kv = push_and_pull(contexts, values)
        for out in actual:
            np.testing.assert_allclose(out, sum(values), rtol=1e-5, atol=1e-5)
        assert bool(standin_cupy.meter.launches["memcpy peer"]) is peers
        direct = 3 * 8000
        assert kv.statistics()["staging_bytes"] == direct if peers else kv.statistics()["staging_bytes"] > direct


def test_p2p_of_simulated_devices_is_on_or_off(monkeypatch):
    """Without peer copies an exchange takes more than 1.5 times as long on the clocks of simulated devices."""
    contexts = [mx.sim(index) for index in range(4)]
    values = [np.ones(100_000, "f4")] * 4
    taken = []
    for peers in ("1", "0"):
        monkeypatch.setenv("MXNET_ENABLE_GPU_P2P", peers)
        connect(matrix([[50e9] * 4] * 4, 2e-6))
        mx.nd.waitall()
        taken.append(seconds_of(lambda: (push_and_pull(contexts, values), mx.nd.waitall()), contexts))
    assert taken[1] > 1.5 * taken[0]


def test_one_step_wins_ties():
    """If several routes take the same time, as on two devices, the first, ``one_step``, is chosen."""
    connect(matrix([[1e9] * 2] * 2, 1e-6))
    plan = make_chooser().plan([mx.sim(0), mx.sim(1)], 0, 10, 4)
    assert plan.way == one_step(2, 10, 0)


def test_pulls_of_a_store_that_compresses_take_no_room_for_sums():
    """A store with compression uses the planned staging bytes, with a host copy only if devices are not peers."""
    contexts = [mx.sim(index) for index in range(3)]
    for links in (matrix([[1e9] * 3] * 3), matrix([[0] * 3] * 3)):
        connect(links)
        kv = mx.kv.create("device")
        kv.set_gradient_compression({"type": "2bit"})
        kv.init("w", mx.nd.zeros((100,), ctx=contexts[0]))
        kv.set_updater(lambda key, merged, stored: None)
        arrays = [mx.nd.ones((100,), ctx=ctx) for ctx in contexts]
        for _ in range(2):
            kv.push("w", arrays)
            kv.pull("w", arrays)
        figures = kv.statistics()
        assert kv.buffer_bytes([(100, 400)], contexts, updates=True)["staging"] == figures["staging_bytes"]
        assert (figures["staging_bytes"] > 400) is (not links.peers(0, 1))
