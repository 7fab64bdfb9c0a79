"""Budgets with a third choice: they hold, they are monotone, and switching it off switches it off."""

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
    """ResNet-18 on small pictures."""
    return models.get("resnet18", num_classes=10, image_shape=(3, 32, 32)), {"data": (4, 3, 32, 32)}


def three_layers() -> tuple[Any, dict[str, Any]]:
    """Return a residual chain, small enough to search it for the smallest budget of all."""
    x = mx.sym.Convolution(mx.sym.Variable("data"), num_filter=8, kernel=(3, 3), pad=(1, 1), name="stem")
    for k in range(3):
        y = mx.sym.Convolution(x, num_filter=8, kernel=(3, 3), pad=(1, 1), name=f"conv{k}")
        x = x + mx.sym.relu(mx.sym.BatchNorm(y, name=f"norm{k}"), name=f"relu{k}")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=10, name="last"), name="softmax"), {
        "data": (16, 3, 32, 32)
    }


def planned(share: float, context: mx.Context, network: Any = resnet, **options: Any) -> Any:
    """Return a network under a budget of ``share`` of its plain plan."""
    net, shapes = network()
    requests = {n: "null" if n in ("data", "softmax_label") else "write" for n in net.list_arguments()}
    plain = plan_symbol(net, shapes, grad_req=requests, context=context)
    chosen = PlanOptions(budget=int(plain.memory.peak * share), **options)
    return plan_symbol(net, shapes, grad_req=requests, context=context, options=chosen)


def near(plan: Any) -> int:
    """Return the bytes that count against a budget."""
    return int(plan.peak - plan.on_host)


def cost(plan: Any) -> float:
    """Percent of modelled time that the note speaks of (0 where nothing had to be decided)."""
    match = re.search(r"for ([0-9.]+) % more modelled time", " ".join(plan.notes))
    return float(match.group(1)) if match else 0.0


@pytest.mark.parametrize("bandwidth", [1.2e10, 3e8])
def test_budgets_hold_and_are_monotone(monkeypatch: pytest.MonkeyPatch, bandwidth: float) -> None:
    """From large to small budgets: never above, bytes fall and time rises, and every plan is valid."""
    monkeypatch.setattr("weftplan.planner.spill.search.PCIE", Link(bandwidth=bandwidth))
    before = None
    for share in SHARES:
        try:
            plan = planned(share, mx.sim(0))
        except BudgetError:
            break
        validate(plan)
        assert near(plan.memory) <= plan.memory.options.budget
        if before is not None:
            assert near(plan.memory) <= near(before)
            assert cost(plan.memory) >= cost(before)
        before = plan.memory
    assert before is not None
    assert before.on_host > 0


@pytest.fixture
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a link so fast that copies hide within the few microseconds of these small networks' kernels."""
    monkeypatch.setattr("weftplan.planner.spill.search.PCIE", Link(bandwidth=1e15, latency=0.0))


@pytest.mark.usefixtures("fast_link")
def test_copies_that_nobody_waits_for_are_free_and_no_more_than_needed() -> None:
    """On a fast link nothing is repeated; a smaller budget sends more away."""
    large, small = planned(0.9, mx.sim(0)), planned(0.6, mx.sim(0))
    for plan in (large, small):
        assert cost(plan.memory) == 0.0
        assert not any(node.mirror_of is not None for node in plan.graph.nodes)
    assert 0 < large.memory.on_host < small.memory.on_host


def test_it_reaches_budgets_that_repetition_cannot() -> None:
    """The error without spills names a budget; offloading reaches half of the range below it."""
    with pytest.raises(BudgetError) as refused:
        planned(0.01, mx.sim(0), three_layers, spill=False)
    assert refused.value.smallest is not None
    with pytest.raises(BudgetError) as further:
        planned(0.01, mx.sim(0), three_layers)
    assert further.value.smallest is not None
    assert further.value.smallest < refused.value.smallest
    full = planned(1.0, mx.sim(0), three_layers).memory.peak
    plan = planned((further.value.smallest + 1) / full, mx.sim(0), three_layers).memory
    assert near(plan) <= further.value.smallest + 1


@pytest.mark.usefixtures("fast_link")
def test_switches_switch_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option, the variable, and a host context each keep every result on the device."""
    assert planned(0.8, mx.sim(0), three_layers).memory.on_host > 0
    assert planned(0.8, mx.sim(0), three_layers, spill=False).memory.on_host == 0
    assert planned(0.8, mx.cpu(), three_layers).memory.on_host == 0
    monkeypatch.setenv("WEFTPLAN_SPILL", "0")
    assert not PlanOptions.from_environment().spill


def test_equal_questions_get_equal_plans() -> None:
    """Nothing depends on a clock or on names that were given before."""
    first, second = planned(0.75, mx.gpu(0)), planned(0.75, mx.gpu(0))
    assert first.memory.to_json().replace("softmax", "") == second.memory.to_json().replace("softmax", "")
