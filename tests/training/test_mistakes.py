"""Beginners' mistakes with Module, iterators, optimizers, metrics and initializers raise errors with a remedy."""

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import BindError, DTypeError, MXNetError, ParameterError, ShapeError

IMAGES = np.linspace(-1, 1, 100, dtype="float32").reshape(20, 5)
LABELS = np.arange(20) % 3


def network(name="softmax"):
    """Return a classifier of one layer, whose label is called ``<name>_label``."""
    layer = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    return mx.sym.SoftmaxOutput(layer, name=name)


def batches_of_four(**settings):
    """Return an iterator over batches of four samples."""
    return mx.io.NDArrayIter(IMAGES, LABELS, batch_size=4, **settings)


def fit(module=None, data=None, **settings):
    """Train ``module`` on ``data`` for one epoch by default; both default to valid values. Return the module."""
    module = mx.mod.Module(network()) if module is None else module
    module.fit(batches_of_four() if data is None else data, **{"num_epoch": 1, **settings})
    return module


def inference_module(**settings):
    """Return a module that is bound without labels and initialized with ``settings``."""
    module = mx.mod.Module(network())
    module.bind([("data", (4, 5))], for_training=False)
    module.init_params(**settings)
    return module


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"num_epoch": None}, MXNetError, "fit needs num_epoch"),
        ({"data": (IMAGES, LABELS)}, MXNetError, r"must be a DataIter such as mx.io.NDArrayIter\(.* got tuple"),
        ({"eval_data": IMAGES}, MXNetError, "eval_data must be a DataIter .* got ndarray"),
        (
            {"data": mx.io.NDArrayIter(IMAGES, batch_size=4)},
            MXNetError,
            r"bind got no label_shapes.*\['softmax_label'\]",
        ),
        ({"optimizer": "sdg"}, ParameterError, "unknown optimizer 'sdg': did you mean 'sgd'"),
        ({"optimizer": None}, ParameterError, "a name such as 'sgd', or an Optimizer, got None"),
        (
            {"optimizer_params": {"learning_rat": 1}},
            ParameterError,
            "SGD has no setting 'learning_rat': did you mean 'learning_rate'",
        ),
        ({"optimizer_params": 0.1}, ParameterError, "must be a dictionary such as .* got 0.1"),
        (
            {"optimizer_params": {"learning_rate": "0.1"}},
            ParameterError,
            "learning_rate must be a number, got str: '0.1'",
        ),
        ({"optimizer_params": {"momentum": "a"}}, ParameterError, "SGD: momentum must be a number"),
        ({"eval_metric": "accurcy"}, ParameterError, "unknown metric 'accurcy': did you mean 'accuracy'"),
        ({"eval_metric": None}, ParameterError, "unknown metric None: known: accuracy"),
        ({"initializer": "xavir"}, ParameterError, "unknown initializer 'xavir': did you mean 'xavier'"),
        ({"initializer": 3}, ParameterError, "an object of mx.init or a name such as 'xavier', got 3"),
        ({"kvstore": "devise"}, MXNetError, "unknown kvstore 'devise': did you mean 'device'"),
    ],
)
def test_fit(settings, error, words):
    """An invalid argument of ``fit`` raises; the error names the argument and the expected values."""
    with pytest.raises(error, match=words):
        fit(**settings)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mx.mod.Module("net.json"), "needs a Symbol .* got str: 'net.json'"),
        (lambda: mx.mod.Module(network(), context="cpu"), r"context must be a context such as mx.cpu\(0\).* got 'cpu'"),
        (lambda: mx.mod.Module(network(), context=["cpu"]), r"got \['cpu'\]"),
        (lambda: mx.mod.Module(network(), data_names="data"), r"data_names must be a list .* got 'data'"),
        (lambda: mx.mod.Module(network(), data_names=["dta"]), r"data_names \['dta'\] are no arguments"),
        (lambda: mx.mod.Module(network(), label_names=["lbl"]), r"label_names \['lbl'\] are no arguments"),
        (lambda: fit(mx.mod.Module(network("sm"))), r"'sm_label' would be a parameter.* label_names=\['sm_label'\]"),
        (
            lambda: fit(mx.mod.Module(network("sm"), label_names=["sm_label"])),
            r"label_shapes name \['softmax_label'\], the module's label_names are \['sm_label'\]",
        ),
    ],
)
def test_module_and_its_names(make, words):
    """An invalid symbol or context, and a data or label name that does not match the network, raise BindError."""
    with pytest.raises(BindError, match=words):
        make()


