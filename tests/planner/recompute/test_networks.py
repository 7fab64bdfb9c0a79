"""Recomputation policies on the built-in networks and on very deep networks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from weftplan import models
from weftplan import symbol as sym
from weftplan.planner import PlanOptions, plan_symbol, validate
from weftplan.planner.choose_order import reversed_backward
from weftplan.planner.options import RECOMPUTE
from weftplan.planner.recompute import Tape
from weftplan.planner.recompute.segments import square_root
from weftplan.planner.symbolic.node_seconds import node_seconds

QUICK = ("mlp", "lenet", "alexnet", "vgg16", "resnet18", "mobilenet")
SLOW = ("mobilenet", "resnet50", "resnet152", "inception_v3", "densenet121", "lstm")


SEARCHED_LONG = {("resnet18", "cheap"), ("mobilenet", "cheap")}


def check_network(name: str, policies: Any) -> None:
    """Check that each policy gives a valid plan with a note about the policy and no larger peak than without it."""
    symbol = models.get(name)
    shapes = models.input_shapes(name, 4)
    off, apart = (
        plan_symbol(symbol, shapes, grad_req="write", options=PlanOptions(fusion=fusion)) for fusion in (True, False)
    )
    for policy in policies:
        plan = plan_symbol(symbol, shapes, grad_req="write", options=PlanOptions(recompute=policy))
        validate(plan)
        assert plan.memory.peak <= off.memory.peak, f"{name}, {policy}"
        assert plan.memory.notes[-1].startswith(f"recompute {policy}: ")
        assert plan.num_forward_nodes in (off.num_forward_nodes, apart.num_forward_nodes)


@pytest.mark.parametrize("name", QUICK)
def test_no_policy_raises_the_peak_of_a_network(name: str) -> None:
    """No policy raises the peak of a small network.

    The two longest searches, of ``SEARCHED_LONG``, are tested elsewhere.
    """
    check_network(name, [policy for policy in RECOMPUTE[1:] if (name, policy) not in SEARCHED_LONG])


def test_sqrt_policy_ignores_the_order_of_projections() -> None:
    """The policy ``sqrt`` saves memory although the depth-first order runs all input projections first."""

    def peaks(steps: int) -> tuple[int, int]:
        h, weights = sym.Variable("h"), [sym.Variable(name) for name in ("iw", "ib", "hw", "hb")]
        shapes = {"h": (16, 64)}
        for t in range(steps):
            shapes[f"x{t}"] = (16, 8)
            fed = sym.FullyConnected(sym.Variable(f"x{t}"), *weights[:2], num_hidden=64, name=f"i2h{t}")
            state = sym.FullyConnected(h, *weights[2:], num_hidden=64, name=f"h2h{t}")
            h = sym.Activation(fed + state, act_type="tanh", name=f"h{t}")
        symbol = sym.SoftmaxOutput(sym.FullyConnected(h, num_hidden=10, name="last"), name="softmax")
        result = [
            plan_symbol(symbol, shapes, grad_req="write", options=PlanOptions(recompute=policy, workspaces=False))
            for policy in ("off", "sqrt")
        ]
        return result[0].memory.peak, result[1].memory.peak

    short, long = peaks(32), peaks(512)
    assert long[1] - short[1] < (long[0] - short[0]) / 8
    assert long[1] < long[0] / 6


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SLOW)
def test_no_policy_raises_the_peak_of_a_large_network(name: str) -> None:
    """No policy raises the peak of a large network."""
    check_network(name, RECOMPUTE[1:])


@pytest.mark.parametrize("name", ["resnet18", pytest.param("vgg16", marks=pytest.mark.stress)])
def test_cheap_saves_a_quarter(name: str) -> None:
    """The policy ``cheap`` lowers the bound of the peak by more than a quarter.

    It recomputes batch norm, relu and pooling from the outputs of convolutions.
    """
    symbol, shapes = models.get(name), models.input_shapes(name, 16)
    off = plan_symbol(symbol, shapes, grad_req="write", options=PlanOptions(workspaces=False))
    on = plan_symbol(symbol, shapes, grad_req="write", options=PlanOptions(workspaces=False, recompute="cheap"))
    validate(on)
    assert on.memory.peak <= off.memory.peak
    assert on.memory.notes[-1].startswith("recompute cheap: ")
    assert on.memory.lower_bound < 0.75 * off.memory.lower_bound


def growth(training: Any, make: Any, shapes: Any, sizes: tuple[int, int]) -> float:
    """Return the exponent of the growth of the square-root rule's peak with the size of a network.

    ``make`` and ``shapes`` give the network and its input shapes for each of the two ``sizes``.
    """
    peaks = []
    for size in sizes:
        result = training(make(size), shapes(size), strategy="match_range", workspaces=False)
        program = reversed_backward(result.program)
        tape = Tape(program, assignment=result.assignment, options=result.options, seconds=node_seconds(program))
        price = square_root(tape)
        peaks.append(price.peak)
    assert price.peak < tape.price(()).peak / 4
    return math.log(peaks[1] / peaks[0]) / math.log(sizes[1] / sizes[0])


def test_a_residual_net_grows_with_the_square_root_of_its_depth(training: Any, nets: Any) -> None:
    """For sixteen times the depth, the peak of a residual network grows about fourfold."""
    shapes = {"data": (2, 8, 8, 8)}
    assert growth(training, nets.residual, lambda size: shapes, (25, 400)) < 0.6


def test_an_unrolled_lstm_grows_with_the_square_root_of_its_length(training: Any, nets: Any) -> None:
    """For sixteen times the length, the peak of an LSTM grows about fourfold, if gradients run in reverse order."""

    def shapes(size: int) -> dict[str, Any]:
        return {"h": (8, 16), "c": (8, 16), **{f"x{i}": (8, 16) for i in range(size)}}

    assert growth(training, nets.lstm, shapes, (25, 400)) < 0.6


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["residual", "lstm"])
def test_a_thousand_layers(training: Any, nets: Any, kind: str) -> None:
    """The policy ``sqrt`` plans 1,000 layers with less than 13 % of the plain peak, for less than 35 % more time."""
    if kind == "residual":
        symbol, shapes = nets.residual(1000, filters=128), {"data": (8, 3, 32, 32)}
    else:
        symbol = nets.lstm(1000, hidden=512)
        shapes = {"h": (64, 512), "c": (64, 512), **{f"x{i}": (64, 512) for i in range(1000)}}
    off = training(symbol, shapes, workspaces=False, strategy="match_range")
    options = PlanOptions(workspaces=False, recompute="sqrt", strategy="match_range")
    on = plan_symbol(symbol, shapes, grad_req="write", options=options)
    validate(on)
    assert on.memory.peak < off.planned.memory.peak * 4 / math.sqrt(1000)
    costs = node_seconds(off.program)
    names = dict(zip(off.program.graph.names, costs, strict=True))
    extra = sum(names[m.name] for nid in on.order if (m := on.graph.nodes[nid].mirror_of) is not None)
    assert extra < 0.35 * sum(costs)  # one more forward pass, about
