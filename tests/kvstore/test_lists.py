"""Calls with lists of keys: their buckets, engine operations, fused optimizer steps and failures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType

import numpy as np
import pytest

import weftplan as mx
from tests import standin_cupy
from tests.standin_cupy.nccl import nccl
from weftplan import engine

SHAPES = [(3,), (40, 5), (1,), (700,), (6, 6), (2, 3)]
KEYS = [f"w{number}" for number in range(len(SHAPES))]


def make_arrays(seed: int, contexts: list[mx.Context], dtype: str = "float32") -> list[list[mx.nd.NDArray]]:
    """Return random arrays of all keys, one row for each key with one array for each context."""
    rng = np.random.default_rng(seed)
    return [[mx.nd.array(rng.standard_normal(shape), ctx=ctx, dtype=dtype) for ctx in contexts] for shape in SHAPES]


def make_store(kind: str, contexts: list[mx.Context], dtype: str = "float32") -> mx.kv.KVStoreBase:
    """Return a store with all keys."""
    kv = mx.kv.create(kind)
    kv.init(KEYS, [row[0] for row in make_arrays(0, contexts, dtype)])
    return kv


@pytest.fixture
def pushed_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of operations pushed to an engine that runs none of them inline."""
    names: list[str] = []
    own = engine.create("ThreadedEnginePerDevice")
    push = own.push
    with engine.using(own):
        monkeypatch.setattr(own, "write_inline", lambda *args: False)
        monkeypatch.setattr(own, "push", lambda *args, **given: (names.append(given["name"]), push(*args, **given))[1])
        yield names
        own.wait_for_all()
    own.stop()


@pytest.mark.parametrize(("count", "buckets"), [("1", 6), ("3", 2), ("4", 2), ("-1", 1)])
@pytest.mark.parametrize("optimizer", [None, "sgd", "adam"])
@pytest.mark.parametrize("place", [mx.cpu, mx.sim])
def test_a_bucket_is_one_operation(
    count: str,
    buckets: int,
    optimizer: str | None,
    place: Callable[[int], mx.Context],
    pushed_names: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sum, the optimizer step and the copies of each bucket are one operation, for each size of buckets."""
    monkeypatch.setenv("FLAGS_fuse_parameter_groups_size", count)
    contexts = [place(0), place(1)]
    kv = make_store("device", contexts)
    if optimizer:
        kv.set_optimizer(mx.optimizer.create(optimizer, learning_rate=0.1))
    gradients, outs = make_arrays(1, contexts), make_arrays(2, contexts)
    kv.pushpull(KEYS, gradients, outs)  # makes merge buffers and states
    mx.nd.waitall()
    pushed_names.clear()
    kv.pushpull(KEYS, gradients, outs)
    assert pushed_names == ["KVStoreReduce" if place is mx.cpu else "KVStoreExchange"] * buckets


def test_flags_group_calls_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bucket of 26 keys on four GPUs takes one NCCL group of reductions and one of broadcasts."""
    groups: dict[str, int] = {}
    for count in ("1", "3", "-1"):
        monkeypatch.setenv("FLAGS_fuse_parameter_groups_size", count)
        with standin_cupy.installed("NaiveEngine"), nccl() as library:
            start = library.groupStart
            monkeypatch.setattr(
                library,
                "groupStart",
                lambda start=start, count=count: (groups.__setitem__(count, groups.get(count, 0) + 1), start())[1],
            )
            gpus = [mx.gpu(index) for index in range(4)]
            kv = mx.kv.create("nccl")
            keys = list(range(26))
            kv.init(keys, [mx.nd.zeros((7,), ctx=gpus[0]) for _ in keys])
            values = [[mx.nd.full((7,), key + place, ctx=gpu) for place, gpu in enumerate(gpus)] for key in keys]
            kv.pushpull(keys, values)
            for key, row in enumerate(values):
                assert all((array.asnumpy() == 4 * key + 6).all() for array in row)
    assert groups == {"1": 52, "3": 18, "-1": 2}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "signum", "ftrl", "nag", "rmsprop", "lamb"])