@pytest.mark.parametrize("shapes", [(4, 5), [("data", 4)], ("data", (4, 5)), [(3, (4, 5))], 7])
def test_shapes_of_a_wrong_form(shapes):
    """Shapes that are no list of pairs raise; the error gives an example."""
    with pytest.raises(ShapeError, match=r"a list of pairs such as \[\('data', \(32, 10\)\)\], got"):
        mx.mod.Module(network()).bind(shapes)


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (lambda: mx.nd.ones((4, 5)), MXNetError, r"forward needs a batch: mx.io.DataBatch\(.* got NDArray"),
        (lambda: mx.io.DataBatch([mx.nd.ones((4, 5))] * 2), ShapeError, "has 2 data arrays, bound were 1"),
        (lambda: mx.io.DataBatch([[1, 2]]), DTypeError, "data of the batch must be an NDArray or a NumPy array"),
        (lambda: mx.io.DataBatch([np.zeros((4, 5), "V4")]), DTypeError, r"array of numbers, got ndarray of dtype \|V4"),
        (
            lambda: mx.io.DataBatch([mx.nd.ones((4, 6))]),
            ShapeError,
            r"shapes \[\(4, 6\)\], bound were \[\('data', \(4, 5\)\)\].*'fc_weight'",
        ),
    ],
)
def test_batches_that_do_not_fit_leave_the_module_as_it_was(batch, error, words):
    """A batch that does not fit raises, and the next valid batch runs."""
    module = inference_module()
    with pytest.raises(error, match=words):
        module.forward(batch())
    module.forward(mx.io.DataBatch([np.ones((4, 5), "float32")]))
    assert module.get_outputs()[0].shape == (4, 3)


def test_training_without_a_label_is_refused():
    """A training step without a label raises, since it would use the previous label; inference needs none."""
    module = mx.mod.Module(network())
    module.bind(batches_of_four().provide_data, batches_of_four().provide_label)
    module.init_params()
    with pytest.raises(MXNetError, match=r"the batch has no label.*\['softmax_label'\].*is_train=False"):
        module.forward(mx.io.DataBatch([mx.nd.ones((4, 5))]))
    module.forward(mx.io.DataBatch([mx.nd.ones((4, 5))]), is_train=False)


def test_outputs_before_forward():
    """``get_outputs`` before ``forward`` raises."""
    with pytest.raises(MXNetError, match="none yet; call forward first"):
        inference_module().get_outputs()


def test_predict_takes_labelled_iterators_and_arrays():
    """A module bound without labels predicts from a labelled iterator and from arrays of any length.

    BLAS may sum in another order for another number of rows, so these results agree within rounding only.
    """
    module = inference_module(initializer="one")
    expected = module.predict(batches_of_four()).asnumpy()
    assert expected.shape == (20, 3)
    np.testing.assert_allclose(module.predict(IMAGES[:7]).asnumpy(), expected[:7], rtol=1e-5)
    np.testing.assert_allclose(module.predict(mx.nd.array(IMAGES[:3])).asnumpy(), expected[:3], rtol=1e-5)
    assert dict(module.score(batches_of_four(), "acc"))["accuracy"] == np.mean(expected.argmax(1) == LABELS)
    with pytest.raises(MXNetError, match=r"predict: eval_data must be a DataIter .* got list"):
        module.predict([1, 2])


def test_the_order_of_inputs_is_that_of_the_iterator():
    """Arrays are matched to inputs by name; the order of data_names and of the iterator may differ."""
    loss = mx.sym.MakeLoss(mx.sym.broadcast_add(mx.sym.Variable("a") * 10, mx.sym.Variable("b")))
    module = mx.mod.Module(loss, data_names=["a", "b"], label_names=None)
    data = mx.io.NDArrayIter({"b": np.full((4, 1), 2.0), "a": np.full((4, 1), 3.0)}, batch_size=2)
    module.bind(data.provide_data, for_training=False)
    module.init_params()
    assert module.predict(data).asnumpy().ravel().tolist() == [32.0] * 4


@pytest.mark.parametrize("swapped", ["data", "label"])
def test_a_second_iterator_in_another_order(swapped):
    """An iterator with inputs in another order than at bind raises, since arrays of one shape would be confused."""
    first = mx.sym.LinearRegressionOutput(mx.sym.Variable("a"), mx.sym.Variable("x"), name="one")
    second = mx.sym.LinearRegressionOutput(mx.sym.Variable("b"), mx.sym.Variable("y"), name="two")
    module = mx.mod.Module(mx.sym.Group([first, second]), data_names=["a", "b"], label_names=["x", "y"])
    inputs = {"data": {"a": np.ones((4, 1)), "b": np.zeros((4, 1))}, "label": {"x": np.ones(4), "y": np.zeros(4)}}
    straight = mx.io.NDArrayIter(**inputs, batch_size=2)
    module.bind(straight.provide_data, straight.provide_label)
    module.init_params()
    assert module.score(straight, "mse") == [("mse", 0.0)]
    name = f"provide_{swapped}"
    straight_order = getattr(mx.io.NDArrayIter, name).fget
    kind = type("Swapped", (mx.io.NDArrayIter,), {name: property(lambda self: straight_order(self)[::-1])})
    other = kind(**inputs, batch_size=2)
    with pytest.raises(BindError, match=rf"its {swapped} in the order .*bound were .*in one order"):
        module.score(other, "mse")


