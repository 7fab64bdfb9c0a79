"""bfloat16 arrays, plans and networks, which need ml_dtypes; without it a clear error."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import weftplan as mx
from weftplan import models
from weftplan.errors import DTypeError
from weftplan.ops.core.params import p_dtype

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

needs = pytest.mark.skipif(ml_dtypes is None, reason="needs ml_dtypes")


def round_to_bfloat16(values):
    """Return the values rounded to bfloat16, as float32."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


@needs
def test_arrays() -> None:
    """bfloat16 arrays support creation, casts, operators and indexing, and results are rounded float32 results."""
    values = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
    array = mx.nd.array(values, dtype="bfloat16")
    assert array.dtype == ml_dtypes.bfloat16
    assert array.astype("float32").asnumpy().tolist() == round_to_bfloat16(values).tolist()
    x = round_to_bfloat16(values)
    for result, expected in (
        (array + array, x + x),
        (array * 0.3, x * np.float32(0.3)),
        (1.5 - array, 1.5 - x),
        (mx.nd.exp(array), np.exp(x)),
        (mx.nd.sum(array, axis=1), x.sum(axis=1)),
        (mx.nd.dot(array, array.T), x @ x.T),
        (mx.nd.relu(array), np.maximum(x, 0)),
        (mx.nd.softmax(array), np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)),
    ):
        assert result.dtype == ml_dtypes.bfloat16
        assert np.allclose(result.astype("float32").asnumpy(), expected, rtol=2**-7, atol=1e-6)
    array += 1
    array[0] = 2.5
    assert array[0].astype("float32").asnumpy().tolist() == [2.5] * 4
    assert mx.nd.zeros((2,), dtype="bfloat16").astype("int32").asnumpy().tolist() == [0, 0]
    assert "bfloat16" in repr(mx.nd.random.uniform(shape=(2,), dtype="bfloat16").dtype)


@needs
@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet"])
def test_a_network(name: str) -> None:
    """A network in bfloat16 allocates the planned bytes, and its outputs and gradients are within 10 % of float32's.

    Its arguments take fewer bytes than in float32.
    """
    net = models.digits(name)
    shape = (4, 64) if name == "mlp" else (4, 1, 8, 8)
    plan = net.plan(data=shape, dtype="bfloat16", grad_req="write")
    assert not plan.notes or "bfloat16" not in plan.notes[0]
    assert plan.external_bytes["arguments"] < net.plan(data=shape, grad_req="write").external_bytes["arguments"]
    rng = np.random.default_rng(0)
    images, labels = rng.random(shape, dtype=np.float32), rng.integers(0, 10, 4)
    by_name = {}
    for dtype in ("float32", "bfloat16"):
        executor = net.simple_bind(mx.cpu(), dtype=dtype, data=shape)
        if dtype == "bfloat16":
            assert executor.allocated_bytes == plan.peak
            assert executor.arg_dict["data"].dtype == ml_dtypes.bfloat16
        draw = np.random.default_rng(1)
        for key, array in executor.arg_dict.items():
            if key not in ("data", "softmax_label"):
                array[:] = draw.standard_normal(array.shape).astype(np.float32) * 0.1
        executor.arg_dict["softmax_label"][:] = labels
        output = executor.forward(is_train=True, data=images)[0].astype("float32").asnumpy()
        executor.backward()
        gradient = executor.grad_dict[[key for key in executor.grad_dict if key.endswith("weight")][-1]]
        by_name[dtype] = output, gradient.astype("float32").asnumpy()
    for exact, near in zip(*by_name.values(), strict=True):
        assert np.linalg.norm(near - exact) < 0.1 * np.linalg.norm(exact)


@needs
def test_training() -> None:
    """``fit`` with bfloat16 weights, which have float32 copies, reaches an accuracy above 0.8."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 120)
    data = (rng.standard_normal((3, 10))[labels] * 2 + rng.standard_normal((120, 10))).astype("float32")
    net = mx.sym.FullyConnected(mx.sym.Cast(mx.sym.Variable("data"), dtype="bfloat16"), num_hidden=3, name="fc")
    net = mx.sym.SoftmaxOutput(mx.sym.Cast(net, dtype="float32"), name="softmax")
    module = mx.mod.Module(net)
    batches = mx.io.NDArrayIter(data, labels, batch_size=40)
    module.fit(batches, num_epoch=4, optimizer_params={"learning_rate": 0.2, "multi_precision": True})
    assert module.group.executors[0].arg_dict["fc_weight"].dtype == ml_dtypes.bfloat16
    assert module.score(batches, "acc")[0][1] > 0.8


@needs
def test_files(tmp_path: Path) -> None:
    """A saved symbol has the dtype bfloat16 again after loading, and a saved bfloat16 array is loaded as float32."""
    net = mx.sym.Cast(mx.sym.Variable("data", dtype="bfloat16"), dtype="float32")
    reloaded = mx.sym.load_json(net.tojson())
    assert reloaded.infer_type()[0] == [ml_dtypes.bfloat16]
    mx.nd.save(tmp_path / "x.params", mx.nd.array([1.5, -2], dtype="bfloat16"))
    with pytest.warns(UserWarning, match="bfloat16 and was read as float32"):
        assert mx.nd.load(tmp_path / "x.params")[0].asnumpy().tolist() == [1.5, -2]
    plan = models.get("mlp").plan(data=(2, 784), dtype="bfloat16")
    assert type(plan).from_json(plan.to_json()).total == plan.total


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ml_dtypes, arrays and binds raise an error with the install command.

    A plan counts the bytes of float16, and its note has the install command.
    """
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DTypeError, match="pip install ml_dtypes"):
        mx.nd.zeros((2,), dtype="bfloat16")
    with pytest.raises(ValueError, match="pip install ml_dtypes"):  # the parameter dtype of an operator, such as Cast
        p_dtype("bfloat16")
    net = models.get("mlp")
    with pytest.raises(DTypeError, match="pip install ml_dtypes"):
        net.simple_bind(mx.cpu(), dtype="bfloat16", data=(2, 784))
    plan = net.plan(data=(2, 784), dtype="bfloat16")
    assert plan.total == net.plan(data=(2, 784), dtype="float16").total
    assert "pip install ml_dtypes" in plan.notes[0]
