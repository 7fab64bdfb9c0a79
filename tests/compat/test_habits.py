"""Habits of scripts written for MXNet: dtypes as NumPy types, text as attributes, private names that they import."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import ParameterError

X = np.arange(6.0, dtype="float32").reshape(2, 3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32, np.uint8, np.int64])
def test_dtype_is_the_numpy_type(dtype):
    """The dtype of arrays, descriptions and inferred types is NumPy's type itself: comparable by ``is``, callable."""
    x = mx.nd.array(X, dtype=dtype)
    assert x.dtype is dtype
    assert isinstance(x.asnumpy().dtype, np.dtype)
    assert x.dtype(3) == 3
    assert {np.float16: 1}.get(x.dtype, 0) == (dtype is np.float16)
    views = (x[0], x + 1, x.T, x.reshape((3, 2)), mx.nd.zeros_like(x), x.copy(), mx.nd.concat(x, x, dim=0))
    assert [view.dtype for view in views] == [dtype] * 7
    arguments, outputs, _ = (mx.sym.var("a") + mx.sym.var("b")).infer_type(a=dtype)
    assert [kind is dtype for kind in (*arguments, *outputs)] == [True] * 3
    assert mx.sym.var("a").infer_type_partial()[0] == [None]
    described = mx.io.NDArrayIter(x, x[:, 0], batch_size=2)
    assert [desc.dtype is dtype for desc in (*described.provide_data, *described.provide_label)] == [True, True]
    assert mx.io.DataDesc("data", (2,), np.dtype(dtype)).dtype is dtype
    executor = mx.sym.var("a").simple_bind(mx.cpu(), a=(2,), type_dict={"a": dtype}, grad_req="null")
    assert executor.arg_dict["a"].dtype is dtype


def test_attributes_that_describe_an_array_are_fixed():
    """Assigning a shape or a dtype is an AttributeError, as in MXNet, with advice; the array stays whole."""
    x = mx.nd.array(X)
    for name, value, advice in (("shape", (3, 2), r"reshape\(\(3, 2\)\)"), ("dtype", "float16", "astype")):
        with pytest.raises(AttributeError, match=advice):
            setattr(x, name, value)
    assert x.shape == (2, 3)
    assert x.asnumpy().tolist() == X.tolist()


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda: mx.nd.zeros("(2,3)"), (2, 3)),
        (lambda: mx.nd.ones(shape="(2,3)"), (2, 3)),
        (lambda: mx.nd.zeros("3"), (3,)),
        (lambda: mx.nd.full((2, 3), "1"), (2, 3)),
        (lambda: mx.nd.arange("0", "4", step="2", repeat="2"), (4,)),
        (lambda: mx.nd.eye("3", M="2", k="1"), (3, 2)),
        (lambda: mx.nd.linspace("0", "1", "3"), (3,)),
        (lambda: mx.nd.stack(mx.nd.array(X), mx.nd.array(X), axis="1"), (2, 2, 3)),
        (lambda: mx.nd.array(X).transpose("(1,0)"), (3, 2)),
        (lambda: mx.nd.random.uniform(shape="(2,3)"), (2, 3)),
        (lambda: mx.random.normal(shape="3"), (3,)),
        (lambda: mx.nd.random.randint(0, 5, shape="(2,)"), (2,)),
        (lambda: mx.nd.random.multinomial(mx.nd.array([0.5, 0.5]), shape="2", get_prob="True")[1], (2,)),
        (lambda: mx.nd.contrib.boolean_mask(mx.nd.array(X), mx.nd.array([0, 1]), axis="0"), (1, 3)),
        (lambda: mx.image.imresize(mx.nd.zeros((4, 4, 3), dtype="uint8"), "2", "3"), (3, 2, 3)),
    ],
)
def test_text_as_an_attribute(call, shape):
    """Functions that are no operators read attributes as text where MXNet 1.9.1 does."""
    assert call().shape == shape


@pytest.mark.parametrize("rule", ["Zero", "One", "Constant", "Uniform", "Xavier"])
def test_initializers_refuse_unknown_names(rule):
    """A misspelt parameter is refused by constants, too; a variable that names the initializer gets its values."""
    net = mx.sym.FullyConnected(mx.sym.var("data"), mx.sym.var("fc_wieght"), num_hidden=2, no_bias=True)
    module = mx.mod.Module(net, label_names=None)
    module.bind([("data", (2, 3))], for_training=False)
    with pytest.raises(ParameterError, match=r"'fc_wieght'.*names end in weight.*init="):
        module.init_params(getattr(mx.init, rule)())
    named = mx.sym.FullyConnected(mx.sym.var("data"), mx.sym.var("w", init=mx.init.One()), num_hidden=2, no_bias=True)
    module = mx.mod.Module(named, label_names=None)
    module.bind([("data", (2, 3))], for_training=False)
    module.init_params(mx.init.Zero())
    assert module.get_params()[0]["w"].asnumpy().tolist() == [[1.0] * 3] * 2


