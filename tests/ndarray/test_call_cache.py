"""The call cache: repeated calls by name have the first call's results, order and errors."""

import threading

import numpy as np
import pytest

import weftplan as mx
from tests.support.together import together
from weftplan import engine
from weftplan.ndarray import operators, small_calls
from weftplan.ndarray.calls import call_cache
from weftplan.ops.core import registry

nd = mx.nd
RNG = np.random.default_rng(11)
CALLS = {
    "exp": (["data"], {}),
    "relu": (["data"], {}),
    "sum": (["data"], {"axis": 1}),
    "mean": (["data"], {"axis": (0, 1)}),
    "max": (["data"], {"axis": 0, "keepdims": True}),
    "prod": (["data"], {}),
    "softmax": (["data"], {}),
    "log_softmax": (["data"], {"axis": 0}),
    "softmin": (["data"], {}),
    "transpose": (["data"], {}),
    "Reshape": (["data"], {"shape": (16, 8)}),
    "broadcast_add": (["data", "row"], {}),
    "elemwise_mul": (["data", "other"], {}),
    "Concat": (["data", "other"], {"dim": 1}),
    "dot": (["data", "weight"], {"transpose_b": True}),
    "FullyConnected": (["data", "weight", "bias"], {"num_hidden": 4}),
    "LayerNorm": (["data", "gamma", "beta"], {}),
    "take": (["data", "index"], {}),
    "topk": (["data"], {"k": 3}),
}
SHAPES = {
    "data": (8, 16), "other": (8, 16), "row": (1, 16), "weight": (4, 16), "bias": (4,), "gamma": (16,), "beta": (16,),
}  # fmt: skip


def values(name, dtype):
    """Return random numbers for the input ``name``."""
    if name == "index":
        return RNG.integers(0, 8, 5).astype(dtype)
    return RNG.normal(size=SHAPES[name]).astype(dtype)


@together()
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", CALLS)
def test_cached_call_equals_pushed_call(name, dtype):
    """Cached calls have the bits of ``invoke``, which pushes every call to a worker."""
    inputs, params = CALLS[name]
    function = operators.function(name)
    for _ in range(3):
        arrays = [nd.array(values(one, dtype), dtype=dtype) for one in inputs]
        wanted = nd.invoke(name, arrays, params)
        result = function(*arrays, **params)
        assert result.dtype == wanted[0].dtype
        np.testing.assert_array_equal(result.asnumpy(), wanted[0].asnumpy())


@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
def test_small_repeated_calls_run_inline(kind, monkeypatch):
    """A repeated call on idle arrays runs in the calling thread and is complete when it returns."""
    threads = []
    compute = small_calls._compute
    monkeypatch.setattr(small_calls, "_compute", lambda *args: threads.append(threading.get_ident()) or compute(*args))
    function = operators.function("exp")
    with engine.using(engine.create(kind)):
        a = nd.array(np.ones((8, 16)))
        for call in (function, lambda x: x + x, lambda x: 1 - x, lambda x: x.sum(axis=1)):
            call(a).wait_to_read()
            nd.waitall()
            threads.clear()
            out = call(a)
            assert threads == [threading.get_ident()]
            assert out.var.version == 1


def test_a_write_before_the_call_is_seen():
    """A cached call sees all earlier writes and no later write, even if its input is pending."""
    gate = threading.Event()
    a = nd.array(np.zeros((4, 4)))
    function = operators.function("exp")
    function(a).wait_to_read()
    engine.get().push(gate.wait, (), [a.var]) if engine.get().kind != "NaiveEngine" else None
    a += 1
    out = function(a)
    a += 1
    gate.set()
    np.testing.assert_allclose(out.asnumpy(), np.e, rtol=1e-6)
    np.testing.assert_array_equal(a.asnumpy(), 2)


