"""Optimizers in a Module: multipliers by name, half precision, clipping, files of optimizer states, and warnings."""

import io
import logging
import pickle

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import BindError, FormatError, KVStoreError, MXNetError


def network():
    """Return a classifier of one layer."""
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc"), name="softmax")


def module_with_optimizer(optimizer="sgd", contexts=1, kvstore="local", **settings):
    """Return a bound, initialized module with an optimizer; ``settings`` are the optimizer's."""
    module = mx.mod.Module(network(), context=[mx.cpu(i) for i in range(contexts)])
    module.bind([("data", (4, 5))], [("softmax_label", (4,))])
    mx.random.seed(3)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore, optimizer, settings)
    return module


def step(module, count=1):
    """Train ``count`` steps on one batch; return the largest absolute change of each parameter."""
    before = {name: value.asnumpy() for name, value in module.get_params()[0].items()}
    batch = mx.io.DataBatch([mx.nd.array(np.random.default_rng(0).random((4, 5)))], [mx.nd.array([0, 1, 2, 1])])
    for _ in range(count):
        module.forward_backward(batch)
        module.update()
    return {name: np.abs(value.asnumpy() - before[name]).max() for name, value in module.get_params()[0].items()}


@pytest.mark.parametrize(("contexts", "kvstore"), [(1, "local"), (1, None), (2, "device")])
def test_multipliers_by_name_of_an_optimizer_made_before(contexts, kvstore, caplog):
    """An Optimizer object gets the parameters' names from Module; a rescale_grad that does not fit is logged."""
    chosen = mx.optimizer.SGD(learning_rate=1.0)
    chosen.set_lr_mult({"fc_weight": 0.0})
    with caplog.at_level(logging.WARNING, logger="weftplan"):
        moved = step(module_with_optimizer(chosen, contexts, kvstore))
    assert moved["fc_weight"] == 0
    assert moved["fc_bias"] > 0
    assert "rescale_grad=1:" in caplog.text
    assert "batch of 4" in caplog.text


def test_a_second_optimizer_is_ignored_with_a_word(caplog):
    """A second init_optimizer keeps the first optimizer and logs a warning; force_init=True replaces it."""
    module = module_with_optimizer(learning_rate=0.1)
    first = module._optimizer
    with caplog.at_level(logging.WARNING, logger="weftplan"):
        module.init_optimizer(optimizer="adam")
        assert module._optimizer is first
        assert caplog.text.count("has an optimizer already") == 1
        module.init_optimizer(optimizer="adam", force_init=True)
    assert module._optimizer is not first
    assert caplog.text.count("has an optimizer already") == 1


@pytest.mark.parametrize("clip", [None, 0, 0.0, -1.0])
def test_no_clipping(clip):
    """A ``clip_gradient`` of None, 0 or a negative number means no clipping."""
    weight = mx.nd.zeros((2,))
    update = mx.optimizer.get_updater(mx.optimizer.SGD(learning_rate=0.5, clip_gradient=clip))
    update(0, mx.nd.array([1.0, -8.0]), weight)
    assert weight.asnumpy().tolist() == [-0.5, 4.0]


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_half_precision_weights(name):
    """With multi_precision, steps too small for float16 add up, and the weight is the rounded float32 weight."""
    settings = {"learning_rate": 1e-5, "multi_precision": True}
    kind = "adam" if name == "adam" else "sgd"
    if name == "momentum":
        settings["momentum"] = 0.5
    half, full = (mx.nd.ones((3,), dtype=dtype) for dtype in ("float16", "float32"))
    plain = mx.nd.ones((3,), dtype="float16")
    updaters = [mx.optimizer.get_updater(mx.optimizer.create(kind, **settings)) for _ in range(2)]
    stuck = mx.optimizer.get_updater(mx.optimizer.create(kind, **{**settings, "multi_precision": False}))
    for i in range(300):
        gradient = np.array([1.0, -1.0, 0.5]) * (1 + i % 3)
        updaters[0](0, mx.nd.array(gradient, dtype="float16"), half)
        updaters[1](0, mx.nd.array(gradient), full)
        stuck(0, mx.nd.array(gradient, dtype="float16"), plain)
        if i == 150:  # the states include the float32 weight
            fresh = mx.optimizer.get_updater(updaters[0].optimizer)
            fresh.set_states(updaters[0].get_states())
            updaters[0] = fresh
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half.asnumpy(), full.asnumpy().astype(np.float16))
    assert plain.asnumpy().tolist() == [1, 1, 1]
    assert (half.asnumpy() != 1).all()