def test_what_is_unknown_or_absent(tmp_path):
    """``()`` is an unknown shape, an unwanted gradient of an input is None, a checkpoint may have no parameters."""
    total = mx.sym.var("data") + mx.sym.var("b")
    assert total.infer_shape(data=(), b=(2, 3)) == ([(2, 3), (2, 3)], [(2, 3)], [])
    module = mx.mod.Module(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc"), label_names=None)
    module.bind([("data", (2, 3))], inputs_need_grad=True, grad_req="null")
    module.init_params()
    module.forward(mx.io.DataBatch([mx.nd.ones((2, 3))]), is_train=True)
    module.backward([mx.nd.ones((2, 2))])
    assert module.get_input_grads() == [None]
    net = mx.sym.LinearRegressionOutput(mx.sym.var("data"), mx.sym.var("label"), name="out")
    mx.model.save_checkpoint(str(tmp_path / "net"), 1, net, {}, {})
    assert mx.model.load_checkpoint(str(tmp_path / "net"), 1)[1:] == ({}, {})
    bound = mx.mod.Module.load(str(tmp_path / "net"), 1, label_names=["label"])
    bound.bind([("data", (2, 3))], [("label", (2, 3))])
    assert bound.params_initialized


def test_modules_that_scripts_import():
    """MXNet's modules exist, or the ImportError says what to use."""
    for name in ("contrib", "linalg", "image", "op", "random"):
        for kind in ("ndarray", "symbol"):
            module = importlib.import_module(f"weftplan.{kind}.{name}")
            assert module is getattr(getattr(mx, kind), name)
    assert importlib.import_module("weftplan.ndarray.utils").load is mx.nd.load
    assert importlib.import_module("weftplan.contrib.symbol") is mx.sym.contrib
    for name, advice in (
        ("symbol_doc", "infer_shape"),
        ("ndarray.numpy", "NumPy itself"),
        ("symbol.gen_op", "mx.sym"),
        ("kvstore.kvstore_server", "launch"),
    ):
        with pytest.raises(ModuleNotFoundError, match=advice):
            importlib.import_module(f"weftplan.{name}")
    for owner, name, advice in (
        (mx.base, "SymbolHandle", "pass the Symbol"),
        (mx.base, "_LIB", "no C library"),
        (mx.sym, "cast_storage", "dense"),
        (mx, "symbol_doc", "infer_shape"),
    ):
        with pytest.raises(AttributeError, match=advice):
            getattr(owner, name)


@pytest.mark.parametrize("kvstore", [None, "local", "device"])
def test_private_training_functions(kvstore):
    """A loop over an executor group with MXNet's private functions gives the weights of a Module."""
    from weftplan.model import _create_kvstore, _initialize_kvstore, _update_params, _update_params_on_kvstore
    from weftplan.module.executor_group import DataParallelExecutorGroup

    contexts = [mx.cpu(0), mx.cpu(1)]
    net = mx.sym.LinearRegressionOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=1, name="fc"), name="out")
    descs = [("data", (4, 3))], [("out_label", (4, 1))]
    names = ["fc_weight", "fc_bias"]
    start = {"fc_weight": mx.nd.array([[1, -1, 2]]), "fc_bias": mx.nd.array([0.5])}
    rng = np.random.default_rng(0)
    pairs = [(mx.nd.array(rng.normal(size=(4, 3))), mx.nd.array(rng.normal(size=(4, 1)))) for _ in range(3)]
    batches = [mx.io.DataBatch([data], [label]) for data, label in pairs]

    module = mx.mod.Module(net, label_names=["out_label"], context=contexts)
    module.bind(*descs)
    module.init_params(arg_params=start, aux_params={})
    module.init_optimizer(kvstore=kvstore, optimizer_params={"learning_rate": 0.1, "momentum": 0.9})

    group = DataParallelExecutorGroup(net, contexts, None, *descs, names, True, False)
    group.set_params(start, {})
    optimizer = mx.optimizer.SGD(
        learning_rate=0.1, momentum=0.9, rescale_grad=0.25, param_idx2name=dict(enumerate(names))
    )
    store, on_store = _create_kvstore(kvstore, 2, start)
    updater = mx.optimizer.get_updater(optimizer)
    if store is not None:
        if on_store:
            store.set_optimizer(optimizer)
        _initialize_kvstore(store, group.param_arrays, start, names, on_store)
    for batch in batches:
        module.forward_backward(batch)
        module.update()
        group.forward(batch, is_train=True)
        group.backward()
        if on_store:
            _update_params_on_kvstore(group.param_arrays, group.grad_arrays, store, names)
        else:
            _update_params(group.param_arrays, group.grad_arrays, updater, 2, store, names)
    ours: dict = {}
    group.get_params(ours, {})
    for name, value in module.get_params()[0].items():
        np.testing.assert_array_equal(ours[name].asnumpy(), value.asnumpy())
    with pytest.raises(mx.MXNetError, match="nothing"):
        group.set_params({"nothing": start["fc_bias"]}, {})