def test_equal_but_distinct_arguments_are_distinguished():
    """The cache distinguishes 1 from True, 0.0 from -0.0, and positional from named arguments."""
    a = nd.array(np.arange(6.0).reshape(2, 3))
    clip = operators.function("clip")
    for low, high in ((0.0, 2.0), (-0.0, 2.0), (1, 2), (1.0, 2.0)):
        np.testing.assert_array_equal(clip(a, low, high).asnumpy(), np.clip(a.asnumpy(), low, high))
    with pytest.raises(mx.errors.ParameterError, match="a_min=True"):
        clip(a, True, 2)
    total = operators.function("sum")
    assert total(a, axis=0).shape == (3,)
    assert total(a, axis=(0,)).shape == (3,)
    assert total(a, axis=0, keepdims=True).shape == (1, 3)
    assert total(a, 0, True).shape == (1, 3)
    assert total(a).shape == (1,)


def test_named_inputs_follow_the_operators_order():
    """Named inputs are passed in the operator's order, also if one array is passed twice."""
    x, w, b = (nd.array(values(one, "float32")) for one in ("data", "weight", "bias"))
    function = operators.function("FullyConnected")
    for _ in range(3):
        out = function(bias=b, weight=w, data=x, num_hidden=4)
        np.testing.assert_allclose(out.asnumpy(), x.asnumpy() @ w.asnumpy().T + b.asnumpy(), rtol=1e-5)
    square = nd.array(np.arange(4.0).reshape(2, 2))
    subtract = operators.function("elemwise_sub")
    for _ in range(2):
        np.testing.assert_array_equal(subtract(rhs=square, lhs=square).asnumpy(), 0)
    other_array = nd.array(np.ones((2, 2)))
    for _ in range(2):
        np.testing.assert_array_equal(subtract(rhs=other_array, lhs=square).asnumpy(), square.asnumpy() - 1)


def test_kernel_errors_are_raised_at_the_wait():
    """A repeated failing call returns an array; reading it raises the error with the operator's name."""
    function = operators.function("linalg_potrf")
    function(nd.array(np.eye(3))).wait_to_read()
    if engine.get().kind == "NaiveEngine":
        pytest.skip("raises at the push")
    failing = function(nd.array(-np.eye(3)))
    with pytest.raises((mx.errors.MXNetError, np.linalg.LinAlgError)) as caught:
        failing.wait_to_read()
    assert any("linalg_potrf" in note for note in caught.value.__notes__)


def test_every_call_checks_contexts():
    """A repeated call refuses arrays of two contexts, and its result is on the context of the inputs."""
    function = operators.function("elemwise_add")
    a, b = nd.array(np.ones(3)), nd.array(np.ones(3))
    function(a, b).wait_to_read()
    there = nd.array(np.ones(3), ctx=mx.cpu(1))
    with pytest.raises(mx.errors.DeviceError):
        function(a, there)
    assert function(there, there).context == mx.cpu(1)


def test_large_and_random_calls_are_pushed():
    """Large calls and random calls have no inline form in the cache."""
    large = nd.array(np.ones((256, 256)))
    kept = {}
    for _ in range(2):
        call_cache.call(kept, "exp", (large,), {})
    (known,) = kept.values()
    assert known.small is None
    kept = {}
    first, second = (call_cache.call(kept, "shuffle", (nd.array(np.arange(64.0)),), {}) for _ in range(2))
    assert list(kept.values()) == [None]
    assert (first.asnumpy() != second.asnumpy()).any()


def test_new_arrays_reuse_only_dead_memory():
    """2000 small results do not overwrite results that are still alive."""
    a = nd.array(np.arange(128, dtype="float32"))
    function = operators.function("square")
    kept = [function(a) for _ in range(50)]
    for _ in range(2000):
        function(a)
    for one in kept:
        np.testing.assert_array_equal(one.asnumpy(), np.arange(128, dtype="float32") ** 2)
    nd.waitall()


def test_every_bare_kernel_is_tested():
    """Every public operator with a bare kernel, except min, has a call in ``CALLS``."""
    names = registry.names(aliases=False)
    bare = {name for name in names if getattr(registry.get(name).forward, "special", None)}
    assert {name for name in bare if not name.startswith("_")} - {"min"} <= {registry.get(name).name for name in CALLS}


