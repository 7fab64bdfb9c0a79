"""MXNet's names: mx.base, mx.util, mx.runtime, mx.contrib, and scopes that can be assigned."""

import os
import threading
from collections import Counter

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import DeviceError, MXNetError, NotImplementedForSymbol, ParameterError, ShapeError
from weftplan.ndarray import NDArray


def in_a_thread(function):
    """Return the result of ``function`` run in a new thread."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_base(monkeypatch):
    """mx.base has MXNet's types, small functions and every error class."""
    assert mx.base.mx_real_t is np.float32
    assert isinstance("a", mx.base.string_types)
    assert isinstance(np.float64(1), mx.base.numeric_types)
    assert isinstance(np.int32(1), mx.base.integer_types)
    assert mx.base.py_str(b"\xc3\xa9") == mx.base.py_str("é") == "é"
    assert mx.base.MXNetError is mx.MXNetError
    assert mx.base.ShapeError is ShapeError
    assert mx.base._as_list((1, 2)) == [1, 2]
    assert mx.base._as_list(3) == [3]
    assert isinstance(mx.base._as_list(mx.nd.ones((2,)))[0], NDArray)
    monkeypatch.setenv("MXNET_HOME", "elsewhere")
    assert mx.base.data_dir() == "elsewhere"
    monkeypatch.delenv("MXNET_HOME")
    assert mx.base.data_dir().endswith(".mxnet")
    with pytest.raises(AttributeError, match="there is no C library behind it"):
        _ = mx.base.check_call


def test_util(monkeypatch):
    """mx.util reads and sets Python's environment variables.

    ``np_array``, ``set_np`` and functions under ``use_np`` raise an error when they are called.
    """
    monkeypatch.delenv("WEFT_TEST", raising=False)
    assert mx.util.getenv("WEFT_TEST") is None
    mx.util.setenv("WEFT_TEST", "1")
    assert os.environ["WEFT_TEST"] == mx.util.getenv("WEFT_TEST") == "1"
    mx.util.setenv("WEFT_TEST", None)
    assert "WEFT_TEST" not in os.environ
    assert mx.util.get_gpu_count() == mx.num_gpus()
    assert mx.util.is_np_array() is False

    @mx.util.use_np
    def function():
        """Document a function."""

    assert function.__doc__ == "Document a function."
    for call in (function, mx.util.np_array, mx.util.set_np):
        with pytest.raises(NotImplementedForSymbol, match="absent on purpose"):
            call()


def test_features():
    """Features() is always the same dictionary, with all of MXNet's names; an unknown name raises an error."""
    features = mx.runtime.Features()
    assert features is mx.runtime.Features()
    assert len(features) == 32
    assert features.is_enabled("profiler")
    assert not features.is_enabled("MKLDNN")
    assert features.is_enabled("CUDA") == (mx.num_gpus() > 0)
    assert repr(features["PROFILER"]) == "✔ PROFILER"
    with pytest.raises(MXNetError, match="'CUDAA' is unknown"):
        features.is_enabled("CUDAA")


def test_contributed_operators():
    """mx.contrib.nd computes on arrays, and mx.contrib.sym makes symbols."""
    assert mx.contrib.nd.allclose(mx.nd.ones((2,)), mx.nd.ones((2,))).asscalar() == 1
    assert mx.contrib.sym.allclose(mx.sym.Variable("a"), mx.sym.Variable("b")).list_arguments() == ["a", "b"]


def test_the_default_context_may_be_set():
    """Context.default_ctx can be assigned per thread; an assignment inside ``with`` is undone at its end."""
    before = mx.Context.default_ctx
    assert before == mx.current_context()
    try:
        mx.Context.default_ctx = mx.cpu(3)
        assert mx.current_context() == mx.cpu(3)
        assert in_a_thread(lambda: mx.Context.default_ctx) == mx.cpu(0)
        with mx.cpu(1):
            mx.Context.default_ctx = mx.cpu(2)
            assert mx.nd.zeros((1,)).context == mx.cpu(2)
        assert mx.current_context() == mx.cpu(3)
        with pytest.raises(DeviceError, match="must be a context"):
            mx.Context.default_ctx = "cpu"
        mx.Context._default_ctx.value = mx.cpu(4)  # how mx.test_utils.set_default_context does it
        assert mx.current_context() == mx.Context._default_ctx.value == mx.cpu(4)
        assert in_a_thread(lambda: mx.Context._default_ctx.value) == mx.cpu(0)
    finally:
        mx.Context.default_ctx = before


