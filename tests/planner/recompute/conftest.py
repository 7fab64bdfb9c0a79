"""A training graph before any recomputation policy, and networks of several kinds."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

import weftplan as mx
from weftplan import symbol as sym
from weftplan.planner import PlanOptions, drafts, plan_symbol
from weftplan.planner.program import Program
from weftplan.planner.recompute import Tape
from weftplan.planner.storage_assignment import Assignment
from weftplan.planner.strategies import Draft
from weftplan.planner.symbolic.node_seconds import node_seconds


@dataclass
class Training:
    """The planner's state for a training graph before it applies a policy."""

    program: Program
    assignment: Assignment
    options: PlanOptions
    planned: Any

    def tape(self, seconds: Any = None) -> Tape:
        """Return the tape with the costs ``seconds`` of its nodes, or with the modelled costs if this is None."""
        costs = node_seconds(self.program) if seconds is None else seconds
        return Tape(self.program, assignment=self.assignment, options=self.options, seconds=costs)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that plans a symbol for training and returns a ``Training``; keyword arguments are plan options."""
    seen: list[Draft] = []
    original = drafts.plan_graph

    def watched(*args: Any) -> Draft:
        seen.append(original(*args))
        return seen[-1]

    monkeypatch.setattr(drafts, "plan_graph", watched)

    def make(symbol: Any, shapes: dict[str, Any], group2ctx: Any = None, **options: Any) -> Training:
        chosen = PlanOptions(**options)
        planned = plan_symbol(symbol, shapes, grad_req="write", group2ctx=group2ctx, options=chosen)
        return Training(seen[-1].program, seen[-1].assignment, chosen, planned)

    return make


def conv_net(layers: int = 4, *, dropout: float = 0.3, filters: int = 8) -> Any:
    """Return ``layers`` of convolution, batch norm, relu and dropout, followed by a softmax."""
    x = sym.Variable("data")
    for i in range(layers):
        x = sym.Convolution(x, num_filter=filters, kernel=(3, 3), pad=(1, 1), name=f"conv{i}")
        x = sym.BatchNorm(x, fix_gamma=False, name=f"norm{i}")
        x = sym.Activation(x, act_type="relu", name=f"relu{i}")
        if dropout:
            x = sym.Dropout(x, p=dropout, name=f"drop{i}")
    x = sym.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg", name="pool")
    return sym.SoftmaxOutput(sym.FullyConnected(x, num_hidden=4, name="last"), name="softmax")


def residual_net(layers: int, filters: int = 8) -> Any:
    """Return a residual network whose layers add convolution, batch norm and relu of their input to it."""
    x = sym.Convolution(sym.Variable("data"), num_filter=filters, kernel=(3, 3), pad=(1, 1), name="stem")
    for i in range(layers):
        y = sym.Convolution(x, num_filter=filters, kernel=(3, 3), pad=(1, 1), name=f"conv{i}")
        y = sym.BatchNorm(y, name=f"norm{i}")
        x = x + sym.Activation(y, act_type="relu", name=f"relu{i}")
    return sym.SoftmaxOutput(sym.FullyConnected(x, num_hidden=10, name="last"), name="softmax")


def unrolled_lstm(steps: int, hidden: int = 16) -> Any:
    """Return an LSTM over ``steps`` separate variables, so that only the recurrence grows with the steps."""
    h, c = sym.Variable("h"), sym.Variable("c")
    weights = [sym.Variable(name) for name in ("hw", "hb", "iw", "ib")]
    for i in range(steps):
        gates = sym.FullyConnected(
            h, weights[0], weights[1], num_hidden=4 * hidden, name=f"h2h{i}"
        ) + sym.FullyConnected(sym.Variable(f"x{i}"), weights[2], weights[3], num_hidden=4 * hidden, name=f"i2h{i}")
        parts = sym.SliceChannel(gates, num_outputs=4, name=f"gates{i}")
        kinds = ("sigmoid", "sigmoid", "tanh", "sigmoid")
        a, f, g, o = (sym.Activation(parts[k], act_type=kind, name=f"gate{i}_{k}") for k, kind in enumerate(kinds))
        c = f * c + a * g
        h = o * sym.Activation(c, act_type="tanh", name=f"cell{i}")
    return sym.SoftmaxOutput(sym.FullyConnected(h, num_hidden=10, name="last"), name="softmax")


def two_device_net(layers: int = 3) -> tuple[Any, dict[str, mx.Context]]:
    """Return ``layers`` layers on one device and ``layers`` with a softmax on another, and the device of each group."""
    with mx.AttrScope(ctx_group="low"):
        x = sym.Variable("data")
        for i in range(layers):
            x = sym.sin(sym.FullyConnected(x, num_hidden=32, name=f"a{i}"), name=f"s{i}")
    with mx.AttrScope(ctx_group="high"):
        for i in range(layers):
            x = sym.sin(sym.FullyConnected(x, num_hidden=32, name=f"b{i}"), name=f"t{i}")
        return sym.SoftmaxOutput(x, name="softmax"), {"low": mx.cpu(0), "high": mx.cpu(1)}


@pytest.fixture(scope="session")
def nets() -> Any:
    """The functions that build networks: ``conv``, ``residual``, ``lstm`` and ``two_devices``."""
    return SimpleNamespace(conv=conv_net, residual=residual_net, lstm=unrolled_lstm, two_devices=two_device_net)
