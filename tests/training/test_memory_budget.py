"""Memory budgets for training: a Module allocates exactly the planned bytes and stays within its budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan import models
from weftplan.errors import BindError, BudgetError, PlanError
from weftplan.planner.symbolic.estimate import OPTIONS, plan
from weftplan.training.memory import besides_executors

BATCH = 9
SHAPES = {"data": (BATCH, 1, 8, 8), "softmax_label": (BATCH,)}


def one_batch() -> mx.io.NDArrayIter:
    """Return an iterator over one batch."""
    rng = np.random.default_rng(0)
    return mx.io.NDArrayIter(rng.random(SHAPES["data"], dtype=np.float32), rng.integers(0, 10, BATCH), BATCH)


def state_arrays(state: Any) -> list[mx.nd.NDArray]:
    """Return the arrays of an optimizer state, which may be nested tuples."""
    if isinstance(state, tuple):
        return [array for part in state for array in state_arrays(part)]
    return [] if state is None else [state]


def allocated_bytes(module: Any) -> int:
    """Return the bytes of all arrays, store buffers and executor memory of a trained Module."""
    executors = module.group.executors
    arrays = [a for e in executors for a in (*e.arg_arrays, *e.grad_arrays, *e.aux_arrays) if a is not None]
    arrays += [*module._arg_params.values(), *module._aux_params.values()]
    states = module._states_holder().states.values()
    arrays += [a for s in states for a in state_arrays(s)]
    store = 0 if module._kvstore is None else sum(v for k, v in module._kvstore.statistics().items() if k != "keys")
    return sum(a.nbytes for a in arrays) + store + sum(e.allocated_bytes for e in executors)


@pytest.mark.parametrize("on_store", ["1", "0"])
@pytest.mark.parametrize("kvstore", ["local", "device"])
@pytest.mark.parametrize("devices", ["cpu", "cpu cpu", "sim", "sim sim sim", "cpu sim sim"])
def test_the_plan_of_a_module_is_what_it_holds(
    devices: str, kvstore: str, on_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's total equals the bytes of executors, host copies, store buffers and optimizer states."""
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", on_store)
    contexts = [mx.Context(kind, i) for i, kind in enumerate(devices.split())]
    net = models.digits("lenet")
    module = mx.mod.Module(net, context=contexts)
    module.fit(one_batch(), num_epoch=1, kvstore=kvstore, optimizer="adam")
    actual = net.plan(SHAPES, context=contexts, kvstore=kvstore, optimizer="adam")
    assert actual.total == allocated_bytes(module)
    assert planned_store_bytes(actual) == ({} if module._kvstore is None else counted_store_bytes(module._kvstore))
    assert actual.peak == module.group.executors[-1].allocated_bytes
    assert actual.total == actual.peak + sum(actual.external_bytes.values())


def planned_store_bytes(found: Any) -> dict[str, int]:
    """Return the bytes of the store's buffers in a plan, by name."""
    return {name.removeprefix("kvstore_"): n for name, n in found.external_bytes.items() if name.startswith("kvstore_")}


def counted_store_bytes(store: Any) -> dict[str, int]:
    """Return the bytes of the store's buffers from its statistics, by name without ``_bytes``."""
    return {name.removesuffix("_bytes"): n for name, n in store.statistics().items() if name != "keys" and n}


@pytest.mark.parametrize("kind", ["1bit", "2bit"])
@pytest.mark.parametrize("devices", ["cpu cpu", "sim sim sim", "sim cpu"])
def test_buffers_of_compression_are_planned(devices: str, kind: str) -> None:
    """The plan includes the store's residuals and compressed gradients exactly."""
    contexts = [mx.Context(name, i) for i, name in enumerate(devices.split())]
    net, store = models.digits("mlp"), mx.kv.create("device")
    store.set_gradient_compression({"type": kind})
    planned = net.plan(SHAPES, context=contexts, kvstore=store)
    module = mx.mod.Module(net, context=contexts)
    module.fit(one_batch(), num_epoch=1, kvstore=store)
    assert planned_store_bytes(planned) == counted_store_bytes(store)
    assert planned.total == allocated_bytes(module)


