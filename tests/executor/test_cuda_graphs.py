"""CUDA graphs: a segment is captured once and replayed by one launch with the same bits, or a text says why not."""

import threading

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import GPUS, place
from tests.standin_cupy import CUDARuntimeError, meter
from weftplan import device
from weftplan.device import capture_gate


def network(extra=lambda x: x):
    """Return a small network with a chain, a branch and a loss; ``extra`` is applied to the join."""
    sym = mx.sym
    x = sym.FullyConnected(sym.Variable("data"), num_hidden=6, name="a")
    x = extra(sym.Activation(x, act_type="tanh") * 0.5 + x)
    return sym.SoftmaxOutput(sym.FullyConnected(x, num_hidden=3, name="b"), name="softmax")


def train(ctx, net, steps=5):
    """Train for ``steps`` steps, each with new data.

    Returns:
        The final arguments by name, the executor, and the launches of each step.
    """
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
@pytest.mark.parametrize("where", GPUS)
def test_the_bits_are_the_same(monkeypatch, where):
    """With CUDA graphs five steps give the same weights, and from the third step on each segment is one launch."""
    results = []
    for setting in ("0", "1"):
        monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", setting)
        with place(where, gpu_workers=2) as context:
            weights, executor, launched = train(context(0), network())
            states = [state for *_, state in executor.cuda_graphs()]
            del executor
            results.append(weights)
        if setting == "1":
            assert set(states) == {"captured"}
            if where == "gpu":  # launches of a real GPU are not counted
                continue
            assert "graph" not in launched[0]
            assert launched[2]["graph"] == launched[4]["graph"] == len(states)
            assert "sgemm" in launched[0]
            assert "sgemm" not in launched[4]
        else:
            assert set(states) == {"MXNET_ENABLE_CUDA_GRAPHS is off"}
            assert not any("graph" in launches for launches in launched)
    for name, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][name])


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (lambda x: mx.sym.Dropout(x, p=0.5), "random numbers"),
        (lambda x: mx.sym.gather_nd(x, mx.sym._ones(shape=(1, 4))), "tolist"),
        (lambda x: mx.sym.sort(x, axis=1), "CuPy takes"),
    ],
)
@pytest.mark.parametrize("where", GPUS)
def test_segments_that_cannot_be_captured(monkeypatch, extra, text, where):
    """Segments with random numbers, host waits or allocations are not captured, and their state says why.

    The bits are those without CUDA graphs.
    """
    results = []
    for setting in ("0", "1"):
        monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", setting)
        with place(where) as context:
            mx.random.seed(3)
            weights, executor, _ = train(context(0), network(extra))
            results.append(weights)
            states = [state for *_, state in executor.cuda_graphs()]
            del executor
    if where == "gpu":  # CUDA describes a wait in other words
        assert set(states) != {"captured"}
    else:
        assert any(text in state for state in states), states
    for name, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][name])


@pytest.mark.parametrize("where", GPUS)
def test_memory_that_moves_is_captured_again(monkeypatch, where):
    """After its memory has moved, a segment is run, captured and replayed again."""
    monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", "1")
    with place(where) as context:
        _, executor, _ = train(context(0), network())
        executor._forget()
        for wanted in ("to be captured", "captured", "captured"):
            executor.forward(is_train=True)
            executor.backward()
            mx.nd.waitall()
            assert {state for *_, state in executor.cuda_graphs()} == {wanted}
        del executor


def test_executors_without_graphs(monkeypatch):
    """On a host, in a dynamic executor and on an engine without streams, the state of segments says why."""
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
            _, executor, _ = train(context(0), network(), 2)
            assert {state for *_, state in executor.cuda_graphs()} == {text}
            del executor


def test_the_standin_is_strict():
    """While the stand-in captures a stream, no kernel runs, and waits and allocations spoil the capture."""
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


