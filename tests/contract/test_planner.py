"""Contract of planning: every strategy, order, recomputation policy and dtype gives a correct plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.support.together import together
from weftplan import models
from weftplan import symbol as sym
from weftplan.errors import ConfigError, PlanError
from weftplan.planner import MemoryPlan, PlannedGraph, PlanOptions, plan_symbol, validate
from weftplan.planner.options import RECOMPUTE, STRATEGIES
from weftplan.planner.recompute import ladder


@cache
def branches() -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Return a network of uneven branches, and its input shapes.

    It has views, several outputs, a shared weight and an entry whose input values are not needed.
    """
    x, w = sym.Variable("x"), sym.Variable("w")
    wide = sym.FullyConnected(x, num_hidden=64, no_bias=True, name="wide")
    left = sym.tanh(sym.FullyConnected(wide, w, num_hidden=16, no_bias=True, name="left"), name="left_tanh")
    right = sym.FullyConnected(sym.relu(wide, name="right_relu"), w, num_hidden=16, no_bias=True, name="right")
    thin = sym.max(sym.Reshape(wide, shape=(-1, 64), name="view"), axis=1, keepdims=True, name="thin")
    a, b = sym.SliceChannel(sym.Concat(left, right, dim=1, name="joined"), num_outputs=2, axis=1, name="halves")
    total = sym.add_n(a * b, left, sym.zeros_like(right, name="zeros"), name="total")
    return sym.Group([sym.broadcast_add(total, thin, name="top"), sym.sigmoid(thin, name="side")]), {"x": (8, 32)}


@cache
def chain() -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Return a network of nine equal layers, which profit from recomputation, and its input shapes."""
    net = sym.Variable("x")
    for k in range(9):
        net = sym.tanh(sym.FullyConnected(net, num_hidden=24, name=f"fc{k}"), name=f"act{k}")
    return net, {"x": (64, 24)}


@cache
def lenet() -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Return LeNet, whose convolutions need workspaces, and its input shapes."""
    return models.get("lenet"), models.input_shapes("lenet", 4)


NETWORKS: dict[str, Callable[[], tuple[Any, dict[str, tuple[int, ...]]]]] = {
    "branches": branches,
    "chain": chain,
    "lenet": lenet,
}
DTYPES = ("float16", "float32", "float64")
GRAD_REQS = ("null", "write", "add")


@pytest.fixture(params=NETWORKS)
def network(request: pytest.FixtureRequest) -> str:
    """The name of a network."""
    return str(request.param)


EVERY = [PlanOptions(strategy=s, reorder=r, recompute=p) for s in STRATEGIES for r in (False, True) for p in RECOMPUTE]
"""Every combination of strategy, order and recomputation policy."""
EACH = [o for o in EVERY if o.strategy == "auto" or (o.recompute == "off" and not o.reorder)]
"""Each strategy alone, and for the strategy auto every combination of order and policy."""


def case_name(case: object) -> str:
    """Return a short identifier of a test parameter."""
    if isinstance(case, PlanOptions):
        return "-".join([case.strategy, *["reorder"] * case.reorder, case.recompute])
    return str(case)


@pytest.fixture(params=EACH, ids=case_name)
def options(request: pytest.FixtureRequest) -> PlanOptions:
    """The planning options of ``EACH``."""
    assert isinstance(request.param, PlanOptions)
    return request.param


# All options with written gradients, and each of EACH with added or no gradients.
with_every_option = pytest.mark.parametrize(
    ("chosen", "grad_req"),
    [*((o, "write") for o in EVERY), *((o, g) for o in EACH for g in GRAD_REQS if g != "write")],
    ids=case_name,
)


def plan_network(network: str, options: PlanOptions, grad_req: str, dtype: str = "float32") -> PlannedGraph:
    """Return the plan of a network, not cached, with all variables of one dtype."""
    net, shapes = NETWORKS[network]()
    names = [*net.list_arguments(), *net.list_auxiliary_states()]
    return plan_symbol(net, shapes, dict.fromkeys(names, dtype), grad_req=grad_req, options=options)


# Plans are frozen, so tests may share them.
make = cache(plan_network)


@with_every_option
def test_plans_are_valid_and_within_their_bounds(network: str, chosen: PlanOptions, grad_req: str) -> None:
    """A plan passes the validator, and lower bound <= peak <= bytes without sharing.

    The bytes of the devices and of the slabs each add up to the peak.
    """
    planned = make(network, chosen, grad_req)
    validate(planned)
    memory = planned.memory
    assert 0 < memory.lower_bound <= memory.peak <= memory.unshared_bytes
    assert sum(memory.peak_by_device.values()) == memory.peak
    assert int(memory.slab_nbytes.sum()) == memory.peak


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chosen", [o for o in EACH if not o.reorder], ids=case_name)
def test_sizes_follow_the_dtype(network: str, chosen: PlanOptions, dtype: str) -> None:
    """Each entry has its number of elements times the dtype's size in bytes, and the plan is valid."""
    planned = make(network, chosen, "write", dtype)
    validate(planned)
    for eid, (shape, kind) in enumerate(zip(planned.shapes, planned.dtypes, strict=True)):
        assert int(planned.memory.entry_nbytes[eid]) == int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
        assert np.dtype(kind) == np.dtype(dtype)