@pytest.mark.parametrize("name", ["sgd", "adam", "dcasgd", "lamb", "test"])
@pytest.mark.parametrize("devices", ["cpu", "sim sim"])
def test_copies_of_weights_in_float32_are_planned(devices: str, name: str) -> None:
    """With ``multi_precision`` the plan includes the float32 copy of each float16 weight."""
    contexts = [mx.Context(kind, i) for i, kind in enumerate(devices.split())]
    net = mx.sym.Cast(mx.sym.Variable("data"), dtype="float16")
    net = mx.sym.FullyConnected(mx.sym.FullyConnected(net, num_hidden=7), num_hidden=5, no_bias=True)
    net = mx.sym.SoftmaxOutput(mx.sym.Cast(net, dtype="float32"), name="softmax")
    optimizer = mx.optimizer.create(name, multi_precision=True)
    shapes = {"data": (4, 6), "softmax_label": (4,)}
    planned = net.plan(shapes, context=contexts, kvstore="device", optimizer=optimizer)
    module = mx.mod.Module(net, context=contexts)
    module.fit(
        mx.io.NDArrayIter(np.ones((4, 6), "f4"), np.zeros(4), 4), kvstore="device", optimizer=optimizer, num_epoch=1
    )
    assert planned.total == allocated_bytes(module)
    half, wide = np.dtype("float16"), np.dtype("float32")
    assert optimizer.kept_bytes((7, 6), half) == optimizer.kept_bytes((7, 6), wide) + 7 * 6 * 4


@pytest.mark.parametrize("devices", ["cpu", "cpu cpu", "sim sim"])
@pytest.mark.parametrize("way", ["fit", "Module"])
def test_a_budget_is_kept(devices: str, way: str) -> None:
    """Training under a budget stays within it and gives the same bits as without."""
    contexts = [mx.Context(kind, i) for i, kind in enumerate(devices.split())]
    net = models.digits("resnet")
    plain = net.plan(SHAPES, context=contexts, optimizer="adam")
    budget = plain.counted - plain.peak // 8
    weights = []
    for limit in (None, budget):
        mx.random.seed(1)
        settings = {"memory_budget": limit} if way == "Module" else {}
        module = mx.mod.Module(net, context=contexts, **settings)
        more = {"memory_budget": limit} if way == "fit" else {}
        module.fit(one_batch(), num_epoch=2, optimizer="adam", **more)
        weights.append({name: array.asnumpy() for name, array in module.get_params()[0].items()})
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
    planned = net.plan(SHAPES, context=contexts, optimizer="adam", budget=budget)
    assert planned.counted <= budget < plain.counted
    assert planned.peak == module.group.executors[-1].allocated_bytes
    if devices.startswith("cpu"):
        assert allocated_bytes(module) <= budget


def test_the_smallest_budget_works() -> None:
    """Training with the smallest budget that the error names works; one byte less raises."""
    net = models.digits("resnet")
    with pytest.raises(BudgetError, match="buffers of the kvstore and states of the optimizer") as refused:
        mx.mod.Module(net, memory_budget="1 MB").fit(one_batch(), num_epoch=1, optimizer="adam")
    smallest = refused.value.smallest
    assert smallest is not None
    with pytest.raises(BudgetError):
        mx.mod.Module(net).fit(one_batch(), num_epoch=1, optimizer="adam", memory_budget=smallest - 1)
    module = mx.mod.Module(net)
    module.fit(one_batch(), num_epoch=1, optimizer="adam", memory_budget=smallest)
    assert allocated_bytes(module) <= smallest


def test_an_optimizer_that_does_not_fit_any_more() -> None:
    """If the module was bound without an optimizer, and its states do not fit the budget, init_optimizer raises."""
    net = models.digits("lenet")
    budget = net.plan(SHAPES, context=[mx.cpu(0)]).total
    module = mx.mod.Module(net, memory_budget=budget)
    module.bind([("data", SHAPES["data"])], [("softmax_label", SHAPES["softmax_label"])])
    module.init_params()
    with pytest.raises(BudgetError, match=r"leaves it .* beside Adam"):
        module.init_optimizer(optimizer="adam")
    module.init_optimizer(optimizer="sgd")


def test_a_bound_module_says_how_a_budget_can_act() -> None:
    """A budget for a bound module raises unless ``force_rebind=True``."""
    module = mx.mod.Module(models.digits("mlp"))
    module.fit(one_batch(), num_epoch=1)
    with pytest.raises(BindError, match="force_rebind=True"):
        module.fit(one_batch(), num_epoch=1, memory_budget="1GB")
    module.fit(one_batch(), num_epoch=1, memory_budget="1GB", force_rebind=True)
    assert module.memory_budget == "1GB"