def test_a_network_without_labels_ignores_those_of_the_iterator():
    """With label_names=None ``fit`` ignores the labels of the iterator."""
    loss = mx.sym.MakeLoss(mx.sym.square(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name="fc")))
    module = fit(
        mx.mod.Module(loss, label_names=None),
        eval_metric="loss",
        initializer="one",
        optimizer_params={"learning_rate": 0.1},
    )
    assert np.abs(module.predict(IMAGES).asnumpy()).mean() < np.square(IMAGES.sum(1)).mean()


def test_a_used_iterator_is_started_over():
    """``fit`` resets an iterator that was exhausted before."""
    data = batches_of_four()
    assert len(list(data)) == 5
    assert fit(data=data)._optimizer.num_update == 5


def test_an_iterator_that_gives_nothing():
    """An epoch without a batch raises."""

    class Empty(mx.io.NDArrayIter):
        def next(self):
            raise StopIteration

    with pytest.raises(MXNetError, match="gave no batch in epoch 0"):
        fit(data=Empty(IMAGES, LABELS, batch_size=4))


@pytest.mark.parametrize("contexts", [1, 2])
def test_set_params_reaches_the_store(contexts):
    """After ``set_params`` the next update of a store starts from the new weights."""
    data = batches_of_four()
    module = mx.mod.Module(network(), context=[mx.cpu(i) for i in range(contexts)])
    fit(module, data, kvstore="device", optimizer_params={"learning_rate": 0.0})
    values = {"fc_weight": np.full((3, 5), 5.0), "fc_bias": np.zeros(3)}
    module.set_params(values, {})
    data.reset()
    module.forward_backward(next(data))
    module.update()
    assert module.get_params()[0]["fc_weight"].asnumpy().tolist() == [[5.0] * 5] * 3


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: inference_module().set_params({"fc_weight": [1]}, {}),
            DTypeError,
            "parameter 'fc_weight' must be an NDArray .* list",
        ),
        (
            lambda: inference_module().set_params({"fc_weight": np.ones((3, 3))}, {}),
            ShapeError,
            r"needs \(3, 5\), got \(3, 3\)",
        ),
        (lambda: inference_module().set_params({"fc_weight": np.ones((3, 5))}, {}), MXNetError, "'fc_bias' is missing"),
        (
            lambda: inference_module().set_params({"fc_weigth": np.ones((3, 5))}, {}),
            MXNetError,
            "unknown names .'fc_weigth'",
        ),
        (lambda: mx.optimizer.create(3), ParameterError, "a name such as 'sgd', or an Optimizer, got 3"),
        (
            lambda: mx.optimizer.create("sgd", momentm=1),
            ParameterError,
            "no setting 'momentm': did you mean 'momentum'",
        ),
        (lambda: mx.optimizer.Adam(beta1=1), ParameterError, r"Adam: beta1 must be in \[0, 1\), got 1"),
        (lambda: mx.optimizer.SGD(wd=float("nan")), ParameterError, "SGD: wd must be >= 0, got nan"),
        (
            lambda: mx.optimizer.SGD(learning_rate=float("inf")),
            ParameterError,
            "must be >= 0, got inf, which is not finite",
        ),
        (lambda: mx.optimizer.SGD(lr_scheduler=0.1), ParameterError, "lr_scheduler must map .* got 0.1"),
        (lambda: mx.init.create('["xavier"'), ParameterError, "an initializer as JSON reads"),
        (lambda: mx.init.create('["xavier", {"magnitud": 3}]'), ParameterError, "did you mean 'magnitude'"),
        (lambda: mx.metric.create("top_k_accuracy", topk=3), ParameterError, "no setting 'topk': did you mean 'top_k'"),
        (lambda: mx.io.NDArrayIter(IMAGES, batch_size="4"), ParameterError, "must be an integer in .* got '4'"),
        (lambda: mx.io.NDArrayIter("abc"), ParameterError, "expected an array, a list or a dictionary .* got str"),
        (
            lambda: mx.io.NDArrayIter(np.array(["a", "b"])),
            DTypeError,
            "data: expected an array of numbers, got dtype <U1",
        ),
        (
            lambda: mx.io.NDArrayIter(np.zeros((4, 5), [("a", "f4")])),
            DTypeError,
            "data: expected an array of numbers, got dtype .*'a'",
        ),
    ],
)
def test_parts(make, error, words):
    """Invalid arguments of set_params, optimizers, initializers, metrics and NDArrayIter raise with a remedy."""
    with pytest.raises(error, match=words):
        make()


