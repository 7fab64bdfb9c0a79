"""Fused optimizer steps: one operation updates all weights with the bits of single steps, if fusion is possible."""

import itertools

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.ops.core import registry
from weftplan.ops.optimizer import fused_update
from weftplan.support.slots import MAKE_ROOM
from weftplan.training.optimizers import fused_step

SHAPES = [(300, 700), (5,), (1000, 300), (1,), (257,)]
OPTIMIZERS = [
    ("sgd", {}), ("sgd", {"momentum": 0.9, "wd": 0.01}), ("sgd", {"momentum": 0.9, "clip_gradient": 0.3}),
    ("adam", {"wd": 0.1}), ("signum", {}), ("ftrl", {}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def own_engine():
    """Use a new engine: an engine with failed arrays, which earlier tests may leave, does not fuse steps."""
    with engine.using(engine.create("ThreadedEnginePerDevice")):
        yield


def random_arrays(dtype="float32", seed=0):
    """Return arrays of :data:`SHAPES` with random values, as weights or gradients."""
    rng = np.random.default_rng(seed)
    return [mx.nd.array(rng.standard_normal(shape), dtype=dtype) for shape in SHAPES]


def weights_and_states(name, settings, *, fused, dtype="float32", count=3):
    """Return (weights, saved states) after ``count`` steps with different gradients."""
    optimizer = mx.optimizer.create(name, learning_rate=0.1, param_idx2name={0: "a_weight", 1: "a_bias"}, **settings)
    updater = mx.optimizer.get_updater(optimizer)
    weights = random_arrays(dtype)
    for number in range(count):
        grads = random_arrays(dtype, number + 1)
        if fused:
            updater(list(range(len(weights))), grads, weights)
        else:
            for i, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
                updater(i, grad, weight)
    return [weight.asnumpy() for weight in weights], updater.get_states()


def record_fused_updates(monkeypatch):
    """Return a list to which each later fused update appends its operator name."""
    names = []
    launch = fused_step.launch
    monkeypatch.setattr(fused_step, "launch", lambda stages: (names.append(stages[0].name), launch(stages))[1])
    return names


@pytest.mark.parametrize("kernels", ["auto", "numpy"])
@pytest.mark.parametrize(("name", "settings"), OPTIMIZERS)
def test_all_at_once_has_the_bits_of_one_by_one(name, settings, kernels, monkeypatch, four_cores):
    """A fused step gives the same weights and states as single steps, with and without compiled kernels."""
    monkeypatch.setenv("WEFTPLAN_KERNELS", kernels)
    alone, states = weights_and_states(name, settings, fused=False)
    names = record_fused_updates(monkeypatch)
    both, all_states = weights_and_states(name, settings, fused=True)
    assert len(names) == 3
    for a, b in zip(alone, both, strict=True):
        np.testing.assert_array_equal(a, b)
    assert states == all_states


def test_weights_of_each_dtype_are_an_operation(monkeypatch):
    """Weights of each dtype are updated by one operation, float16 weights through a float32 copy."""
    names = record_fused_updates(monkeypatch)
    optimizer = mx.optimizer.create("sgd", learning_rate=0.1, multi_precision=True)
    kinds = ("float32", "float64", "float16", "float16", "float64")
    weights = [mx.nd.array(a, dtype=kind) for a, kind in zip(random_arrays(), kinds, strict=True)]
    grads = [mx.nd.array(a, dtype=kind) for a, kind in zip(random_arrays(seed=1), kinds, strict=True)]
    wanted = [w.asnumpy() - 0.1 * g.asnumpy() for w, g in zip(weights, grads, strict=True)]
    mx.optimizer.get_updater(optimizer)(list(range(5)), grads, weights)
    for a, b in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(a.asnumpy(), b, rtol=2e-3, atol=1e-3)
    assert names.count("sgd_update") == 3


def test_an_update_of_a_user_is_called_for_each_weight():
    """An overridden ``update`` is called for each weight in order."""
    seen = []

    class Clipped(mx.optimizer.SGD):
        def update(self, index, weight, grad, state):
            super().update(index, weight, grad, state)
            seen.append(index)
            weight[:] = mx.nd.clip(weight, 0, 1)

    weights = random_arrays()
    mx.optimizer.get_updater(Clipped(learning_rate=0.1))([0, 1, 2, 3, 4], random_arrays(seed=1), weights)
    assert seen == [0, 1, 2, 3, 4]
    assert all(weight.asnumpy().min() >= 0 for weight in weights)


def test_a_weight_that_comes_twice_is_updated_twice():
    """If a weight occurs twice in a call, the second step uses the result of the first."""
    weight, grad = mx.nd.ones((4,)), mx.nd.ones((4,))
    mx.optimizer.get_updater(mx.optimizer.SGD(learning_rate=0.25))([0, 1], [grad, grad], [weight, weight])
    np.testing.assert_array_equal(weight.asnumpy(), np.full(4, 0.5, np.float32))


def test_a_module_pushes_one_operation_a_step(monkeypatch):
    """A Module without a store updates all its parameters in one operation."""
    data = mx.sym.Variable("data")
    net = mx.sym.FullyConnected(
        mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=8), act_type="relu"), num_hidden=3
    )
    module = mx.mod.Module(mx.sym.SoftmaxOutput(net, name="softmax"))
    module.bind([("data", (4, 5))], [("softmax_label", (4,))])
    module.init_params(mx.init.Xavier())
    module.init_optimizer(None, "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    batch = mx.io.DataBatch([mx.nd.ones((4, 5))], [mx.nd.zeros((4,))])
    module.forward_backward(batch)
    module.update()
    names = record_fused_updates(monkeypatch)
    before = {name: value.asnumpy() for name, value in module.get_params()[0].items()}
    module.forward_backward(batch)
    module.update()
    assert names == ["sgd_mom_update"]
    assert all(
        (before[name] != value.asnumpy()).any() for name, value in module.get_params()[0].items() if "bias" in name
    )


def test_pieces_cover_every_element_once():
    """The pieces of all threads cover each element once; cuts inside a weight are at multiples of ``BORDER``."""
    for sizes in ([1, 2, 3], [1000], [64, 63, 65, 640], [7] * 50):
        ends = list(np.cumsum(sizes).tolist())
        pieces = fused_update._pieces(ends, 128)
        for which, size in enumerate(sizes):
            own = [piece[1:] for part in pieces for piece in part if piece[0] == which]
            assert own[0][0] == 0
            assert own[-1][1] == size
            assert all(a[1] == b[0] and b[0] % fused_update.BORDER == 0 for a, b in itertools.pairwise(own))


@pytest.mark.parametrize("reason", ["debug", "memory"])
def test_steps_that_are_not_fused(reason, monkeypatch):
    """In debug mode, or if arrays may be spilled, steps are not fused and give the same bits."""
    names = record_fused_updates(monkeypatch)
    if reason == "debug":
        monkeypatch.setattr(engine, "debug_enabled", lambda: True)
    else:
        monkeypatch.setattr(MAKE_ROOM, "value", lambda context, operands: ())
    alone, _ = weights_and_states("sgd", {"momentum": 0.9}, fused=False, count=1)
    both, _ = weights_and_states("sgd", {"momentum": 0.9}, fused=True, count=1)
    assert names == []
    for a, b in zip(alone, both, strict=True):
        np.testing.assert_array_equal(a, b)


def test_formula_made_once():
    """Adam's formula is made once per choice of its parameters, although its rate differs at each step."""
    kernel = registry.get("adam_update").forward
    before = len(kernel._computations)
    weights_and_states("adam", {"wd": 0.0625, "beta1": 0.875}, fused=True, count=4)
    assert len(kernel._computations) - before <= 2


def test_constants_follow_the_parameters():
    """A formula computes its constants again for each set of parameters."""
    for rate, expected in ((0.25, 0.875), (0.5, 0.75)):
        params = {"lr": rate, "wd": 0.5, "rescale_grad": 1.0, "clip_gradient": -1.0}
        formula = fused_update.formula_of("sgd_update", params, 2, np.dtype("float32"))
        assert formula is not None
        assert expected in formula.constants