def test_buckets_keep_the_budget() -> None:
    """BucketingModule applies the budget to each bucket."""
    module = mx.mod.BucketingModule(lambda key: (models.digits("mlp"), ("data",), ("softmax_label",)), 10)
    with pytest.raises(BudgetError):
        module.fit(one_batch(), num_epoch=1, memory_budget=1000)


def test_the_largest_batch_in_python() -> None:
    """``batch_max`` returns the largest batch that fits; a plan without its network raises."""
    net = models.get("mlp")
    actual = net.plan(data=(32, 784))
    batch = actual.batch_max("4 MB")
    assert net.plan(data=(batch, 784)).total <= 4_000_000 < net.plan(data=(batch + 1, 784)).total
    assert actual.batch_max("4 MB", recompute=True) >= batch
    with pytest.raises(PlanError, match="this one has no network"):
        type(actual).from_json(actual.to_json()).batch_max("4 MB")


def test_misspelt_options_are_errors() -> None:
    """A misspelt or repeated option of ``plan`` and ``simple_bind`` raises; the error suggests the right name."""
    net = models.get("mlp")
    for name, right in (("dtypes", "dtype"), ("memory_budget", "budget"), ("optimiser", "optimizer")):
        with pytest.raises(PlanError, match=f"did you mean '{right}'"):
            net.plan(data=(2, 784), **{name: "x"})
    for name, right in (("budgt", "budget"), ("option", "options")):
        with pytest.raises(BindError, match=f"did you mean '{right}'"):
            net.simple_bind(mx.cpu(), data=(2, 784), **{name: "500MB"})
    with pytest.raises(BindError, match="two names of one option"):
        net.simple_bind(mx.cpu(), data=(2, 784), budget="1GB", memory_budget="1GB")
    with pytest.raises(PlanError, match="given twice"):
        net.plan({"data": (2, 784)}, data=(2, 784))


def test_the_list_of_options_is_the_signature() -> None:
    """``OPTIONS`` lists exactly the keyword-only parameters of ``plan``."""
    import inspect

    parameters = inspect.signature(plan).parameters.values()
    assert tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY) == OPTIONS


def test_one_vocabulary() -> None:
    """``budget`` and ``dtype`` mean the same for ``plan`` and ``simple_bind``."""
    net = models.digits("resnet")
    shapes = {"data": (64, 1, 8, 8)}
    plain = net.plan(shapes, grad_req="write")
    budget = plain.total - plain.peak // 8
    planned = net.plan(shapes, grad_req="write", budget=budget)
    executor = net.simple_bind(mx.cpu(), budget=budget, **shapes)
    assert executor.allocated_bytes == planned.peak < plain.peak
    half = models.get("mlp").simple_bind(mx.cpu(), dtype="float16", data=(2, 784))
    assert half.arg_dict["fc1_weight"].dtype == np.float16


def test_how_a_plan_shows_itself() -> None:
    """``repr`` of a plan is one line; ``str`` is its summary."""
    actual = models.get("mlp").plan(data=(2, 784))
    assert repr(actual).startswith("<MemoryPlan 863.")
    assert "\n" not in repr(actual)
    assert str(actual) == actual.summary()


def test_limit_of_a_device_that_sums() -> None:
    """A device has at most the average of the store's buffers and states, and the largest parameter, but not above all.

    Of two devices each parameter has a stored, a merged and a staged copy, and the states of its optimizer.
    """
    devices = [mx.sim(0), mx.sim(1)]
    sizes = {f"w{k}": (100 * k, 400 * k, 800 * k) for k in (1, 2, 3, 4)}
    total, largest = 3 * 4000 + 8000, 3 * 1600 + 3200
    for store in ("device", "dist_device_sync"):
        memory = besides_executors(sizes, 4000, contexts=devices, kvstore=store, workers=2)
        assert memory.each_device == total // 2 + largest
        alone = besides_executors({"w": sizes["w1"]}, 400, contexts=devices, kvstore=store, workers=2)
        assert alone.each_device == 3 * 400 + 800
    assert besides_executors(sizes, 4000, contexts=[mx.cpu(0), mx.cpu(1)], kvstore="device").each_device == 0
