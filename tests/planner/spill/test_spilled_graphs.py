"""Graphs with offloaded results: valid plans, exact predictions of peaks, and the bits of the plain graph."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weftplan as mx
from weftplan import models
from weftplan.errors import PlanError
from weftplan.planner import PlanOptions, plan_symbol, strategies, validate
from weftplan.planner.buffers import Buffers
from weftplan.planner.rewiring import Spill, spilled
from weftplan.planner.spill import search
from weftplan.planner.strategies import Draft
from weftplan.planner.symbolic.node_seconds import node_seconds

SIM = mx.sim(0)
HOST = mx.Context("cpu_pinned", 0)


def make_search(start: Draft) -> search.Search:
    """Return the search for results to offload from the graph of ``start``."""
    buffers = Buffers(start.program, start.assignment, options=start.memory.options)
    return search.Search(buffers, node_seconds(start.program))


def choose_spills_with(monkeypatch: pytest.MonkeyPatch, choose: Any) -> None:
    """Let ``choose(search, num_forward)`` choose the offloaded results of every plan with a budget."""

    def apply(start: Draft, options: PlanOptions, *, cost: Any) -> Draft:
        chosen = choose(make_search(start), start.program.num_forward)
        return strategies.plan_graph(spilled(start.program, chosen), options)

    monkeypatch.setattr(search, "SMALLEST", 0)
    monkeypatch.setattr("weftplan.planner.spill.budget.can_spill", lambda *_: True)
    monkeypatch.setattr("weftplan.planner.spill.budget.apply", apply)


@pytest.mark.parametrize("strategy", ["auto", "arena", "match_range", "none"])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), size=st.integers(1, 24))
def test_random_graphs_with_random_spills(
    interpret: Any, same: Any, monkeypatch: pytest.MonkeyPatch, strategy: str, seed: int, size: int
) -> None:
    """Random graphs with random results offloaded at random legal steps compute the bits of the plain graph."""
    rng = random.Random(seed)

    def choose(states: Any, num_forward: int) -> list[Spill]:
        candidates = [one for row in states._idle for one in row]
        chosen = rng.sample(candidates, rng.randint(0, len(candidates)))
        return [
            Spill(one.entry, rng.randint(one.produced + 1, num_forward), rng.randint(num_forward, one.needed), HOST)
            for one in chosen
        ]

    symbol = interpret.symbol(seed, size)
    shapes = dict.fromkeys(symbol.list_arguments(), (6, 6))
    plain = plan_symbol(symbol, shapes, grad_req="write", context=SIM)
    with monkeypatch.context() as patch:
        choose_spills_with(patch, choose)
        options = PlanOptions(strategy=strategy, budget=1)
        planned = plan_symbol(symbol, shapes, grad_req="write", context=SIM, options=options)
    validate(planned)
    values = {k: v for k, v in interpret.values(symbol, seed).items() if not k.startswith("grad:")}
    same(interpret.planned(planned, values), interpret.apart(plain, values))


@pytest.mark.parametrize(
    ("name", "device"),
    [("resnet18", SIM), ("inception_v3", SIM), ("lenet", SIM), ("lstm", SIM), ("resnet18", mx.gpu(0))],
    ids=str,
)
def test_prices_are_the_bytes_of_the_plan(name: str, device: mx.Context) -> None:
    """The peak of every search state is the peak of the plan of its rewritten graph on the device."""
    # With fewer samples the last layer of the LSTM is the peak, so that offloading would not lower it.
    net, shapes = models.get(name), models.input_shapes(name, batch=8 if name == "lstm" else 2)
    requests = {n: "null" if n in shapes else "write" for n in net.list_arguments()}
    check_prices(net, shapes, grad_req=requests, context=device)


def test_prices_include_the_host() -> None:
    """In a graph on a host and a device, the peak of every search state is the sum of both peaks in its plan."""
    net = mx.sym.Variable("x")
    for group in ("host", "device"):
        with mx.AttrScope(ctx_group=group):
            for _ in range(4):
                net = mx.sym.tanh(mx.sym.exp(net))
    groups = {"host": mx.cpu(0), "device": SIM}
    check_prices(mx.sym.MakeLoss(mx.sym.sum(net)), {"x": (64, 64)}, grad_req="write", group2ctx=groups)


def check_prices(net: Any, shapes: Any, **named: Any) -> None:
    """Check that the peaks of search states fall, and that each equals the peak of its plan.

    The graph of a state is the given graph with two copies for each offloaded result.
    """
    seen: list[tuple[search.SpillChoice, Draft, Draft]] = []

    def spy(start: Draft, options: PlanOptions, *, cost: Any) -> Draft:
        states = make_search(start).choices()
        for state in states[:: max(1, len(states) // 5)]:
            result = spilled(start.program, state.spills)
            seen.append((state, start, strategies.plan_graph(result, options)))
        assert all(a.peak > b.peak for a, b in pairwise(states))
        return start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weftplan.planner.spill.budget.can_spill", lambda *_: True)
        patch.setattr("weftplan.planner.spill.budget.apply", spy)
        plan_symbol(net, shapes, options=PlanOptions(budget=1, effort="fast"), **named)
    assert len(seen) > 1
    for state, before, after in seen:
        plan = after.memory
        near = [k for k, context in enumerate(plan.contexts) if context.device_type != "cpu_pinned"]
        assert state.peak == sum(int(plan.timeline(k).max()) for k in near)
        assert after.program.num_forward - before.program.num_forward == len(state.spills)
        assert len(after.program.order) - len(before.program.order) == 2 * len(state.spills)


def chain() -> Any:
    """Return x -> exp -> tanh -> exp -> tanh, whose backward part reads every result."""
    net = mx.sym.Variable("x")
    for kind in (mx.sym.exp, mx.sym.tanh, mx.sym.exp, mx.sym.tanh):
        net = kind(net * 0.1)
    return mx.sym.MakeLoss(mx.sym.sum(net))


def planned_with(monkeypatch: pytest.MonkeyPatch, count: int = 99) -> Any:
    """Plan the chain with up to ``count`` results offloaded after the forward part and fetched for their readers."""

    def choose(states: Any, num_forward: int) -> list[Spill]:
        return [Spill(one.entry, num_forward, one.needed, HOST) for one in states._idle[0][:count]]

    with monkeypatch.context() as patch:
        choose_spills_with(patch, choose)
        return plan_symbol(
            chain(), {"x": (64, 64)}, grad_req="write", context=SIM, options=PlanOptions(budget=1, enable_inplace=False)
        )


def test_copies_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies have attributes, names and devices that identify them, and copies out count as forward steps."""
    planned = planned_with(monkeypatch, count=1)
    nodes = {node.name: (nid, node) for nid, node in enumerate(planned.graph.nodes) if "__spill__" in node.attrs}
    (out_name, (out, _)), (back_name, (back, _)) = sorted(
        nodes.items(), key=lambda item: item[1][1].attrs["__spill__"], reverse=True
    )
    assert out_name.removesuffix("_spill") == back_name.removesuffix("_fetch")
    assert planned.devices[out] == mx.Context("cpu_pinned", 0) == mx.Context("cpu_pinned", 0)
    assert planned.devices[back] == SIM
    assert planned.order.index(out) == planned.num_forward_nodes - 1
    assert planned.memory.on_host == planned.memory.peak_by_device[mx.Context("cpu_pinned", 0)] == 64 * 64 * 4
    repeated = type(planned.memory).from_json(planned.memory.to_json())
    validate(repeated)
    assert repeated.on_host == planned.memory.on_host


def test_the_validator_refuses_a_result_that_is_read_before_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validator refuses a copy back that runs after its reader, and a lifetime on the host that is too short."""
    planned = planned_with(monkeypatch)
    validate(planned)
    backs = [nid for nid in planned.order if planned.graph.nodes[nid].attrs.get("__spill__") == "back"]
    order = [nid for nid in planned.order if nid != backs[0]]
    with pytest.raises(PlanError, match="runs before"):
        validate(replace(planned, order=[*order, backs[0]]))
    plan = planned.memory
    out = planned.graph.inputs[backs[0]][0]
    last = np.array(plan.entry_last)
    last[out] -= 1
    with pytest.raises(PlanError, match="lives from step"):
        validate(replace(planned, memory=replace(plan, entry_last=last)))
