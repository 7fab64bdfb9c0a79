"""CUDA graphs: segments of a bound executor captured once, replayed with one launch, the same bits; else why not."""

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import place
from tests.standin_cupy import CUDARuntimeError, meter
from weftplan import device


def network(extra=lambda x: x):
    """A small network with a chain, a branch and a loss."""
    sym = mx.sym
    x = sym.FullyConnected(sym.Variable("data"), num_hidden=6, name="a")
    x = extra(sym.Activation(x, act_type="tanh") * 0.5 + x)
    return sym.SoftmaxOutput(sym.FullyConnected(x, num_hidden=3, name="b"), name="softmax")


def trained(ctx, net, steps=5):
    """(weights, executor) after some steps, each with data of its own."""
    executor = net.simple_bind(ctx, data=(4, 5), softmax_label=(4,))
    rng = np.random.default_rng(1)
    for name, array in executor.arg_dict.items():
        array[:] = rng.standard_normal(array.shape).astype(np.float32) if name != "softmax_label" else 1
    launched = []
    for _ in range(steps):
        meter.reset()
        executor.forward(is_train=True, data=mx.nd.array(rng.standard_normal((4, 5)), ctx=ctx))
        executor.backward()
        mx.nd.waitall()
        launched.append(dict(meter.launches))
        for name, grad in executor.grad_dict.items():
            if grad is not None and name not in ("data", "softmax_label"):
                executor.arg_dict[name] -= 0.1 * grad
    return {n: a.asnumpy() for n, a in executor.arg_dict.items()}, executor, launched


@pytest.mark.shows("MXNET_ENABLE_CUDA_GRAPHS")
def test_the_bits_are_the_same(monkeypatch):
    """Five steps with new data each: the graph reads the arrays anew, and is one launch from the third run on."""
    found = []
    for setting in ("0", "1"):
        monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", setting)
        with place("standin") as context:
            weights, executor, launched = trained(context(0), network())
            states = [state for *_, state in executor.cuda_graphs()]
            del executor
            found.append(weights)
        if setting == "1":
            assert set(states) == {"captured"}
            assert "graph" not in launched[0]
            assert launched[2]["graph"] == launched[4]["graph"] == len(states)
            assert "sgemm" in launched[0]
            assert "sgemm" not in launched[4]
        else:
            assert set(states) == {"MXNET_ENABLE_CUDA_GRAPHS is off"}
            assert not any("graph" in launches for launches in launched)
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name])


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (lambda x: mx.sym.Dropout(x, p=0.5), "random numbers"),
        (lambda x: mx.sym.gather_nd(x, mx.sym._ones(shape=(1, 4))), "tolist"),
        (lambda x: mx.sym.sort(x, axis=1), "CuPy takes"),
    ],
)
def test_what_cannot_be_captured_says_why(monkeypatch, extra, text):
    """Random numbers, an operator that makes the host wait, one that takes memory: call by call, the same bits."""
    found = []
    for setting in ("0", "1"):
        monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", setting)
        with place("standin") as context:
            mx.random.seed(3)
            weights, executor, _ = trained(context(0), network(extra))
            found.append(weights)
            states = [state for *_, state in executor.cuda_graphs()]
            del executor
    assert any(text in state for state in states), states
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name])


def test_memory_that_moves_is_captured_again(monkeypatch):
    """New addresses have segments of their own, which are enqueued, captured and replayed from the start."""
    monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", "1")
    with place("standin") as context:
        _, executor, _ = trained(context(0), network())
        executor._forget()
        for wanted in ("to be captured", "captured", "captured"):
            executor.forward(is_train=True)
            executor.backward()
            mx.nd.waitall()
            assert {state for *_, state in executor.cuda_graphs()} == {wanted}
        del executor


def test_who_has_no_graphs_says_so(monkeypatch):
    """A host, memory that is taken as the graph runs, an engine without streams."""
    monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", "1")
    executor = network().simple_bind(mx.cpu(), data=(4, 5), softmax_label=(4,))
    executor.forward()
    assert {state for *_, state in executor.cuda_graphs()} == {"cpu(0) has no CUDA graphs"}
    for settings, strategy, text in (
        ({}, "dynamic", "memory is taken as the graph runs"),
        ({"kind": "NaiveEngine"}, "static", "no stream of this GPU is current"),
    ):
        monkeypatch.setenv("WEFTPLAN_EXECUTOR_STRATEGY", strategy)
        with place("standin", **settings) as context:
            _, executor, _ = trained(context(0), network(), 2)
            assert {state for *_, state in executor.cuda_graphs()} == {text}
            del executor


def test_the_standin_is_strict():
    """While a stream is captured nothing runs, waiting and allocating are refused, and spoil the capture."""
    with place("standin") as context:
        xp = device.get(context(0)).xp
        x = xp.zeros(3)
        stream = xp.cuda.Stream(non_blocking=True)
        xp.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture()
            xp.add(x, 1, out=x)
            graph = stream.end_capture()
            assert x.host.tolist() == [0, 0, 0]
            graph.launch(stream)
            graph.launch(stream)
            assert x.host.tolist() == [2, 2, 2]
            for call in (lambda: x + 1, stream.synchronize, lambda: bool(x[0]), lambda: x.set(np.ones(3))):
                stream.begin_capture()
                with pytest.raises(CUDARuntimeError, match="not permitted when stream is capturing"):
                    call()
                with pytest.raises(CUDARuntimeError, match="Invalidated"):
                    stream.end_capture()
        with pytest.raises(CUDARuntimeError, match="default stream"):
            xp.cuda.get_current_stream().begin_capture()
