"""``symbol.plan`` and ``simple_bind(memory_budget=)``: they compute bytes without allocating, and meet budgets."""

from __future__ import annotations

import builtins
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan import models, storage
from weftplan.errors import BudgetError, FormatError, MXNetError, PlanError, ShapeError
from weftplan.planner import MemoryPlan, PlanOptions, plan_symbol, strategies, validate
from weftplan.training.optimizers import sgd_adam


def _network(name: str = "lenet", batch: int = 4) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Return a built-in network and the shapes of its inputs."""
    return models.get(name), models.input_shapes(name, batch)


def _chain(depth: int = 4) -> Any:
    """Return wide layers in sequence, whose results are worth recomputing."""
    net = mx.sym.Variable("data")
    for i in range(depth):
        net = mx.sym.FullyConnected(net, num_hidden=64, name=f"fc{i}")
        net = mx.sym.Activation(net, act_type="tanh", name=f"act{i}")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def test_planning_allocates_nothing() -> None:
    """Planning a network of more than 2 GB allocates nothing."""
    before = storage.get(mx.cpu()).statistics()
    plan = models.get("resnet50").plan(models.input_shapes("resnet50"))
    after = storage.get(mx.cpu()).statistics()
    assert plan.peak > 2_000_000_000
    assert after == before


def test_a_training_plan_needs_more_than_an_inference_plan() -> None:
    """With ``train=False`` a plan has no gradients and a smaller peak, and all its steps are forward steps."""
    net, shapes = _network()
    train, infer = net.plan(shapes), net.plan(shapes, train=False)
    assert train.peak > infer.peak
    assert infer.external_bytes["gradients"] == 0
    assert train.external_bytes["gradients"] > 0
    assert train.num_forward is not None
    assert train.num_forward < len(train.labels.steps)
    assert infer.num_forward == len(infer.labels.steps)


def test_total_is_the_memory_of_an_executor() -> None:
    """The plan's peak is the pool of an executor, and its total also counts arguments, gradients and states."""
    net, shapes = _network("resnet", 2)
    plan = net.plan(shapes, grad_req="write")
    executor = net.simple_bind(mx.cpu(), **shapes)
    arrays = [*executor.arg_arrays, *executor.grad_arrays, *executor.aux_arrays]
    held = sum(a.size * np.dtype(a.dtype).itemsize for a in arrays if a is not None)
    assert plan.peak == executor.allocated_bytes
    assert plan.total == held + executor.allocated_bytes + plan.external_bytes["head_grads"]


def test_optimizer_states_are_counted_for_parameters_only() -> None:
    """The plan counts the states of an optimizer for each parameter, but not for inputs.

    ``optimizer`` is an optimizer or a number of arrays; other values raise an error.
    """
    net, shapes = _network("mlp")
    plain = net.plan(shapes)
    args, _, _ = net.infer_shape(**shapes)
    names = net.list_arguments()
    parameters = sum(4 * int(np.prod(s)) for n, s in zip(names, args, strict=True) if n not in shapes)
    for kept, arrays in ((1, 1), (2, 2), (sgd_adam.create("sgd", momentum=0.9), 1), (sgd_adam.create("adam"), 2)):
        plan = net.plan(shapes, optimizer=kept)
        assert plan.external_bytes["optimizer_states"] == arrays * parameters
        assert plan.total == plain.total + arrays * parameters
        assert "optimizer states" not in plan.left_out
    assert "optimizer states" in plain.left_out
    for bad in (-1, True, object()):
        with pytest.raises(PlanError, match="optimizer must be a name, an optimizer or a number of arrays"):
            net.plan(shapes, optimizer=bad)


def test_one_dtype_for_everything() -> None:
    """With ``dtype="float16"`` arguments take half the bytes, and the peak is about half."""
    net, shapes = _network("mlp")
    shapes = {"data": shapes["data"]}
    single, half = (net.plan(shapes, dtype=d, workspaces=False) for d in (None, "float16"))
    assert half.external_bytes["arguments"] * 2 == single.external_bytes["arguments"]
    assert half.peak < 0.51 * single.peak


def test_workspaces_can_be_left_out() -> None:
    """With ``workspaces=False`` scratch memory counts nothing, and the plan lists it as left out."""
    net, shapes = _network()
    with_scratch, without = net.plan(shapes), net.plan(shapes, workspaces=False)
    assert without.peak < with_scratch.peak
    assert not without.workspace_nbytes.any()
    assert "scratch memory of operators" in without.left_out


