"""Budgets that are met by offloading as well as by recomputation, and switches that disable offloading."""

from __future__ import annotations

import re
from typing import Any

import pytest

import weftplan as mx
from weftplan import models
from weftplan.device.offload_targets import Link
from weftplan.errors import BudgetError
from weftplan.planner import PlanOptions, plan_symbol, validate

SHARES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)


def resnet() -> tuple[Any, dict[str, Any]]:
    """Return ResNet-18 for pictures of 32 x 32, and its input shapes."""
    return models.get("resnet18", num_classes=10, image_shape=(3, 32, 32)), {"data": (4, 3, 32, 32)}


def three_layers() -> tuple[Any, dict[str, Any]]:
    """Return a residual network that is small enough to search for its smallest budget, and its input shapes."""
    x = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=8, kernel=(3, 3), pad=(1, 1), name="stem")
    for k in range(3):
        y = mx.sym.Convolution(x, num_filter=8, kernel=(3, 3), pad=(1, 1), name=f"conv{k}")
        x = x + mx.sym.relu(mx.sym.BatchNorm(y, name=f"norm{k}"), name=f"relu{k}")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=10, name="last"), name="softmax"), {
        "data": (16, 3, 32, 32)
    }


def planned(share: float, context: mx.Context, network: Any = resnet, **options: Any) -> Any:
    """Plan a network with a budget of ``share`` of its peak without a budget."""
    net, shapes = network()
    requests = {n: "null" if n in ("data", "softmax_label") else "write" for n in net.list_arguments()}
    plain = plan_symbol(net, shapes, grad_req=requests, context=context)
    chosen = PlanOptions(budget=int(plain.memory.peak * share), **options)
    return plan_symbol(net, shapes, grad_req=requests, context=context, options=chosen)


def budget_bytes(plan: Any) -> int:
    """Return the bytes of a plan that count against its budget: the peak without the host."""
    return int(plan.peak - plan.on_host)


def percent_more_time(plan: Any) -> float:
    """Return the percent of modelled time that the plan's note states, or 0 without a note."""
    match = re.search(r"for ([0-9.]+) % more modelled time", " ".join(plan.notes))
    return float(match.group(1)) if match else 0.0


@pytest.mark.parametrize("bandwidth", [1.2e10, 3e8])
def test_budgets_hold_and_are_monotone(monkeypatch: pytest.MonkeyPatch, bandwidth: float) -> None:
    """From large to small budgets each plan is valid and within its budget, its bytes fall, and its time rises."""
    monkeypatch.setattr("weftplan.planner.spill.search.PCIE", Link(bandwidth=bandwidth))
    before = None
    for share in SHARES:
        try:
            plan = planned(share, mx.sim(0))
        except BudgetError:
            break
        validate(plan)
        assert budget_bytes(plan.memory) <= plan.memory.options.budget
        if before is not None:
            assert budget_bytes(plan.memory) <= budget_bytes(before)
            assert percent_more_time(plan.memory) >= percent_more_time(before)
        before = plan.memory
    assert before is not None
    # Over the slow link copies take longer than repetitions, which reach the smallest budget, too.
    assert (before.on_host > 0) == (bandwidth > 1e9)


@pytest.fixture
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a link that is fast enough to hide copies within kernels of a few microseconds."""
    monkeypatch.setattr("weftplan.planner.spill.search.PCIE", Link(bandwidth=1e15, latency=0.0))


@pytest.mark.usefixtures("fast_link")
def test_hidden_copies_are_free() -> None:
    """On a fast link no node is repeated and no time added; a smaller budget offloads more bytes."""
    large, small = planned(0.9, mx.sim(0)), planned(0.6, mx.sim(0))
    for plan in (large, small):
        assert percent_more_time(plan.memory) == 0.0
        assert not any(node.mirror_of is not None for node in plan.graph.nodes)
    assert 0 < large.memory.on_host < small.memory.on_host


def test_it_reaches_the_budgets_that_repetition_reaches() -> None:
    """With offloading, the smallest possible budget is not larger than with recomputation alone."""
    with pytest.raises(BudgetError) as refused:
        planned(0.01, mx.sim(0), three_layers, spill=False)
    assert refused.value.smallest is not None
    with pytest.raises(BudgetError) as further:
        planned(0.01, mx.sim(0), three_layers)
    assert further.value.smallest is not None
    assert further.value.smallest <= refused.value.smallest
    full = planned(1.0, mx.sim(0), three_layers).memory.peak
    plan = planned((further.value.smallest + 1) / full, mx.sim(0), three_layers).memory
    assert budget_bytes(plan) <= further.value.smallest + 1


@pytest.mark.usefixtures("fast_link")
def test_switches_switch_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option ``spill=False``, ``WEFTPLAN_SPILL=0`` and a host context each disable offloading."""
    assert planned(0.8, mx.sim(0), three_layers).memory.on_host > 0
    assert planned(0.8, mx.sim(0), three_layers, spill=False).memory.on_host == 0
    assert planned(0.8, mx.cpu(), three_layers).memory.on_host == 0
    monkeypatch.setenv("WEFTPLAN_SPILL", "0")
    assert not PlanOptions.from_environment().spill


def test_plans_are_reproducible() -> None:
    """Planning the same network twice gives the same plan."""
    first, second = planned(0.75, mx.gpu(0)), planned(0.75, mx.gpu(0))
    assert first.memory.to_json().replace("softmax", "") == second.memory.to_json().replace("softmax", "")