@pytest.mark.parametrize("kind", ["local", "device"])
def test_a_list_has_the_bits_of_single_keys(kind: str, optimizer: str, dtype: str) -> None:
    """Exchanging a list of keys gives the bits of exchanging single keys, for float32 and float16 weights."""
    contexts = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
    results = []
    for listed in (True, False):
        kv = make_store(kind, contexts, dtype)
        kv.set_optimizer(mx.optimizer.create(optimizer, learning_rate=0.1, multi_precision=True))
        outs = make_arrays(1, contexts, dtype)
        for step in range(3):
            gradients = make_arrays(step + 2, contexts, dtype)
            if listed:
                kv.pushpull(KEYS, gradients, outs)
            else:
                for key, gradient, out in zip(KEYS, gradients, outs, strict=True):
                    kv.push(key, gradient)
                    kv.pull(key, out)
        results.append([out.asnumpy().tobytes() for row in outs for out in row])
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", ["local", "device"])
def test_an_out_that_is_the_gradient_of_another_key(kind: str) -> None:
    """``pushpull`` reads every gradient before it writes; an array listed twice as an out gets the last key's sum."""
    kv = mx.kv.create(kind)
    kv.init([0, 1, 2], [mx.nd.zeros((5,))] * 3)
    arrays = [mx.nd.full((5,), value) for value in (1.0, 2.0, 3.0)]
    kv.pushpull([0, 1, 2], arrays, [arrays[1], arrays[2], arrays[0]])
    assert [array.asnumpy()[0] for array in arrays] == [3.0, 1.0, 2.0]
    out = mx.nd.empty((5,))
    kv.pushpull([0, 1, 2], [mx.nd.full((5,), value) for value in (1.0, 2.0, 3.0)], [out] * 3)
    assert out.tolist() == [3.0] * 5


def test_a_gradient_that_failed_fails_its_key_alone() -> None:
    """A gradient that has failed already fails its own key only; the next exchange gives this key its new sum."""
    kv = make_store("device", [mx.cpu(0)])
    gradients, outs = make_arrays(1, [mx.cpu(0)]), make_arrays(2, [mx.cpu(0)])

    def fail() -> None:
        raise ValueError("no gradient")

    engine.get().push(fail, (), (gradients[2][0].var,))
    with pytest.raises(ValueError, match="no gradient"):
        engine.get().wait_for_var(gradients[2][0].var)
    kv.pushpull(KEYS, gradients, outs)
    for number, (row, out) in enumerate(zip(gradients, outs, strict=True)):
        if number == 2:
            with pytest.raises(ValueError, match="no gradient"):
                out[0].asnumpy()
        else:
            np.testing.assert_array_equal(out[0].asnumpy(), row[0].asnumpy())
    repeated = make_arrays(3, [mx.cpu(0)])
    kv.pushpull(KEYS, repeated, outs)
    np.testing.assert_array_equal(outs[2][0].asnumpy(), repeated[2][0].asnumpy())


class Failing(mx.optimizer.SGD):
    """SGD whose update of the third key raises an error."""

    def update(self, index: object, weight: mx.nd.NDArray, grad: mx.nd.NDArray, state: object) -> None:
        """Update a weight, or raise ValueError at the third key."""
        if index == KEYS[2]:
            raise ValueError("a mistake of mine")
        super().update(index, weight, grad, state)

    update.one_step = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("fused", [True, False])