def test_gradients_of_parameters_only() -> None:
    """With gradients of parameters only, the peak of an LSTM is at most 1 % above the peak with all gradients."""
    net, shapes = _network("lstm", 2)
    requests = {name: "null" if name in shapes else "write" for name in net.list_arguments()}
    assert net.plan(shapes, grad_req=requests).peak < net.plan(shapes).peak * 1.01


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7, 1.0])
def test_a_budget_is_kept(fraction: float) -> None:
    """For budgets from the smallest possible to the plain total, plans are valid and within the budget."""
    net, shapes = _chain(), {"data": (512, 64)}
    plain = net.plan(shapes)
    with pytest.raises(BudgetError) as refused:
        net.plan(shapes, budget=1)
    smallest = refused.value.smallest
    assert smallest is not None
    assert smallest < plain.total
    assert f"smallest budget found that works is {smallest} (" in str(refused.value)
    budget = smallest + int((plain.total - smallest) * fraction)
    plan = net.plan(shapes, budget=budget)
    assert plan.total <= budget
    validate(plan)
    assert bool(plan.notes) == (fraction < 1.0)


def test_a_budget_counts_optimizer_states() -> None:
    """The smallest possible budget includes the states of the optimizer."""
    net, shapes = _chain(), {"data": (512, 64)}
    with pytest.raises(BudgetError) as plain:
        net.plan(shapes, budget=1)
    with pytest.raises(BudgetError) as adam:
        net.plan(shapes, budget=1, optimizer=2)
    states = net.plan(shapes, optimizer=2).external_bytes["optimizer_states"]
    assert adam.value.smallest == plain.value.smallest + states
    assert net.plan(shapes, budget=adam.value.smallest, optimizer=2).total == adam.value.smallest


def test_a_budget_of_parameters_and_one_operator_less() -> None:
    """A budget of the bytes of the arguments alone raises an error with the bytes that are needed."""
    net, shapes = _network("mlp")
    arguments = net.plan(shapes).external_bytes["arguments"]
    with pytest.raises(BudgetError, match=f"the budget is {arguments:,} bytes, but .* of arguments, gradients"):
        net.plan(shapes, budget=arguments)


def test_budget_of_a_single_variable() -> None:
    """A network of one variable has no planned memory, but its array and its gradients count against a budget."""
    x = mx.sym.Variable("x")
    total = x.plan({"x": (3, 4)}).total
    assert x.plan({"x": (3, 4)}).peak == 0
    assert x.plan({"x": (3, 4)}, budget=total).total == total
    with pytest.raises(BudgetError) as refused:
        x.plan({"x": (3, 4)}, budget=total - 1)
    assert refused.value.smallest == total


def test_a_bound_executor_keeps_the_budget() -> None:
    """``simple_bind`` with the smallest budget allocates the planned bytes; gradients are as without a budget."""
    net, shapes = _chain(), {"data": (128, 64)}
    with pytest.raises(BudgetError) as refused:
        net.simple_bind(mx.cpu(), memory_budget="10KB", **shapes)
    small = net.simple_bind(mx.cpu(), memory_budget=refused.value.smallest, **shapes)
    plain = net.simple_bind(mx.cpu(), **shapes)
    assert small.allocated_bytes == small.memory_plan.peak < plain.memory_plan.peak
    assert small.memory_plan.total == refused.value.smallest
    rng = np.random.default_rng(0)
    for name in small.arg_dict:
        value = rng.standard_normal(small.arg_dict[name].shape).astype("float32")
        small.arg_dict[name][:] = value
        plain.arg_dict[name][:] = value
    for executor in (small, plain):
        executor.forward(is_train=True)
        executor.backward()
    for name, grad in small.grad_dict.items():
        assert np.array_equal(grad.asnumpy(), plain.grad_dict[name].asnumpy()), name


def test_a_refused_budget_allocates_nothing() -> None:
    """``simple_bind`` with an impossible budget allocates nothing before it raises an error."""
    net, shapes = _network()
    before = storage.get(mx.cpu()).statistics()
    with pytest.raises(BudgetError):
        net.simple_bind(mx.cpu(), memory_budget=1000, **shapes)
    assert storage.get(mx.cpu()).statistics() == before


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        ({"order": "random"}, PlanError, "order must be one of given, best; got 'random'"),
        ({"strategy": "magic"}, PlanError, "strategy must be one of"),
        ({"recompute": "all"}, PlanError, "recompute must be one of"),
        ({"budget": "2 elephants"}, PlanError, "expected a number of bytes such as 2GB"),
        ({"budget": 0}, PlanError, "expected a positive number of bytes"),
        ({"strateggy": "auto"}, PlanError, "no argument 'strateggy'; did you mean 'strategy'"),
    ],
)
def test_bad_options(named: dict[str, Any], error: type[Exception], message: str) -> None:
    """An invalid option raises an error that names it and the legal values."""
    net, shapes = _network("mlp")
    with pytest.raises(error, match=message):
        net.plan(shapes, **named)