@pytest.mark.parametrize("reorder", [False, True])
def test_search_agrees_with_all_choices(reorder: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search gives the same order and the same JSON as trying all 4,096 choices."""
    chosen = PlanOptions(strategy="auto", reorder=reorder, recompute="cheap")
    searched = make("branches", chosen, "write")
    monkeypatch.setattr(ladder, "EXHAUSTIVE", 12)
    tried = plan_network("branches", chosen, "write")
    assert tried.order == searched.order
    assert tried.memory.to_json() == searched.memory.to_json()


def test_same_input_same_plan(network: str, options: PlanOptions) -> None:
    """Planning the same network twice gives the same order and the same JSON."""
    first, second = make(network, options, "write"), plan_network(network, options, "write")
    assert first.order == second.order
    assert first.memory.to_json() == second.memory.to_json()


def test_plans_survive_json(network: str, options: PlanOptions) -> None:
    """A plan loaded from JSON is valid, is saved as the same JSON, and has the same figures and options."""
    memory = make(network, options, "write").memory
    text = memory.to_json()
    back = MemoryPlan.from_json(text)
    validate(back)
    assert back.to_json() == text
    assert (back.peak, back.lower_bound, back.total, back.options) == (
        memory.peak,
        memory.lower_bound,
        memory.total,
        memory.options,
    )


@together()
@with_every_option
def test_no_option_raises_the_peak(network: str, chosen: PlanOptions, grad_req: str) -> None:
    """Reordering and recomputation never give a higher peak than the same strategy without them."""
    plain = make(network, chosen.replace(reorder=False, recompute="off"), grad_req)
    assert make(network, chosen, grad_req).memory.peak <= plain.memory.peak


@together()
@with_every_option
def test_every_forward_node_runs_before_every_backward_node(network: str, chosen: PlanOptions, grad_req: str) -> None:
    """With any options the forward nodes come first and are the same set; each node runs once, after its inputs."""
    planned = make(network, chosen, grad_req)
    graph, front = planned.graph, planned.order[: planned.num_forward_nodes]
    plain = make(network, chosen.replace(reorder=False, recompute="off"), grad_req)
    names = {plain.graph.nodes[n].name for n in plain.order[: plain.num_forward_nodes]}
    assert {graph.nodes[n].name for n in front} == names
    position = {nid: step for step, nid in enumerate(planned.order)}
    assert len(position) == len(planned.order)
    for nid, step in position.items():
        needs = {graph.entry_node[e] for e in graph.inputs[nid]} | set(graph.controls[nid])
        assert all(position.get(second, -1) < step for second in needs)


def test_sharing_orders_the_strategies(network: str) -> None:
    """The strategy auto has the lowest peak of all strategies; match_range has at most the peak without sharing."""
    peaks = {s: make(network, PlanOptions(strategy=s), "write").memory.peak for s in STRATEGIES}
    assert peaks["auto"] == min(peaks.values())
    assert peaks["match_range"] <= peaks["none"]


@pytest.mark.parametrize("reorder", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_devices(strategy: str, reorder: bool) -> None:
    """A network on two devices gets a valid plan with two contexts under every strategy and order."""
    from weftplan.device.context import cpu

    x = sym.Variable("x")
    with sym.AttrScope(ctx_group="far"):
        far = [sym.FullyConnected(x, num_hidden=8 << k, name=f"far{k}") for k in range(3)]
    with sym.AttrScope(ctx_group="near"):
        net = sym.Concat(*[sym.max(f, axis=1, keepdims=True, name=f"m{k}") for k, f in enumerate(far)], dim=1)
    planned = plan_symbol(
        net,
        {"x": (4, 8)},
        grad_req="write",
        group2ctx={"near": cpu(0), "far": cpu(1)},
        options=PlanOptions(strategy=strategy, reorder=reorder),
    )
    validate(planned)
    assert len(planned.memory.contexts) == 2
    assert planned.memory.peak >= planned.memory.lower_bound


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("WEFTPLAN_PLANNER_STRATEGY", "arena", "strategy", "arena"),
        ("MXNET_EXEC_MATCH_RANGE", "3", "match_range", 3),
        ("NNVM_AUTO_SEARCH_MATCH_RANGE", "1", "auto_search", True),
        ("MXNET_EXEC_ENABLE_INPLACE", "0", "enable_inplace", False),
        ("MXNET_EXEC_NUM_TEMP", "2", "num_temp", 2),
        ("MXNET_EXEC_INPLACE_GRAD_SUM_CAP", "5", "inplace_grad_sum_cap", 5),
        ("MXNET_ELIMINATE_COMMON_EXPR", "0", "eliminate_common_expr", False),
        ("MXNET_BACKWARD_DO_MIRROR", "1", "recompute", "mxnet"),
        ("MXNET_MEMORY_OPT", "1", "recompute", "echo"),
    ],
)
def test_options_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, field: str, value: Any
) -> None:
    """Each environment variable sets its own option of the next plan; a keyword overrides the variable."""
    before = PlanOptions.from_environment()
    monkeypatch.setenv(variable, text)
    now = PlanOptions.from_environment()
    assert getattr(before, field) != value
    assert now == before.replace(**{field: value})
    assert PlanOptions.from_environment(**{field: getattr(before, field)}) == before
    planned = plan_symbol(*branches(), grad_req="write")
    validate(planned)
    assert getattr(planned.memory.options, field) == value


def test_bad_options_name_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown option or value raises PlanError with the legal values; a bad variable raises ConfigError."""
    with pytest.raises(PlanError, match="strategy must be one of auto, arena"):
        PlanOptions(strategy="best")
    with pytest.raises(PlanError, match="did you mean 'reorder'"):
        PlanOptions.from_environment(reoder=True)
    monkeypatch.setenv("MXNET_EXEC_NUM_TEMP", "none")
    with pytest.raises(ConfigError, match="MXNET_EXEC_NUM_TEMP"):
        plan_symbol(*branches())