@pytest.mark.parametrize("where", GPUS)
def test_a_capture_takes_no_other_work(where):
    """While one worker captures, another worker's operation runs immediately and is no part of the graph."""
    with place(where, gpu_workers=2) as context:
        gpu = device.get(context(0))
        x, y = mx.nd.zeros((3,), ctx=context(0)), mx.nd.zeros((3,), ctx=context(0))
        mx.nd.waitall()
        seen, raw = [], x.raw()

        def work():
            gpu.xp.add(raw, 1, out=raw)
            if seen:  # during the capture
                y[:] = 5  # an operation of another worker
                begun = threading.Event()
                mx.engine.get().push(begun.set, (y.var,), (), context(0))
                assert begun.wait(60)

        def segment():
            work()
            seen.append("enqueued")
            seen.append(gpu.capture(work))
            for _ in range(2):
                seen[1].launch()

        mx.engine.get().push(segment, (), (x.var,), context(0))
        mx.nd.waitall()
        assert y.asnumpy().tolist() == [5, 5, 5]
        assert x.asnumpy().tolist() == [3, 3, 3]
        if where == "standin":
            assert len(seen[1]._graph._calls) == 1


@pytest.mark.parametrize("wait", ["synchronize", "query", "finish", "release"])
def test_waits_for_the_device_follow_a_capture(wait):
    """A wait for the device starts after a running capture has ended, because CUDA would invalidate the capture."""
    with place("standin") as context:
        gpu = device.get(context(0))
        event, second = gpu.new_stream().record(), gpu.new_stream()
        with second:
            gpu.temporaries.allocate(512)
        waits = {"synchronize": gpu.synchronize, "query": event.query, "finish": second.finish,
                 "release": gpu.temporaries.release}  # fmt: skip
        x = gpu.allocate(64)
        x.fill(0)
        gpu.xp.cuda.get_current_stream().synchronize()
        threads, over = [], []

        def work():
            thread = threading.Thread(target=lambda: (waits[wait](), over.append(wait)))
            thread.start()
            threads.append(thread)
            thread.join(0.2)
            assert not over
            gpu.xp.add(x, 1, out=x)

        with gpu.new_stream():
            graph = gpu.capture(work)
            assert not isinstance(graph, str), graph
            graph.launch()
        threads[0].join(60)
        assert over == [wait]


def test_capture_gives_up_if_a_thread_always_waits(monkeypatch):
    """A capture gives up with a text if another thread waits for the device for longer than ``PATIENCE_S``."""
    monkeypatch.setattr(capture_gate, "PATIENCE_S", 0.05)
    with place("standin") as context:
        gpu = device.get(context(0))
        with gpu.captures.outside():
            results = []
            thread = threading.Thread(target=lambda: results.append(_captured(gpu)))
            thread.start()
            thread.join(60)
        assert "have waited for gpu(0)" in results[0]
        assert not isinstance(_captured(gpu), str)


def _captured(gpu):
    """Capture no work on a new stream; return the CUDA graph, or the reason why the capture failed."""
    with gpu.new_stream():
        return gpu.capture(lambda: None)


@pytest.mark.parametrize("where", GPUS)
def test_a_module_with_graphs_has_the_weights_of_one_without(monkeypatch, where):
    """A Module with branches on two workers gets the same weights with CUDA graphs and without, in every run."""
    results = []
    for setting in ("0", "1", "1", "1"):
        monkeypatch.setenv("MXNET_ENABLE_CUDA_GRAPHS", setting)
        with place(where, gpu_workers=2) as context:
            results.append(fit_module(context))
    for weights in results[1:]:
        for name, array in results[0].items():
            np.testing.assert_array_equal(weights[name], array, err_msg=name)


def fit_module(context):
    """Train a Module of four branches of six layers for three epochs, and return its weights by name."""
    mx.random.seed(7)
    x, sym = mx.sym.Variable("data"), mx.sym
    branches = []
    for b in range(4):
        y = x
        for k in range(6):
            y = sym.Activation(sym.FullyConnected(y, num_hidden=8, name=f"f{b}{k}"), act_type="relu")
        branches.append(y)
    net = sym.SoftmaxOutput(sym.FullyConnected(sym.add_n(*branches), num_hidden=3, name="last"), name="softmax")
    rng = np.random.default_rng(0)
    data = mx.io.NDArrayIter(
        rng.standard_normal((32, 5)).astype(np.float32), rng.integers(0, 3, 32).astype(np.float32), 8
    )
    module = mx.mod.Module(net, context=context(0))
    module.fit(data, num_epoch=3, optimizer="sgd", optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
    return {name: array.asnumpy() for name, array in module.get_params()[0].items()}
