"""Optimizers in a Module's hands: multipliers by name, half precision, clipping, files of states, warnings."""

import io
import logging
import pickle

import numpy as np
import pytest

import weftplan as mx
from weftplan.errors import BindError, FormatError, KVStoreError, MXNetError


def network():
    """Return one layer and a loss."""
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc"), name="softmax")


def ready(optimizer="sgd", contexts=1, kvstore="local", **settings):
    """Return a module with parameters and an optimizer."""
    module = mx.mod.Module(network(), context=[mx.cpu(i) for i in range(contexts)])
    module.bind([("data", (4, 5))], [("softmax_label", (4,))])
    mx.random.seed(3)
    module.init_params(mx.init.Xavier())
    module.init_optimizer(kvstore, optimizer, settings)
    return module


def step(module, count=1):
    """That many steps on one batch; by how much each parameter moved at most."""
    before = {name: value.asnumpy() for name, value in module.get_params()[0].items()}
    batch = mx.io.DataBatch([mx.nd.array(np.random.default_rng(0).random((4, 5)))], [mx.nd.array([0, 1, 2, 1])])
    for _ in range(count):
        module.forward_backward(batch)
        module.update()
    return {name: np.abs(value.asnumpy() - before[name]).max() for name, value in module.get_params()[0].items()}


@pytest.mark.parametrize(("contexts", "kvstore"), [(1, "local"), (1, None), (2, "device")])
def test_multipliers_by_name_of_an_optimizer_made_before(contexts, kvstore, caplog):
    """An Optimizer object learns the parameters' names from the Module, wherever it runs; odd rescaling is logged."""
    chosen = mx.optimizer.SGD(learning_rate=1.0)
    chosen.set_lr_mult({"fc_weight": 0.0})
    with caplog.at_level(logging.WARNING, logger="weftplan"):
        moved = step(ready(chosen, contexts, kvstore))
    assert moved["fc_weight"] == 0
    assert moved["fc_bias"] > 0
    assert "rescale_grad=1:" in caplog.text
    assert "batch of 4" in caplog.text


def test_a_second_optimizer_is_ignored_with_a_word(caplog):
    """fit twice: the first optimizer goes on, and the log says so; force_init replaces it in silence."""
    module = ready(learning_rate=0.1)
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
    """None, zero and negative numbers all mean: no limit. Zero is no limit of zero, which would stop training."""
    weight = mx.nd.zeros((2,))
    update = mx.optimizer.get_updater(mx.optimizer.SGD(learning_rate=0.5, clip_gradient=clip))
    update(0, mx.nd.array([1.0, -8.0]), weight)
    assert weight.asnumpy().tolist() == [-0.5, 4.0]


@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_half_precision_weights(name):
    """multi_precision: steps too small for float16 add up, and the weight is the rounded float32 one."""
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
        if i == 150:  # the copy is part of the states
            fresh = mx.optimizer.get_updater(updaters[0].optimizer)
            fresh.set_states(updaters[0].get_states())
            updaters[0] = fresh
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half.asnumpy(), full.asnumpy().astype(np.float16))
    assert plain.asnumpy().tolist() == [1, 1, 1]
    assert (half.asnumpy() != 1).all()


@pytest.mark.parametrize("kind", ["sgd", "nag"])
def test_order_of_half_precision_states(kind):
    """SGD and NAG keep (momentum, float32 weight), as MXNet's, Adam (float32 weight, state); old files are refused."""
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
    ("adagrad", {}),
    ("rmsprop", {}),
    ("rmsprop", {"centered": True}),
    ("adadelta", {}),
]
KINDS += [
    (name, {})
    for name, klass in mx.optimizer.Optimizer.opt_registry.items()
    if not klass.__module__.startswith(("weftplan.", "tests."))  # a plug-in's
]


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_every_kind(name, settings):
    """Lowers a loss on any device, keeps the weight's dtype, says how many bytes it keeps, goes on from its states."""

    def run(ctx, dtype, cut):
        optimizer = mx.optimizer.create(name, **settings)
        update = mx.optimizer.get_updater(optimizer)
        weight = mx.nd.array([3.0, -2.0, 1.0], ctx=ctx, dtype=dtype)
        for i in range(20):
            if i == cut:
                repeated = mx.optimizer.create(name, **settings)
                data, update = update.get_states(), mx.optimizer.get_updater(repeated)
                update.set_states(data)
            update("w", weight * 1, weight)  # the gradient of half the square
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


def test_one_of_ones_own():
    """An optimizer as they are written for MXNet, registered and used by name: multipliers, decay, counts, states."""

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
        module = ready("decaying", learning_rate=0.5, power=2.0, wd=0.1, clip_gradient=0.25)
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
    """The step and the momentum both decay the weight as it was before the step."""
    weight, update = mx.nd.array([2.0]), mx.optimizer.get_updater(mx.optimizer.NAG(0.1, momentum=0.5, wd=0.3))
    update.optimizer.wd_mult = {}
    w, m = 2.0, 0.0
    for g in (1.0, -0.5, 0.25):
        update(0, mx.nd.array([g]), weight)
        step = 0.1 * (g + 0.3 * w)
        m = 0.5 * m - step
        w += 0.5 * m - step
    assert weight.asscalar() == pytest.approx(w, rel=1e-6)