UPDATES = {
    "sgd_update": (0, {"lr": 0.1, "wd": 0.01, "clip_gradient": 0.5}),
    "sgd_mom_update": (1, {"lr": 0.1, "momentum": 0.9, "wd": 0.01}),
    "adam_update": (2, {"lr": 0.1}),
    "rmsprop_update": (1, {"lr": 0.1}),
    "exp": (-1, {}),
    "softmax": (-1, {"axis": 0}),
}


@pytest.mark.parametrize("inplace", [True, False], ids=["inplace", "elsewhere"])
@pytest.mark.parametrize("name", UPDATES)
def test_cached_call_with_out_equals_pushed_call(name, inplace):
    """Cached calls with ``out`` give the results of pushed calls, including optimizer states.

    ``out`` is an input or another array.
    """
    states, params = UPDATES[name]
    function = operators.function(name)
    mine, second = ([nd.array(values("data", "float32")) for _ in range(2 + states)] for _ in range(2))
    for one, copy in zip(mine, second, strict=True):
        copy[:] = one
    outs = (mine[0], second[0]) if inplace else (nd.zeros((8, 16)), nd.zeros((8, 16)))
    for _ in range(4):
        assert function(*mine, out=outs[0], **params) is outs[0]
        nd.invoke(name, second, params, out=outs[1])
    for actual, wanted in zip((*mine, outs[0]), (*second, outs[1]), strict=True):
        np.testing.assert_array_equal(actual.asnumpy(), wanted.asnumpy())


def test_call_with_out_waits_for_readers():
    """A reader pushed before a call with ``out`` sees the old value."""
    gate, seen = threading.Event(), []
    function = operators.function("exp")
    a, out = nd.zeros((4, 4)), nd.zeros((4, 4))
    for _ in range(2):
        function(a, out=out).wait_to_read()
    if engine.get().kind != "NaiveEngine":
        engine.get().push(lambda: (gate.wait(), seen.append(out.raw().copy())), [out.var], [])
    function(a + 1, out=out)
    gate.set()
    np.testing.assert_allclose(out.asnumpy(), np.e, rtol=1e-6)
    nd.waitall()
    assert all((one == 1).all() for one in seen)


def test_call_with_overlapping_out_uses_old_values():
    """A call whose ``out`` overlaps its input uses the input's old values."""
    function = operators.function("exp")
    base = nd.array(np.arange(20.0).reshape(5, 4) / 20)
    old = base.asnumpy()
    for _ in range(2):
        base[:] = old
        function(base[0:4], out=base[1:5])
    np.testing.assert_allclose(base.asnumpy()[1:], np.exp(old[:4]), rtol=1e-6)
    np.testing.assert_array_equal(base.asnumpy()[0], old[0])


def test_cached_call_refuses_unfitting_out():
    """A cached call checks the context and shape of ``out`` as the first call does."""
    function = operators.function("exp")
    a = nd.zeros((2, 2))
    for _ in range(2):
        function(a, out=nd.zeros((2, 2)))
        with pytest.raises(mx.errors.DeviceError):
            function(a, out=nd.zeros((2, 2), ctx=mx.cpu(1)))
        with pytest.raises(mx.errors.ShapeError):
            function(a, out=nd.zeros((2, 3)))


def test_extrema_by_name_do_not_warn():
    """maximum and minimum by name cause no deprecation warning of NumPy."""
    x, y = nd.array([1.0, 5.0]), nd.array([3.0, 2.0])
    for _ in range(3):
        assert nd.maximum(x, y).asnumpy().tolist() == [3.0, 5.0]
        assert nd.minimum(x, y).asnumpy().tolist() == [1.0, 2.0]
        assert nd.op._maximum(x, y).asnumpy().tolist() == [3.0, 5.0]
        assert nd.op._minimum(x, y).asnumpy().tolist() == [1.0, 2.0]