def test_dtypes_of_iterators():
    """NumPy float64 and integers become float32, as in MXNet; float16 and NDArrays keep their dtype."""

    def dtypes_of(data, label):
        it = mx.io.NDArrayIter(data, label, batch_size=2)
        return tuple(part.dtype.__name__ for part in (*it.provide_data, *it.provide_label, next(it).label[0]))

    assert dtypes_of(IMAGES.astype("float64"), LABELS) == ("float32", "float32", "float32")
    assert dtypes_of(IMAGES.astype("float16"), mx.nd.array(LABELS, dtype="int32")) == ("float16", "int32", "int32")
    assert dtypes_of(mx.nd.array(IMAGES, dtype="float64"), LABELS)[0] == "float64"


def test_a_scheduler_keeps_its_rate_unless_one_is_given():
    """The learning rate is the scheduler's ``base_lr``, unless learning_rate is given."""
    schedule = mx.lr_scheduler.FactorScheduler(step=10, base_lr=0.5)
    assert mx.optimizer.SGD(lr_scheduler=schedule).learning_rate == 0.5
    assert mx.optimizer.Adam(lr_scheduler=schedule).learning_rate == 0.5
    assert mx.optimizer.SGD(learning_rate=0.25, lr_scheduler=schedule).learning_rate == 0.25
    assert (mx.optimizer.SGD().learning_rate, mx.optimizer.Adam().learning_rate) == (0.01, 0.001)


def test_speedometer_leaves_the_epoch_value_whole(caplog):
    """``reset_local`` clears the local value; the global value still covers every batch."""
    metric = mx.metric.create(["acc", "mse"])
    for right in (1, 1, 0, 0):
        metric.update([mx.nd.array([1.0])], [mx.nd.array([float(right)])])
        metric.reset_local()
    assert dict(metric.get_global_name_value()) == {"accuracy": 0.5, "mse": 0.5}
    assert np.isnan(dict(metric.get_name_value())["accuracy"])
    metric.reset()
    assert np.isnan(dict(metric.get_global_name_value())["mse"])


def test_kinds_of_errors_that_scripts_expect():
    """Unknown parameters raise ValueError, missing parameters RuntimeError, invalid shapes TypeError, as in MXNet."""
    module = inference_module()
    module.init_params()
    with pytest.raises(ValueError, match="unknown names"):
        module.set_params({"nobody": mx.nd.ones((1,))}, {}, allow_missing=True)
    with pytest.raises(RuntimeError, match="missing from the given"):
        module.set_params({}, {})
    with pytest.raises(TypeError, match="list of pairs"):
        module.bind([("data", mx.nd.array([10, 10]))], force_rebind=True)


def test_contexts_of_groups(caplog):
    """A group takes one context, or one per module context; an unknown name in grad_req only logs a warning."""
    with mx.AttrScope(ctx_group="first"):
        net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc")
    contexts = [mx.cpu(0), mx.cpu(1)]
    for where in (mx.cpu(2), [mx.cpu(2)], [mx.cpu(2), mx.cpu(3)]):
        module = mx.mod.Module(net, label_names=None, context=contexts, group2ctxs={"first": where})
        module.bind([("data", (4, 3))], grad_req={"fc_weight": "add", "elsewhere_weight": "write"})
        assert module.group.executors[1].arg_dict["fc_weight"].context in (mx.cpu(2), mx.cpu(3))
    assert "grad_req names ['elsewhere_weight']" in caplog.text
    with pytest.raises(BindError, match="'first' has 3 contexts, the module has 2"):
        mx.mod.Module(net, label_names=None, context=contexts, group2ctxs={"first": [mx.cpu(0)] * 3})


def test_statistics_of_the_whole_batch():
    """Training SyncBatchNorm on two contexts raises; inference, given statistics and one context work."""

    def module(contexts, **more):
        net = mx.sym.contrib.SyncBatchNorm(mx.sym.Variable("data"), ndev=2, key="k", name="bn", **more)
        return mx.mod.Module(mx.sym.MakeLoss(net), label_names=None, context=contexts)

    both = [mx.cpu(0), mx.cpu(1)]
    with pytest.raises(BindError, match=r"bn.*whole batch.*each of 2 contexts.*train on one context"):
        module(both).bind([("data", (4, 3))])
    module(both).bind([("data", (4, 3))], for_training=False)
    module(both, use_global_stats=True).bind([("data", (4, 3))])
    module(mx.cpu()).bind([("data", (4, 3))])