def test_the_scope_of_attributes_may_be_set():
    """AttrScope.current has the attributes of all enclosing scopes; assigning it replaces them in this thread."""
    try:
        mx.AttrScope.current = mx.AttrScope(group="1")
        with mx.AttrScope(mood="good"):
            assert mx.AttrScope.current.get() == {"group": "1", "mood": "good"}
            assert mx.sym.Variable("x").attr("group") == "1"
        assert in_a_thread(lambda: mx.AttrScope.current.get()) == {}
    finally:
        mx.AttrScope.current = mx.AttrScope()
    assert mx.sym.Variable("x").attr("group") is None


def test_the_manager_of_names_may_be_set():
    """NameManager.current is thread-local; new names are numbered by an assigned manager."""
    manager = mx.name.NameManager()
    with mx.name.NameManager():
        mx.name.NameManager.current = manager
        assert mx.sym.exp(mx.sym.Variable("x")).name == "exp0"
        assert mx.name.NameManager.current.get(None, "exp") == "exp1"
        assert in_a_thread(lambda: mx.name.NameManager.current) is not manager


def test_unknown_dimensions():
    """-1 is an unknown dimension, like 0.

    Inside np_shape, results use -1 and None for unknown dimensions and shapes, and 0 is refused.
    """
    x = mx.sym.Variable("x")
    net = mx.sym.dot(x, mx.sym.Variable("y"))
    assert net.infer_shape_partial(x=(-1, 3), y=(3, 5))[1] == [(0, 5)]
    assert net.infer_shape_partial()[1] == [()]
    assert mx.sym.exp(x).infer_shape_partial()[0] == [()]

    @mx.util.use_np_shape
    def inside():
        assert mx.is_np_shape()
        assert net.infer_shape_partial(x=(-1, 3), y=(3, 5))[1] == [(-1, 5)]
        assert net.infer_shape(x=(2, 3), y=(3, -1)) == (None, None, None)
        assert mx.sym.exp(x).infer_shape_partial() == ([None], [None], [])
        with mx.np_shape(False):
            assert mx.sym.exp(x).infer_shape_partial()[0] == [()]
        with pytest.raises(ShapeError, match=r"'x': \(0, 3\) has no elements"):
            net.infer_shape_partial(x=(0, 3))
        assert not in_a_thread(mx.is_np_shape)

    with pytest.warns(UserWarning, match="shapes cannot be inferred"):
        inside()
    assert not mx.is_np_shape()


def test_vocabulary_indices_equal_mxnets():
    """Vocabulary numbers words as MXNet does.

    Unknown words are 0; then come reserved words, then words by frequency. Ties keep their order.
    """
    text = mx.contrib.text
    counter = text.utils.count_tokens_from_str("*Life*is*great*!*\n*life*is*good*.*\n", r"\*", "\n", True)
    assert counter == Counter({"is": 2, "life": 2, "!": 1, "great": 1, "good": 1, ".": 1})
    assert text.utils.count_tokens_from_str("is", counter_to_update=counter)["is"] == 3
    counted = Counter(["a", "b", "b", "c", "c", "c", "some_word$"])
    every = text.vocab.Vocabulary(counted)
    assert every.token_to_idx == {"<unk>": 0, "c": 1, "b": 2, "a": 3, "some_word$": 4}
    two = text.vocab.Vocabulary(counted, most_freq_count=2, reserved_tokens=["b", "<pad>"])
    assert two.idx_to_token == ["<unk>", "b", "<pad>", "c", "a"]
    assert len(text.vocab.Vocabulary(counted, min_freq=4)) == 1
    assert (every.to_indices("x"), every.to_indices(["c", "x"])) == (0, [1, 0])
    assert (every.to_tokens(1), every.to_tokens([0, 4])) == ("c", ["<unk>", "some_word$"])
    for wrong in (
        lambda: every.to_tokens(5),
        lambda: every.to_tokens([-1]),
        lambda: text.vocab.Vocabulary(counted, min_freq=0),
        lambda: text.vocab.Vocabulary({"a": 1}),
        lambda: text.vocab.Vocabulary(counted, reserved_tokens=["<unk>"]),
    ):
        with pytest.raises(ParameterError, match="Vocabulary: "):
            wrong()


def test_absent_parts_of_contrib():
    """Absent parts of mx.contrib raise an error that names the alternative; other names are plain AttributeErrors."""
    assert mx.contrib.onnx is mx.onnx
    with pytest.raises(AttributeError, match=r"mx\.contrib\.quantization is absent on purpose: .*int8"):
        mx.contrib.quantization.quantize_model  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        mx.contrib.nonsense  # noqa: B018
    assert not hasattr(mx.contrib, "tensorboard")
