"""Idioms of MXNet scripts with Module, such as named tuples as batches, features and borrowed optimizers."""

import logging
from collections import namedtuple

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import BindError, MXNetError

Batch = namedtuple("Batch", ["data"])


def network():
    """Return a classifier of two layers."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="fc1")
    net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="relu", name="relu1"), num_hidden=3, name="fc2")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def three_batches():
    """Return an iterator over three batches of four samples."""
    rng = np.random.default_rng(0)
    return mx.io.NDArrayIter(rng.random((12, 5)), np.arange(12) % 3, batch_size=4)


def trained_module():
    """Return a module that was trained for an epoch."""
    module = mx.mod.Module(network())
    module.fit(three_batches(), num_epoch=1, initializer=mx.init.Xavier())
    return module


def test_batches_of_a_custom_module():
    """``fit`` reads only the label of a batch; other fields are left to the module."""
    seen = []

    class Mine(mx.mod.BaseModule):
        def forward_backward(self, batch):
            seen.append(batch.number)

        bind = init_params = init_optimizer = update = update_metric = set_params = lambda self, *args, **kwargs: None

        def get_params(self):
            return None, None

    one = namedtuple("One", ["number", "label"])

    class Source(mx.io.DataIter):
        provide_data = provide_label = ()

        def __iter__(self):
            return iter([one(0, []), one(1, [])])

        def reset(self):
            pass

    Mine().fit(Source(), num_epoch=2)
    assert seen == [0, 1, 0, 1]


def test_a_batch_that_is_a_named_tuple():
    """To predict, a batch needs only the field ``data``, with any number of samples; training without labels raises."""
    module = trained_module()
    data = mx.nd.array(np.random.default_rng(1).random((6, 5)))
    whole = module.predict(data).asnumpy()
    for rows in (4, 6, 1):
        module.forward(Batch([data[:rows]]), is_train=False)
        np.testing.assert_allclose(module.get_outputs()[0].asnumpy(), whole[:rows], rtol=1e-6)
    with pytest.raises(MXNetError, match="the batch has no label"):
        module.forward(Batch([data[:4]]), is_train=True)


def test_features_of_a_larger_network():
    """set_params ignores parameters of other layers, but raises if one of the module's own parameters is missing."""
    args, aux = trained_module().get_params()
    features = mx.mod.Module(network().get_internals()["relu1_output"], label_names=None)
    features.bind([("data", (4, 5))], for_training=False)
    features.set_params(args, aux)
    assert features.predict(three_batches()).shape == (12, 4)
    del args["fc1_bias"]
    for allow_missing in (False, True):
        with pytest.raises(MXNetError, match=r"unknown names \['fc2_weight', 'fc2_bias'\]"):
            features.set_params(args, aux, allow_missing=allow_missing)


def test_mxnets_order_of_settings(caplog):
    """Module takes names, logger and context by position; fit logs to that logger; a logger of another type raises."""
    module = mx.mod.Module(network(), ["data"], ["softmax_label"], logging.getLogger("mine"), mx.cpu(1), [1])
    assert module.contexts == [mx.cpu(1)]
    with caplog.at_level(logging.INFO, logger="mine"):
        module.fit(three_batches(), num_epoch=1)
    assert {record.name for record in caplog.records if "Train-accuracy" in record.message} == {"mine"}
    with pytest.raises(MXNetError, match=r"logger must be one of the module logging.* got cpu\(1\)"):
        mx.mod.Module(network(), ["data"], ["softmax_label"], mx.cpu(1))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"work_load_list": [1, 2]}, r"a positive number for each of the 1 contexts, got \[1, 2\]"),
        ({"work_load_list": [0]}, r"a positive number for each of the 1 contexts, got \[0\]"),
        ({"state_names": ["h"]}, r"state_names \['h'\] are no arguments"),
        ({"group2ctxs": [{}, {}]}, "a list of one for each of the 1 contexts"),
        ({"group2ctxs": [mx.cpu(1)]}, "must be a dictionary from groups to contexts"),
    ],
)
def test_settings_that_would_change_the_result(settings, words):
    """Invalid arguments of Module raise BindError instead of being ignored."""
    with pytest.raises(BindError, match=words):
        mx.mod.Module(network(), **settings)


@pytest.mark.parametrize("contexts", [1, 2])
def test_groups_of_nodes_on_other_contexts(contexts):
    """group2ctxs places layers on other contexts; the weights equal those of training on one context."""

    def fit(**settings):
        mx.random.seed(2)
        with mx.AttrScope(ctx_group="early"):
            net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="fc1")
        net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3, name="fc2"), name="softmax")
        module = mx.mod.Module(net, context=[mx.cpu(i) for i in range(contexts)], **settings)
        module.fit(three_batches(), num_epoch=2, initializer=mx.init.Xavier())
        return module

    plain, groups = fit(), [{"early": mx.cpu(5 + i)} for i in range(contexts)]
    for placed in (fit(group2ctxs=groups), fit(group2ctxs=groups[0])):
        assert placed.group.executors[0].arg_dict["fc1_weight"].context == mx.cpu(5)
        for name, value in plain.get_params()[0].items():
            np.testing.assert_array_equal(placed.get_params()[0][name].asnumpy(), value.asnumpy())
        assert placed.predict(np.ones((2, 5))).shape == (2, 3)