@pytest.mark.parametrize("kind", ["sgd", "nag"])
def test_order_of_half_precision_states(kind):
    """SGD and NAG store (momentum, float32 weight), Adam (float32 weight, state); files of the old order raise."""
    weight = mx.nd.full((2,), 3, dtype="float16")
    optimizer = mx.optimizer.create(kind, momentum=0.9, multi_precision=True)
    momentum, master = optimizer.create_state_multi_precision(0, weight)
    assert (momentum.asnumpy().tolist(), master.asnumpy().tolist()) == ([0, 0], [3, 3])
    assert momentum.dtype == master.dtype == np.float32
    adam = mx.optimizer.create("adam", multi_precision=True).create_state_multi_precision(0, weight)
    assert adam[0].asnumpy().tolist() == [3, 3]
    assert len(adam[1]) == 2
    updater = mx.optimizer.get_updater(optimizer)
    updater(0, mx.nd.ones((2,), dtype="float16"), weight)
    with np.load(io.BytesIO(updater.get_states())) as archive:
        old = io.BytesIO()
        np.savez(old, **{name: archive[name] for name in archive if name != "__version__"})
    fresh = mx.optimizer.get_updater(optimizer)
    fresh.set_states(old.getvalue())
    with pytest.raises(KVStoreError, match="saved when its order was"):
        fresh(0, mx.nd.ones((2,), dtype="float16"), weight)
    fresh.set_states(updater.get_states())
    fresh(0, mx.nd.ones((2,), dtype="float16"), weight)


KINDS = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9, "lazy_update": False}),
    ("nag", {}),
    ("nag", {"momentum": 0.9}),
    ("adam", {"lazy_update": False}),
    ("adamw", {}),
    ("adagrad", {}),
    ("rmsprop", {}),
    ("rmsprop", {"centered": True}),
    ("adadelta", {}),
]
KINDS += [
    (name, {})
    for name, klass in mx.optimizer.Optimizer.opt_registry.items()
    if not klass.__module__.startswith(("weftplan.", "tests."))  # optimizers that a plug-in registered
]


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_every_kind(name, settings):
    """An optimizer lowers a loss, keeps the dtype, needs ``state_bytes``, and continues from its saved states."""

    def run(ctx, dtype, cut):
        optimizer = mx.optimizer.create(name, **settings)
        update = mx.optimizer.get_updater(optimizer)
        weight = mx.nd.array([3.0, -2.0, 1.0], ctx=ctx, dtype=dtype)
        for i in range(20):
            if i == cut:
                repeated = mx.optimizer.create(name, **settings)
                data, update = update.get_states(), mx.optimizer.get_updater(repeated)
                update.set_states(data)
            update("w", weight * 1, weight)  # the gradient of weight**2 / 2
        assert weight.dtype == np.dtype(dtype)
        assert (np.abs(weight.asnumpy()) < [3, 2, 1]).all()
        kept = update.states["w"]
        arrays = [] if kept is None else kept if isinstance(kept, tuple) else [kept]
        assert sum(array.nbytes for array in arrays) == optimizer.state_bytes(weight.nbytes)
        return weight.asnumpy()

    for dtype in ("float32", "float64"):
        plain = run(mx.cpu(), dtype, cut=-1)
        for second in (run(mx.cpu(), dtype, cut=7), run(mx.sim(0), dtype, cut=-1), run(mx.cpu(1), dtype, cut=12)):
            np.testing.assert_array_equal(second, plain)