def test_failing_updater_names_the_updated_keys(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If an optimizer raises, notes of the error list the updated keys, and exactly these weights have changed.

    A fused step updates all keys of a bucket or none.
    """
    monkeypatch.setenv("FLAGS_fuse_parameter_groups_size", "2")
    kv = make_store("local", [mx.cpu(0)])
    before = {key: row[0].asnumpy() for key, row in zip(KEYS, make_arrays(0, [mx.cpu(0)]), strict=True)}
    optimizer = Failing(learning_rate=1.0)
    if fused:
        kv.set_optimizer(optimizer)
    else:
        update = mx.optimizer.get_updater(optimizer)
        kv.set_updater(lambda key, gradient, weight: update(key, gradient, weight))
    gradients = make_arrays(1, [mx.cpu(0)])
    with pytest.raises(ValueError, match="a mistake of mine") as caught:
        kv.push(KEYS, gradients)
    told = "\n".join(caught.value.__notes__)
    # fused steps begin with the last bucket, single steps with the first key
    updated = [KEYS[5], KEYS[4]] if fused else [KEYS[0], KEYS[1]]
    assert str(updated) in told
    assert KEYS[2] in told
    for key, row in zip(KEYS, gradients, strict=True):
        out = mx.nd.empty(row[0].shape)
        kv.pull(key, out)
        np.testing.assert_array_equal(out.asnumpy(), before[key] - row[0].asnumpy() if key in updated else before[key])


def test_a_prepared_exchange_follows_the_store() -> None:
    """A prepared exchange uses the current gradients, keys and optimizer, and raises the error of a failed gradient."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    kv = make_store("device", contexts)
    gradients, outs = make_arrays(1, contexts), make_arrays(2, contexts)
    exchange = kv.prepare(KEYS, gradients, outs)

    def check(wanted: Callable[[int, np.ndarray], np.ndarray]) -> None:
        exchange()
        for number, (row, out) in enumerate(zip(gradients, outs, strict=True)):
            total = row[0].asnumpy() + row[1].asnumpy()
            for array in out:
                np.testing.assert_array_equal(array.asnumpy(), wanted(number, total))

    check(lambda number, total: total)
    gradients[0][0][:] = 7
    check(lambda number, total: total)
    kv.init("more", mx.nd.zeros((2,)))
    check(lambda number, total: total)
    held = [out[0].asnumpy() for out in outs]
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
    check(lambda number, total: held[number] - total)

    def fail() -> None:
        raise ValueError("no gradient")

    engine.get().push(fail, (), (gradients[1][0].var,))
    exchange()
    with pytest.raises(ValueError, match="no gradient"):  # its key fails, and so would other keys of the bucket
        outs[1][0].asnumpy()


def train_module(kind: str | None) -> mx.mod.Module:
    """Return a Module of six parameters on two devices after three updates and a further backward pass.

    ``kind`` is the name of a store, or None for an update without a store.
    """
    data = mx.sym.Variable("data")
    for width in (32, 32):
        data = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=width), act_type="relu")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(data, num_hidden=10), name="softmax")
    module = mx.mod.Module(net, context=[mx.cpu(0), mx.cpu(1)])
    module.bind([("data", (16, 20))], [("softmax_label", (16,))])
    module.init_params(mx.init.Xavier())
    kv = None if kind is None else mx.kv.create(kind)
    module.init_optimizer(kvstore=kv, optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
    batch = mx.io.DataBatch([mx.nd.ones((16, 20))], [mx.nd.zeros((16,))])
    for _ in range(3):
        module.forward_backward(batch)
        module.update()
    module.forward_backward(batch)
    mx.nd.waitall()
    return module


@pytest.mark.parametrize(("kind", "most"), [("local", 300), ("device", 300), (None, 550)])
def test_an_update_makes_few_python_calls(kind: str | None, most: int) -> None:
    """Updating six parameters on two devices takes at most 300 Python calls.

    Without a store each device updates all of them itself, which takes at most 550 calls.
    """
    calls = [0]

    def count(frame: FrameType, event: str, given: object) -> None:
        calls[0] += event == "call"

    own = engine.create("ThreadedEnginePerDevice")  # an engine with earlier failures checks each array
    with engine.using(own):
        module = train_module(kind)
        sys.setprofile(count)
        module.update()
        sys.setprofile(None)
        own.wait_for_all()
    own.stop()
    assert calls[0] <= most, calls