def test_gradients_that_are_compressed():
    """compression_params make a device store sum 2-bit gradients; a host store refuses them."""

    def fit(kvstore="device", **settings):
        mx.random.seed(2)
        module = mx.mod.Module(network(), context=[mx.cpu(0), mx.cpu(1)], **settings)
        module.fit(
            three_batches(), num_epoch=1, kvstore=kvstore, optimizer_params={"learning_rate": 1.0, "rescale_grad": 1.0}
        )
        return module

    params = {"type": "2bit", "threshold": 0.25}
    plain, compressed = fit(), fit(compression_params=params)
    assert compressed._kvstore.statistics()["compression_bytes"] > 0
    moved = compressed.get_params()[0]["fc2_bias"].asnumpy() / 0.25
    np.testing.assert_allclose(moved, np.round(moved), atol=1e-5)
    assert not np.array_equal(plain.get_params()[0]["fc2_bias"].asnumpy(), 0.25 * moved)
    with pytest.raises(MXNetError, match=r"use mx\.kv\.create"):
        fit("local", compression_params=params)


def test_a_borrowed_optimizer():
    """Two modules that share parameters and an optimizer, used alternately, make the same steps as one module."""
    mx.random.seed(4)
    one, first = trained_module(), trained_module()
    first.set_params(*one.get_params())
    for module in (one, first):
        module.init_optimizer(optimizer_params={"learning_rate": 0.5, "momentum": 0.9}, force_init=True)
    second = mx.mod.Module(network())
    second.bind(three_batches().provide_data, three_batches().provide_label, shared_module=first)
    with pytest.raises(MXNetError, match="no optimizer"):
        second.borrow_optimizer(mx.mod.Module(network()))
    assert second.optimizer_initialized  # bind has shared it
    for number, batch in enumerate(three_batches()):
        turn = (first, second)[number % 2]
        turn.prepare(batch)
        for module in (one, turn):
            module.forward_backward(batch)
            module.update()
    for name, value in one.get_params()[0].items():
        for module in (first, second):
            np.testing.assert_array_equal(module.get_params()[0][name].asnumpy(), value.asnumpy(), err_msg=name)


def test_a_borrowed_optimizer_knows_parameters_by_name():
    """A borrowed optimizer matches momentum to parameters by name, not position; an unknown parameter raises."""

    def branches(names):
        data = mx.sym.Variable("data")
        layers = [mx.sym.FullyConnected(data, num_hidden=3, name=name) for name in names]
        return mx.sym.SoftmaxOutput(mx.sym.add_n(*layers), name="softmax")

    first, second = mx.mod.Module(branches("ab")), mx.mod.Module(branches("ba"))
    first.fit(three_batches(), num_epoch=1, optimizer_params={"learning_rate": 0.1, "momentum": 0.9})
    shapes = three_batches().provide_data, three_batches().provide_label
    second.bind(*shapes, shared_module=first)
    number = first.param_names.index("a_weight")
    assert second.param_names.index("a_weight") != number
    before = {key: first._updater.states[key].asnumpy() for key in first._updater.states}
    second.forward_backward(next(three_batches()))
    gradient = second.group.grad_arrays[second.param_names.index("a_weight")][0].asnumpy()
    second.update()
    after = first._updater.states[number].asnumpy()
    np.testing.assert_allclose(after, 0.9 * before[number] - 0.1 * gradient / 4, rtol=1e-5, atol=1e-7)
    assert set(first._updater.states) == set(before)
    another = mx.mod.Module(branches("abc"))
    another.bind(*shapes)
    with pytest.raises(MXNetError, match=r"\['c_weight', 'c_bias'\] are trained here"):
        another.borrow_optimizer(first)


def test_what_bind_shares(caplog):
    """``bind(shared_module=)`` shares parameters and an optimizer that exists; a later or unfit optimizer is not."""
    module, shapes = trained_module(), (three_batches().provide_data, three_batches().provide_label)
    other = mx.mod.Module(network())
    other.bind(*shapes, shared_module=module)
    assert (other._optimizer, other._updater, other._kvstore) == (module._optimizer, module._updater, module._kvstore)
    other.set_params({name: value * 0 for name, value in module.get_params()[0].items()}, {})
    assert not any(value.asnumpy().any() for value in module.get_params()[0].values())
    other.init_optimizer(optimizer="adam", force_init=True)
    assert module._optimizer is not other._optimizer
    plain = mx.mod.Module(network())
    plain.bind(*shapes)
    plain.init_params()
    later = mx.mod.Module(network())
    later.bind(*shapes, shared_module=plain)
    assert later.params_initialized
    assert not later.optimizer_initialized
    fixed = mx.mod.Module(network(), fixed_param_names=["fc1_weight"])
    fixed.bind(*shapes)
    fixed.init_params()
    fixed.init_optimizer()
    free = mx.mod.Module(network())
    free.bind(*shapes, shared_module=fixed)
    assert free.optimizer_initialized


def test_what_a_module_tells_of_itself():
    """Module's attributes have the names and states that scripts read."""
    module = trained_module()
    assert (module.data_names, module.label_names, module.output_names) == (
        ["data"],
        ["softmax_label"],
        ["softmax_output"],
    )
    assert (module.binded, module.for_training, module.params_initialized, module.optimizer_initialized) == (True,) * 4
    assert not module.inputs_need_grad
    module.bind([("data", (2, 5))], [("softmax_label", (2,))], inputs_need_grad=True, force_rebind=True)
    assert module.inputs_need_grad