def test_custom_optimizer():
    """A registered custom optimizer works by name with multipliers, weight decay, update counts and states."""

    @mx.optimizer.register
    class Decaying(mx.optimizer.Optimizer):
        def __init__(self, power=1.0, **kwargs):
            super().__init__(**kwargs)
            self.power = power

        def create_state(self, index, weight):
            return mx.nd.zeros(weight.shape, weight.context, dtype=weight.dtype)

        def update(self, index, weight, grad, state):
            self._update_count(index)
            lr, wd, t = self._get_lr(index), self._get_wd(index), self._index_update_count[index]
            grad = grad * self.rescale_grad
            if self.clip_gradient is not None:
                grad = mx.nd.clip(grad, -self.clip_gradient, self.clip_gradient)
            state[:] += grad
            weight[:] -= lr / t**self.power * (state + wd * weight)

    try:
        module = module_with_optimizer("decaying", learning_rate=0.5, power=2.0, wd=0.1, clip_gradient=0.25)
        module._optimizer.set_lr_mult({"fc_bias": 0.5})
        start = {name: value.asnumpy() for name, value in module.get_params()[0].items()}
        batch = mx.io.DataBatch([mx.nd.array(np.random.default_rng(0).random((4, 5)))], [mx.nd.array([0, 1, 2, 1])])
        sums = dict.fromkeys(start, 0.0)
        for t in (1, 2):
            module.forward_backward(batch)
            for name, (grad,) in zip(module.param_names, module.group.grad_arrays, strict=True):
                lr, wd = (0.5, 0.1) if name == "fc_weight" else (0.25, 0.0)
                sums[name] = sums[name] + np.clip(grad.asnumpy() / 4, -0.25, 0.25)
                start[name] = start[name] - lr / t**2 * (sums[name] + wd * start[name])
            module.update()
        for name, value in module.get_params()[0].items():
            np.testing.assert_allclose(value.asnumpy(), start[name], rtol=1e-5, err_msg=name)
    finally:
        del mx.optimizer.Optimizer.opt_registry["decaying"]


def test_nesterov_with_decay():
    """NAG applies weight decay to the weight before the step, in the step and in the momentum."""
    weight, update = (
        mx.nd.array([2.0]),
        mx.optimizer.get_updater(mx.optimizer.NAG(learning_rate=0.1, momentum=0.5, wd=0.3)),
    )
    update.optimizer.wd_mult = {}
    w, m = 2.0, 0.0
    for g in (1.0, -0.5, 0.25):
        update(0, mx.nd.array([g]), weight)
        step = 0.1 * (g + 0.3 * w)
        m = 0.5 * m - step
        w += 0.5 * m - step
    assert weight.asscalar() == pytest.approx(w, rel=1e-6)


def test_files_of_states(tmp_path):
    """Saved states load; a missing or damaged file raises and changes nothing; without an optimizer saving raises."""
    path = tmp_path / "net.states"
    module = module_with_optimizer(learning_rate=0.1, momentum=0.9)
    step(module, 2)
    module.save_optimizer_states(path)
    saved = module._updater.get_states()
    step(module)
    assert module._updater.get_states() != saved
    module.load_optimizer_states(path)
    assert module._updater.get_states() == saved
    path.write_bytes(saved[:40])
    with pytest.raises(FormatError, match="truncated or not a states file"):
        module.load_optimizer_states(path)
    with pytest.raises(FormatError, match=r"cannot read optimizer states from .*none"):
        module.load_optimizer_states(tmp_path / "none")
    assert module._updater.get_states() == saved
    module.save_checkpoint(tmp_path / "net", 1)
    with pytest.raises(FormatError, match=r"net-0001.states"):
        mx.mod.Module.load(tmp_path / "net", 1, load_optimizer_states=True)
    with pytest.raises(MXNetError, match="no optimizer"):
        mx.mod.Module(network()).save_optimizer_states(path)


@pytest.mark.parametrize("now", [(1, None), (2, "device"), (3, "local"), (2, "apart")])
@pytest.mark.parametrize("before", [(1, None), (2, "device"), (3, "local"), (2, "apart")])
def test_training_goes_on_elsewhere(before, now, tmp_path, monkeypatch):
    """States saved with some devices and store load with others, and training continues to the same weights.

    Adam's bias correction and the schedule depend on the number of updates, which the file contains. A fixed parameter
    has no state.
    """

    def module(place):
        contexts, kvstore = place
        monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0" if kvstore == "apart" else "1")
        net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=4, name="fc0")
        net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=3, name="fc"), name="softmax")
        result = mx.mod.Module(net, context=[mx.cpu(i) for i in range(contexts)], fixed_param_names=["fc0_weight"])
        result.bind([("data", (6, 5))], [("softmax_label", (6,))])
        mx.random.seed(3)
        result.init_params(mx.init.Xavier())
        schedule = mx.lr_scheduler.FactorScheduler(2, factor=0.3, base_lr=0.1)
        result.init_optimizer("local" if kvstore == "apart" else kvstore, "adam", {"lr_scheduler": schedule})
        return result

    def step(made):
        batch = mx.io.DataBatch([mx.nd.array(np.random.default_rng(0).random((6, 5)))], [mx.nd.array([0, 1, 2] * 2)])
        made.forward_backward(batch)
        made.update()

    whole, first, second = module(before), module(before), module(now)
    for _ in range(6):
        step(whole)
    for _ in range(3):
        step(first)
    first.save_optimizer_states(tmp_path / "net.states")
    second.set_params(*first.get_params())
    second.load_optimizer_states(tmp_path / "net.states")
    assert second._optimizer.learning_rate == first._optimizer.learning_rate < 0.1
    for _ in range(3):
        step(second)
    for name, value in whole.get_params()[0].items():
        np.testing.assert_allclose(second.get_params()[0][name].asnumpy(), value.asnumpy(), rtol=1e-4, err_msg=name)