@pytest.mark.parametrize(
    ("shapes", "error", "message"),
    [
        ({}, ShapeError, r"shape of argument 'data' is unknown and cannot be inferred; operator FullyConnected"),
        ({"data": (0, 784)}, ShapeError, r"'data' is \(\?, 784\) and cannot be inferred; operator FullyConnected"),
        ({"data": (-4, 784)}, ShapeError, r"'data' is \(-4, 784\): dimensions must be positive"),
        ({"data": "4,784"}, ShapeError, "must be a tuple of integers"),
        ({"dota": (4, 784)}, PlanError, "'dota', which is no argument of the symbol; did you mean 'data'"),
        ({"data": (1 << 61, 784)}, ShapeError, r"more than 2\^63 - 1"),
        ({"data": (4, 784), "fc1_weight": (128, 700)}, ShapeError, "operator FullyConnected"),
    ],
)
def test_bad_shapes(shapes: Any, error: type[Exception], message: str) -> None:
    """Unknown, zero, negative, malformed, misnamed, too large and contradictory shapes raise errors."""
    with pytest.raises(error, match=message):
        models.get("mlp").plan(shapes)


def test_more_than_two_to_the_31_elements() -> None:
    """The plan of 2^33 floats counts 2^35 bytes."""
    plan = mx.sym.exp(mx.sym.Variable("x")).plan({"x": (1 << 33,)}, train=False)
    assert plan.peak == 1 << 35


def test_a_cyclic_graph_is_refused() -> None:
    """Loading or planning a file with a cycle of nodes raises a FormatError."""
    net = mx.sym.exp(mx.sym.tanh(mx.sym.Variable("x"), name="a"), name="b")
    document = json.loads(net.tojson())
    first = next(node for node in document["nodes"] if node["name"] == "a")
    last = next(k for k, node in enumerate(document["nodes"]) if node["name"] == "b")
    first["inputs"] = [[last, 0, 0]]
    with pytest.raises(FormatError):
        mx.sym.load_json(json.dumps(document)).plan({"x": (2,)})


def test_reports_from_the_plan_alone() -> None:
    """A plan that was written to JSON and read again has the same summary, HTML page and notes."""
    net, shapes = _chain(), {"data": (512, 64)}
    plan = net.plan(shapes, recompute="sqrt")
    back = MemoryPlan.from_json(plan.to_json())
    assert back.summary() == plan.summary()
    assert back.to_html() == replace(plan, pass_seconds={}).to_html()
    assert back.notes == plan.notes != ()
    assert f"note: {plan.notes[0]}" in plan.summary()
    assert plan._repr_html_().startswith("<iframe srcdoc=")
    assert "&#x27;" in plan._repr_html_()


def test_a_plan_cannot_be_changed() -> None:
    """Fields and arrays of a plan are read-only."""
    net, shapes = _network("mlp")
    plan = net.plan(shapes)
    with pytest.raises(AttributeError):
        plan.lower_bound = 0
    with pytest.raises(ValueError, match="read-only"):
        plan.entry_first[0] = 1


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib, ``plot`` raises an error that names the extra to install."""
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    net, shapes = _network("mlp")
    plan = net.plan(shapes)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MXNetError, match=r"pip install 'weftplan\[plot\]'"):
        plan.plot()


def test_no_packing_that_cannot_be_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are packed only once if no smaller packing is possible, although the peak is above the bound."""
    net, weight = mx.sym.Variable("data"), mx.sym.Variable("weight")
    for k in range(10):  # a sum of ten terms
        net = mx.sym.tanh(mx.sym.FullyConnected(net, weight=weight, no_bias=True, num_hidden=3, name=f"fc{k}"))
    packed = []
    arena = strategies.arena

    def counted(*args: Any, **named: Any) -> MemoryPlan:
        packed.append(arena(*args, **named))
        return packed[-1]

    monkeypatch.setattr(strategies, "arena", counted)
    plan = plan_symbol(mx.sym.MakeLoss(net), {"data": (5, 3)}, grad_req="write").memory
    assert [plan.peak] == [one.peak for one in packed]
    assert plan.peak > plan.lower_bound


def test_options_that_change_nothing() -> None:
    """``replace`` with equal values returns the same options, but refuses values of another type."""
    options = PlanOptions(match_range=1)
    assert options.replace(match_range=1, budget=None) is options
    with pytest.raises(PlanError, match="match_range must be an integer"):
        options.replace(match_range=True)
    with pytest.raises(PlanError, match="unknown plan option"):
        options.replace(targets=options.targets)