def test_files_of_states(tmp_path):
    """Saved states load; a missing or damaged file raises and changes nothing; an optimizer is not required."""
    path = tmp_path / "net.states"
    module = ready(learning_rate=0.1, momentum=0.9)
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
    """States saved on some devices load on others: a store keeps them by name, contexts by number.

    Adam's corrections and the schedule go by the number of updates, which are part of the file. A fixed parameter has
    no state.
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
    """Without a store each context has a momentum of its own, as in MXNet, and keeps it when states are read."""
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
    """A pickle that names a function is refused before that is called; the module stays without an optimizer."""

    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "sprung"), "w")

    ready().save_checkpoint(tmp_path / "net", 1)
    (tmp_path / "net-0001.states").write_bytes(pickle.dumps({0: Trap()}))
    module = mx.mod.Module.load(tmp_path / "net", 1, load_optimizer_states=True)
    module.bind([("data", (4, 5))], [("softmax_label", (4,))])
    for _ in range(2):
        with pytest.raises(FormatError, match=r"a pickle that names .*it is not read, since a pickle can run code"):
            module.init_optimizer()
        assert not module.optimizer_initialized
    assert not (tmp_path / "sprung").exists()


def test_states_of_another_optimizer(tmp_path):
    """Momentum for Adam: loading it is refused, whatever devices it came from, and the module goes on as it was."""
    module = ready("sgd", 2, "device", momentum=0.9)
    step(module)
    module.save_optimizer_states(tmp_path / "net.states")
    for devices, kvstore in ((1, None), (1, "local"), (2, None), (2, "device")):
        second = ready("adam", devices, kvstore)
        step(second)
        before = second._states_holder().get_states()
        with pytest.raises(FormatError, match=r"is \(3.*\) float32, but Adam needs \[.*\] for a weight \(3"):
            second.load_optimizer_states(tmp_path / "net.states")
        assert second._states_holder().get_states() == before
        step(second)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_states_of_other_shapes_in_a_store(kind, tmp_path):
    """A store compares loaded states with its values at once, also before the first push, and keeps what it had."""
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
    """They are refused, by name or number, and the module's states stay."""
    module = ready("adam")
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
    """A file without a state is loaded; the next update makes them."""
    module = ready("adam")
    module.save_optimizer_states(tmp_path / "net.states")
    module.load_optimizer_states(tmp_path / "net.states")
    assert step(module)["fc_weight"] > 0


def test_requests_of_single_arguments():
    """grad_req as a list or by name; names and lengths that do not fit; a module for prediction has no gradients."""

    def requests(grad_req, **settings):
        module = mx.mod.Module(network())
        module.bind([("data", (4, 5))], [("softmax_label", (4,))], grad_req=grad_req, **settings)
        return [name for name, array in module.group.executors[0].grad_dict.items() if array is not None]

    assert requests("add") == ["fc_weight", "fc_bias"]
    assert requests({"fc_weight": "null"}) == ["fc_bias"]
    assert requests(["write", "null", "add", "null"]) == ["data", "fc_bias"]
    assert requests({"fc_weight": "add"}, for_training=False) == []
    assert requests({"fc": "null"}) == ["fc_weight", "fc_bias"]
    with pytest.raises(BindError, match="grad_req has 2 items, the symbol 4 arguments"):
        requests(["write", "null"])


@pytest.mark.parametrize("contexts", [1, 3])
def test_shapes_of_outputs(contexts):
    """Of the whole batch, before the first forward."""
    module = mx.mod.Module(network(), context=[mx.cpu(i) for i in range(contexts)])
    module.bind([("data", (7, 5))], [("softmax_label", (7,))])
    assert module.output_shapes == [("softmax_output", (7, 3))]


def test_a_schedule_that_begins_below_its_least_rate():
    """The least rate holds after the first drop; a rate of 0 stays 0 until then."""
    schedule = mx.lr_scheduler.FactorScheduler(10, factor=0.5, base_lr=0.0)
    assert [schedule(n) for n in (1, 10, 11)] == [0.0, 0.0, 1e-8]


def test_checkpoints_under_mxnets_name(tmp_path):
    """mx.model saves and loads checkpoints."""
    symbol = network()
    mx.model.save_checkpoint(tmp_path / "net", 3, symbol, {"fc_weight": mx.nd.ones((3, 5))}, {})
    reloaded, args, aux = mx.model.load_checkpoint(tmp_path / "net", 3)
    assert (reloaded.list_arguments(), list(args), aux) == (symbol.list_arguments(), ["fc_weight"], {})
    assert list(mx.model.load_params(tmp_path / "net", 3)[0]) == ["fc_weight"]


def test_states_of_an_updater_without_its_optimizer():
    """``get_states(dump_optimizer=False)``, as MXNet's scripts say it; a pickle of the optimizer is refused."""
    updater = mx.optimizer.get_updater(mx.optimizer.Adam())
    weight = mx.nd.ones((2,))
    updater(0, weight * 0.5, weight)
    second = mx.optimizer.get_updater(mx.optimizer.Adam())
    second.set_states(updater.get_states(dump_optimizer=False))
    assert [a.asnumpy().tolist() for a in second.states[0]] == [a.asnumpy().tolist() for a in updater.states[0]]
    with pytest.raises(KVStoreError, match="dump_optimizer=True would need a pickle"):
        updater.get_states(dump_optimizer=True)
