"""Stores over devices with streams: sums run after the copies that they read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine


def train(kind: str, devices: list[mx.Context], rounds: int) -> list[np.ndarray]:
    """Return the weight on each device after ``rounds`` of writing gradients, push and pull with momentum SGD."""
    shape = (64, 10)
    kv = mx.kv.create(kind)
    start = np.random.default_rng(0).standard_normal(shape).astype("float32")
    kv.init("w", mx.nd.array(start, ctx=devices[0]))
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.01, momentum=0.9))
    weights = [mx.nd.array(start, ctx=device) for device in devices]
    gradients = [mx.nd.zeros(shape, ctx=device) for device in devices]
    for number in range(rounds):
        for rank, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
            gradient[:] = number + rank
            gradient *= 0.5
            gradient += weight
        kv.push("w", gradients)
        kv.pull("w", out=weights)
    return [weight.asnumpy() for weight in weights]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", ["local", "device"])
def test_devices_with_streams_give_what_the_host_gives(kind: str, count: int) -> None:
    """Every simulated device gets the bits that CPU contexts get."""
    expected = train(kind, [mx.cpu(i) for i in range(count)], 40)
    got = train(kind, [mx.sim(i) for i in range(count)], 40)
    for weight in got:
        assert weight.tobytes() == expected[0].tobytes()


def test_loaded_states_follow_the_weight(tmp_path: Path) -> None:
    """Loaded optimizer states are on the host, and move to the weight's device on first use."""
    outs = []
    for place in (mx.cpu(0), mx.sim(0)):
        kv = mx.kv.create("device")
        kv.init("w", mx.nd.ones((4,), ctx=place))
        kv.set_optimizer(mx.optimizer.create("adam", learning_rate=0.1))
        for number in range(3):
            kv.push("w", mx.nd.full((4,), number, ctx=place))
            if number == 1:
                kv.save_optimizer_states(tmp_path / "states")
                kv.load_optimizer_states(tmp_path / "states")
                assert [state.context for state in kv._states().states["w"]] == [mx.cpu(0)] * 2
        assert [state.context for state in kv._states().states["w"]] == [place] * 2
        outs.append(mx.nd.empty((4,)))
        kv.pull("w", out=outs[-1])
    assert outs[0].asnumpy().tobytes() == outs[1].asnumpy().tobytes()


def test_staging_copies_to_the_device_of_a_sum() -> None:
    """Host arrays and arrays of other devices reach the device of a sum through staging copies."""
    kv = mx.kv.create("device")
    kv.init("w", mx.nd.zeros((8,)))
    kv.push("w", mx.nd.ones((8,), ctx=mx.sim(0)))
    assert kv.statistics()["staging_bytes"] == 0
    places = [mx.cpu(0), mx.sim(1), mx.sim(0), mx.cpu_pinned(0)]
    kv.push("w", [mx.nd.full((8,), number, ctx=place) for number, place in enumerate(places)])
    out = mx.nd.empty((8,))
    kv.pull("w", out=out)
    assert out.tolist() == [6.0] * 8
    assert kv.statistics()["staging_bytes"] == 3 * 32


@pytest.mark.parametrize("kind", ["local", "device"])
def test_priorities_reach_the_copies_between_devices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``push`` and ``pull`` give their priority to all operations that they push, also to copies between devices."""
    pushed = []
    result = engine.create("ThreadedEnginePerDevice")
    push = result.push

    def recording(*args, **settings):
        pushed.append((settings["name"], settings["priority"]))
        return push(*args, **settings)

    with engine.using(result):
        gradients = [mx.nd.ones((3,), ctx=mx.sim(i)) for i in range(2)]
        kv = mx.kv.create(kind)
        kv.init("w", mx.nd.zeros((3,)))
        kv.push("w", gradients)  # the first push makes buffers, too
        monkeypatch.setattr(result, "push", recording)
        kv.push("w", gradients, priority=-5)
        kv.pull("w", out=gradients, priority=-5)
        result.wait_for_all()
    result.stop()
    assert {name for name, _ in pushed} >= {"local": {"KVStoreReduce", "copy"}, "device": {"KVStoreExchange"}}[kind]
    assert {priority for _, priority in pushed} == {-5}