def test_contexts_that_train_alone_go_on_with_their_own_states(tmp_path):
    """Without a store each context has its own momentum, as in MXNet, and gets it back from a states file."""
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, no_bias=True, name="fc")
    net = mx.sym.LinearRegressionOutput(net, name="softmax")
    batch = mx.io.DataBatch([mx.nd.array([[1.0], [2.0]])], [mx.nd.array([[0.0], [3.0]])])
    results = []
    for loads in (False, True):
        module = mx.mod.Module(net, context=[mx.cpu(0), mx.cpu(1)])
        module.bind([("data", (2, 1))], [("softmax_label", (2, 1))])
        module.init_params(mx.init.One())
        module.init_optimizer(None, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
        for number in range(3):
            module.forward_backward(batch)
            module.update()
            if loads and number == 1:
                module.save_optimizer_states(tmp_path / "states")
                module.load_optimizer_states(tmp_path / "states")
        results.append([executor.arg_dict["fc_weight"].asnumpy().item() for executor in module.group.executors])
    assert results[0] == results[1]
    np.testing.assert_allclose(results[0], [0.731375, 1.469], rtol=1e-6)


def test_states_that_mxnet_has_written(tmp_path):
    """A states file with a pickle of a function raises without calling it; the module has no optimizer then."""

    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "sprung"), "w")

    module_with_optimizer().save_checkpoint(tmp_path / "net", 1)
    (tmp_path / "net-0001.states").write_bytes(pickle.dumps({0: Trap()}))
    module = mx.mod.Module.load(tmp_path / "net", 1, load_optimizer_states=True)
    module.bind([("data", (4, 5))], [("softmax_label", (4,))])
    for _ in range(2):
        with pytest.raises(FormatError, match=r"a pickle that names .*it is not read, since a pickle can run code"):
            module.init_optimizer()
        assert not module.optimizer_initialized
    assert not (tmp_path / "sprung").exists()


def test_states_of_another_optimizer(tmp_path):
    """Loading SGD's momentum into Adam raises and changes no state, whatever the devices and stores."""
    module = module_with_optimizer("sgd", 2, "device", momentum=0.9)
    step(module)
    module.save_optimizer_states(tmp_path / "net.states")
    for devices, kvstore in ((1, None), (1, "local"), (2, None), (2, "device")):
        second = module_with_optimizer("adam", devices, kvstore)
        step(second)
        before = second._states_holder().get_states()
        with pytest.raises(FormatError, match=r"is \(3.*\) float32, but Adam needs \[.*\] for a weight \(3"):
            second.load_optimizer_states(tmp_path / "net.states")
        assert second._states_holder().get_states() == before
        step(second)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_states_of_other_shapes_in_a_store(kind, tmp_path):
    """A store refuses loaded states of other shapes than its values, also before the first push."""
    saving = mx.kv.create(kind)
    saving.init(["a", "b"], [mx.nd.zeros((2,)), mx.nd.zeros((3,))])
    saving.set_optimizer(mx.optimizer.create("sgd", momentum=0.9))
    saving.push(["a", "b"], [mx.nd.ones((2,)), mx.nd.ones((3,))])
    saving.save_optimizer_states(tmp_path / "states")
    second = mx.kv.create(kind)
    second.init(["a", "b"], [mx.nd.zeros((2,)), mx.nd.zeros((4,))])
    second.set_optimizer(mx.optimizer.create("sgd", momentum=0.9))
    with pytest.raises(FormatError, match=r"state of 'b' is \(3,\) float32, but SGD needs \(4,\) float32"):
        second.load_optimizer_states(tmp_path / "states")
    second.push(["a", "b"], [mx.nd.ones((2,)), mx.nd.ones((4,))])


