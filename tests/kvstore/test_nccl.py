"""The store ``nccl``, on the stand-in for CuPy: sums, pulls, optimizer steps and refused calls."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import weftplan as mx
from tests import standin_cupy
from tests.contract.devices import GPUS, place
from tests.standin_cupy.nccl import nccl
from weftplan import device, engine
from weftplan.errors import KVStoreError


@pytest.fixture(params=["ThreadedEnginePerDevice", "NaiveEngine"])
def gpus(request):
    """Four stand-in GPUs with NCCL, on each of two engines."""
    with standin_cupy.installed(request.param), nccl():
        yield [mx.gpu(index) for index in range(4)]


@pytest.fixture(params=GPUS)
def cards(request):
    """All GPUs, at least two, with NCCL: first those of the stand-in, then real GPUs."""
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(place(request.param))
        count = device.num_gpus()
        if request.param == "standin":
            stack.enter_context(nccl())
        elif count < 2:
            pytest.skip("there is one GPU")
        yield [context(index) for index in range(count)]


def test_sums_of_all_cards(cards):
    """Every GPU pulls the sum over all GPUs, and two trainings of a Module give the same weights."""
    kv = mx.kv.create("nccl")
    kv.init("w", mx.nd.zeros((1000,), ctx=cards[0]))
    for step in range(5):
        values = [np.arange(1000, dtype="f4") + place + step for place in range(len(cards))]
        kv.push("w", [mx.nd.array(value, ctx=ctx) for value, ctx in zip(values, cards, strict=True)])
        outs = [mx.nd.empty((1000,), ctx=ctx) for ctx in cards]
        kv.pull("w", outs)
        for out in outs:
            np.testing.assert_array_equal(out.asnumpy(), sum(values))
    results = []
    for _ in range(2):
        mx.random.seed(1)
        net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4), name="softmax")
        rng = np.random.default_rng(0)
        rows = 4 * len(cards)
        data = rng.standard_normal((4 * rows, 6)).astype("f4")
        batches = mx.io.NDArrayIter(data, rng.integers(0, 4, 4 * rows).astype("f4"), rows)
        module = mx.mod.Module(net, context=cards)
        module.fit(batches, kvstore="nccl", num_epoch=2, optimizer_params={"learning_rate": 0.1})
        results.append([array.asnumpy().tobytes() for _, array in sorted(module.get_params()[0].items())])
    assert results[0] == results[1]


@pytest.fixture
def threaded():
    """Four stand-in GPUs with NCCL, on an engine that raises an operation's error at the next wait."""
    with standin_cupy.installed(), nccl():
        yield [mx.gpu(index) for index in range(4)]


def test_sums_and_pulls_are_one_call_of_each_member(gpus):
    """A push calls NCCL once per GPU and so does a pull; nothing else is copied between GPUs."""
    kv = mx.kv.create("nccl")
    assert kv.type == "nccl"
    kv.init("w", mx.nd.zeros((70,), ctx=gpus[0]))
    values = [np.arange(70, dtype="f4") * (place + 1) for place in range(4)]
    gradients = [mx.nd.array(value, ctx=ctx) for value, ctx in zip(values, gpus, strict=True)]
    outs = [mx.nd.empty((70,), ctx=ctx) for ctx in gpus]
    kv.push("w", gradients)
    kv.pull("w", outs)
    for out in outs:
        np.testing.assert_array_equal(out.asnumpy(), sum(values))
    standin_cupy.meter.reset()
    kv.push("w", gradients)
    kv.pull("w", outs)
    mx.nd.waitall()
    launches = standin_cupy.meter.launches
    assert (launches["nccl reduce"], launches["nccl broadcast"], launches["memcpy peer"]) == (4, 4, 0)


def test_sums_are_spread_over_the_gpus_and_planned(gpus):
    """Each key is summed on the GPU with the fewest sums so far, an optimizer runs, and buffers have planned sizes."""
    kv = mx.kv.create("nccl")
    kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0, wd=0.0))
    outs = {}
    for key in range(4):
        kv.init(key, mx.nd.ones((8, 4), ctx=gpus[0]))
        kv.push(key, [mx.nd.full((8, 4), 0.25, ctx=ctx) for ctx in gpus])
        outs[key] = [mx.nd.empty((8, 4), ctx=ctx) for ctx in gpus]
        kv.pull(key, outs[key])
    assert [kv._merged[key].context for key in range(4)] == gpus
    assert all((out.asnumpy() == 0).all() for actual in outs.values() for out in actual)
    figures = kv.statistics()
    planned = kv.buffer_bytes([(32, 128)] * 4, gpus, updates=True)
    assert planned == {name: figures[f"{name}_bytes"] for name in ("stored", "merged", "staging")}


def test_one_gpu_and_other_places_go_without_nccl(gpus):
    """A push of a single array and a pull to the host do not call NCCL."""
    kv = mx.kv.create("nccl")
    kv.init("w", mx.nd.zeros((5,), ctx=gpus[1]))
    kv.push("w", mx.nd.ones((5,), ctx=gpus[1]))
    out = mx.nd.empty((5,))
    kv.pull("w", out)
    assert out.tolist() == [1.0] * 5
    assert standin_cupy.meter.launches["nccl reduce"] == 0


def test_a_gradient_that_failed_fails_its_push_alone(threaded):
    """A push with a failed gradient raises its error; after the next push all GPUs pull that push's sum."""
    gpus = threaded
    kv = mx.kv.create("nccl")
    kv.init("w", mx.nd.zeros((5,), ctx=gpus[0]))
    good = [mx.nd.ones((5,), ctx=ctx) for ctx in gpus]
    bad = mx.nd.ones((5,), ctx=gpus[2])

    def fail():
        raise ValueError("a mistake of mine")

    engine.get().push(fail, (), (bad.var,), gpus[2], name="mine")
    kv.push("w", [good[0], good[1], bad, good[3]])
    with pytest.raises(ValueError, match="a mistake of mine"):
        mx.nd.waitall()
    kv.push("w", good)
    outs = [mx.nd.empty((5,), ctx=ctx) for ctx in gpus]
    kv.pull("w", outs)
    assert all(out.tolist() == [4.0] * 5 for out in outs)


def test_what_nccl_does_not_do_is_refused(gpus):
    """``nccl`` refuses compression, and gradients of dtype bool, which NCCL does not sum."""
    kv = mx.kv.create("nccl")
    with pytest.raises(KVStoreError, match="not for a store 'nccl'"):
        kv.set_gradient_compression({"type": "2bit"})
    kv.init("w", mx.nd.zeros((5,), ctx=gpus[0], dtype="bool"))
    with pytest.raises(KVStoreError, match="'w' holds bool, which NCCL does not sum"):
        kv.push("w", [mx.nd.zeros((5,), ctx=ctx, dtype="bool") for ctx in gpus])


def test_without_the_library_the_error_says_what_to_install():
    """If CuPy finds no NCCL, creating the store raises an error that names the package to install."""
    with (
        standin_cupy.installed(),
        nccl(available=False),
        pytest.raises(KVStoreError, match="pip install nvidia-nccl-cu12"),
    ):
        mx.kv.create("nccl")