def test_states_of_another_network(tmp_path):
    """States of other parameter names or another number of parameters raise and change nothing."""
    module = module_with_optimizer("adam")
    step(module)
    kept = module._updater.get_states()
    for saved, words in (({"other": None}, r"states of \['other'\]"), ({0: None, 1: None, 2: None}, "of 3 parameters")):
        second = mx.optimizer.Updater(mx.optimizer.SGD())
        second.states = saved
        (tmp_path / "other.states").write_bytes(second.get_states())
        with pytest.raises(FormatError, match=words):
            module.load_optimizer_states(tmp_path / "other.states")
        assert module._updater.get_states() == kept


def test_states_before_the_first_update(tmp_path):
    """States that were saved before the first update load, and training goes on."""
    module = module_with_optimizer("adam")
    module.save_optimizer_states(tmp_path / "net.states")
    module.load_optimizer_states(tmp_path / "net.states")
    assert step(module)["fc_weight"] > 0


def test_requests_of_single_arguments():
    """grad_req may be a list or a dictionary by name; a wrong length raises; inference has no gradients."""

    def names_with_gradients(grad_req, **settings):
        module = mx.mod.Module(network())
        module.bind([("data", (4, 5))], [("softmax_label", (4,))], grad_req=grad_req, **settings)
        return [name for name, array in module.group.executors[0].grad_dict.items() if array is not None]

    assert names_with_gradients("add") == ["fc_weight", "fc_bias"]
    assert names_with_gradients({"fc_weight": "null"}) == ["fc_bias"]
    assert names_with_gradients(["write", "null", "add", "null"]) == ["data", "fc_bias"]
    assert names_with_gradients({"fc_weight": "add"}, for_training=False) == []
    assert names_with_gradients({"fc": "null"}) == ["fc_weight", "fc_bias"]
    with pytest.raises(BindError, match="grad_req has 2 items, the symbol 4 arguments"):
        names_with_gradients(["write", "null"])


@pytest.mark.parametrize("contexts", [1, 3])
def test_shapes_of_outputs(contexts):
    """output_shapes are those of the whole batch, before the first forward."""
    module = mx.mod.Module(network(), context=[mx.cpu(i) for i in range(contexts)])
    module.bind([("data", (7, 5))], [("softmax_label", (7,))])
    assert module.output_shapes == [("softmax_output", (7, 3))]


def test_a_schedule_that_begins_below_its_least_rate():
    """A rate below stop_factor_lr is kept until the first drop, then raised to it."""
    schedule = mx.lr_scheduler.FactorScheduler(10, factor=0.5, base_lr=0.0)
    assert [schedule(n) for n in (1, 10, 11)] == [0.0, 0.0, 1e-8]


def test_checkpoints_under_mxnets_name(tmp_path):
    """``mx.model`` saves and loads checkpoints."""
    symbol = network()
    mx.model.save_checkpoint(tmp_path / "net", 3, symbol, {"fc_weight": mx.nd.ones((3, 5))}, {})
    reloaded, args, aux = mx.model.load_checkpoint(tmp_path / "net", 3)
    assert (reloaded.list_arguments(), list(args), aux) == (symbol.list_arguments(), ["fc_weight"], {})
    assert list(mx.model.load_params(tmp_path / "net", 3)[0]) == ["fc_weight"]


def test_states_of_an_updater_without_its_optimizer():
    """``get_states(dump_optimizer=False)`` works as in MXNet; True raises, since it needs a pickle."""
    updater = mx.optimizer.get_updater(mx.optimizer.Adam())
    weight = mx.nd.ones((2,))
    updater(0, weight * 0.5, weight)
    second = mx.optimizer.get_updater(mx.optimizer.Adam())
    second.set_states(updater.get_states(dump_optimizer=False))
    assert [a.asnumpy().tolist() for a in second.states[0]] == [a.asnumpy().tolist() for a in updater.states[0]]
    with pytest.raises(KVStoreError, match="dump_optimizer=True would need a pickle"):
        updater.get_states(dump_optimizer=True)
