"""Recomputation policies: unchanged bits, no larger peak, one update of statistics, and notes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weftplan as mx
from weftplan import symbol as sym
from weftplan.errors import BudgetError, PlanError
from weftplan.ops.fusion.relu import RELU
from weftplan.planner import PlanOptions, plan_symbol, validate
from weftplan.planner.options import RECOMPUTE
from weftplan.planner.recompute.recompute_choice import chosen_echo
from weftplan.planner.symbolic.pipeline import WORTH_A_FORM

SHAPES = {"data": (4, 3, 10, 10), "softmax_label": (4,)}


def one_step(symbol: Any, shapes: dict[str, Any], options: PlanOptions) -> tuple[dict[str, Any], Any]:
    """Run one training step on fixed values; return outputs, gradients and states by name, and the executor."""
    executor = symbol.simple_bind(mx.cpu(), plan_options=options, **shapes)
    rng = np.random.default_rng(3)
    for name, array in executor.arg_dict.items():
        array[:] = rng.integers(0, 4, array.shape) if "label" in name else rng.normal(size=array.shape)
    for name, array in executor.aux_dict.items():
        array[:] = 1.0 if "var" in name else 0.0
    mx.random.seed(11)
    executor.forward(is_train=True)
    executor.backward()
    result = {f"output {i}": out.asnumpy() for i, out in enumerate(executor.outputs)}
    result |= {f"gradient of {name}": g.asnumpy() for name, g in executor.grad_dict.items() if g is not None}
    return result | {f"state {name}": a.asnumpy() for name, a in executor.aux_dict.items()}, executor


def planned(symbol: Any, shapes: dict[str, Any], **options: Any) -> Any:
    """Plan a symbol for training with these options."""
    return plan_symbol(symbol, shapes, grad_req="write", options=PlanOptions(**options))


def repeated_nodes(plan: Any) -> list[str]:
    """Return the names of the nodes that a plan repeats."""
    return [n.mirror_of.name for nid in plan.order if (n := plan.graph.nodes[nid]).mirror_of is not None]


@pytest.mark.parametrize("policy", [*RECOMPUTE[1:], "budget"])
def test_every_policy_computes_the_same_bits(nets: Any, same: Any, policy: str) -> None:
    """Each policy keeps the outputs, gradients and statistics of a step with batch norm and dropout."""
    symbol = nets.conv(3)
    want, off = one_step(symbol, SHAPES, PlanOptions())
    if policy == "budget":
        options = PlanOptions(budget=int(off.memory_plan.peak * 0.8))
    else:
        options = PlanOptions(recompute=policy)
    plan = plan_symbol(symbol, SHAPES, grad_req="write", options=options)
    assert repeated_nodes(plan), "the test must repeat something"
    if policy in ("mxnet", "sqrt"):
        assert any(node.op.name == "BatchNorm+relu" for node in plan.graph.nodes if node.mirror_of is not None)
    got, _ = one_step(symbol, SHAPES, options)
    same(got, want)


def test_dropout_that_is_repeated_draws_the_same_numbers(nets: Any, same: Any) -> None:
    """A repeated Dropout draws the numbers of its first run."""
    symbol = nets.conv(6, dropout=0.5)
    plan = planned(symbol, SHAPES, recompute="sqrt")
    assert any(name.startswith("drop") for name in repeated_nodes(plan))
    want, _ = one_step(symbol, SHAPES, PlanOptions())
    got, _ = one_step(symbol, SHAPES, PlanOptions(recompute="sqrt"))
    same(got, want)


def test_moving_statistics_move_once(nets: Any) -> None:
    """If a batch norm is recomputed, a step moves the moving mean once, by a tenth of the batch mean."""
    symbol = nets.conv(5, dropout=0)
    plan = planned(symbol, SHAPES, recompute="mxnet")
    assert "relu0" in repeated_nodes(plan), "batch norm and its relu are one node, with the relu's name"
    got, executor = one_step(symbol, SHAPES, PlanOptions(recompute="mxnet"))
    weight, bias = executor.arg_dict["conv0_weight"].asnumpy(), executor.arg_dict["conv0_bias"].asnumpy()
    data = np.pad(executor.arg_dict["data"].asnumpy(), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(data, (3, 3), axis=(2, 3))
    mean = np.einsum("nchwij,ocij->o", windows, weight) / (4 * 10 * 10) + bias
    np.testing.assert_allclose(got["state norm0_moving_mean"], 0.1 * mean, rtol=1e-3, atol=1e-4)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    size=st.integers(2, 24),
    policy=st.sampled_from([*RECOMPUTE, "budget"]),
    strategy=st.sampled_from(["auto", "match_range", "none"]),
    grad_req=st.sampled_from(["write", "add"]),
)
def test_random_graphs_run_on_poisoned_memory(
    interpret: Any, same: Any, seed: int, size: int, policy: str, strategy: str, grad_req: str
) -> None:
    """On random graphs every policy gives a valid plan, no larger peak, and the bits of the plain graph."""
    symbol = interpret.symbol(seed, size)
    shapes = dict.fromkeys(symbol.list_arguments(), (6, 6))
    off = plan_symbol(symbol, shapes, grad_req=grad_req, options=PlanOptions(strategy=strategy))
    options = PlanOptions(strategy=strategy, recompute=policy if policy != "budget" else "off")
    if policy == "budget":
        options = PlanOptions(strategy=strategy, budget=max(1, int(off.memory.peak * 0.85)))
    try:
        plan = plan_symbol(symbol, shapes, grad_req=grad_req, options=options)
    except BudgetError:
        assert policy == "budget"
        return
    validate(plan)
    assert plan.memory.peak <= (off.memory.peak if options.budget is None else options.budget)
    given_values = interpret.values(symbol, seed)
    if grad_req == "write":
        given_values = {name: value for name, value in given_values.items() if not name.startswith("grad:")}
    same(interpret.planned(plan, given_values), interpret.apart(off, given_values))


def test_a_policy_that_raises_the_peak_is_refused() -> None:
    """If the policy ``mxnet`` would raise the peak, the plan stays without recomputation, and a note says why."""
    x = sym.Variable("data")
    for i, width in enumerate((128, 64, 10)):
        x = sym.FullyConnected(x, num_hidden=width, name=f"fc{i}")
        x = sym.Activation(x, act_type="relu", name=f"relu{i}") if i < 2 else x
    symbol = sym.SoftmaxOutput(x, name="softmax")
    shapes = {"data": (64, 784)}
    off, on = planned(symbol, shapes), planned(symbol, shapes, recompute="mxnet")
    assert on.memory.peak == off.memory.peak
    assert not repeated_nodes(on)
    (note,) = on.memory.notes
    assert note.startswith("recompute mxnet: not used, it ")
    assert f"without it {off.memory.peak:,}" in note


def test_forced_mirroring_wins_over_the_switch() -> None:
    """``__force_mirroring__`` repeats a node without a policy; an invalid value raises an error."""
    x = sym.Variable("data")
    for i in range(4):
        x = sym.FullyConnected(x, num_hidden=64, name=f"fc{i}")
        with mx.AttrScope(__force_mirroring__="true"):
            x = sym.sin(x, name=f"sin{i}")
    symbol = sym.sum(x, name="total")
    plan = planned(symbol, {"data": (64, 64)})
    assert set(repeated_nodes(plan)) <= {f"sin{i}" for i in range(4)}
    assert repeated_nodes(plan) or "__force_mirroring__" in plan.memory.notes[-1]
    with mx.AttrScope(__force_mirroring__="perhaps"):
        bad = sym.sum(sym.sin(sym.Variable("data"), name="odd"))
    with pytest.raises(
        PlanError, match=r"__force_mirroring__ of 'odd' must be one of 0, 1, true, false; got 'perhaps'"
    ):
        planned(bad, {"data": (2, 2)})


def test_switches_in_the_environment(nets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``MXNET_BACKWARD_DO_MIRROR`` chooses the policy ``mxnet``; ``MXNET_MEMORY_OPT``, alone or with it, ``echo``."""
    assert PlanOptions.from_environment().recompute == "off"
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "1")
    assert PlanOptions.from_environment().recompute == "mxnet"
    plan = plan_symbol(nets.conv(), SHAPES, grad_req="write")
    assert repeated_nodes(plan)
    monkeypatch.setenv("MXNET_MEMORY_OPT", "1")
    assert PlanOptions.from_environment().recompute == "echo"
    monkeypatch.setenv("MXNET_BACKWARD_DO_MIRROR", "0")
    assert PlanOptions.from_environment().recompute == "echo"


def test_rules_leave_heavy_operators_alone(nets: Any) -> None:
    """The policies ``mxnet`` and ``echo`` repeat only batch norms, relus and pooling, no heavy operators."""
    for policy in ("mxnet", "echo"):
        repeated = repeated_nodes(planned(nets.conv(), SHAPES, recompute=policy))
        assert repeated
        assert all(name.startswith(("norm", "relu", "pool")) for name in repeated)


def test_echo_stores_what_shrinks() -> None:
    """The policy ``echo`` stores the result of a reduction, which is smaller than its input."""
    x = sym.FullyConnected(sym.Variable("data"), num_hidden=256, name="wide")
    small = sym.sum(sym.exp(x, name="exp"), axis=1, keepdims=True, name="shrunk")
    y = sym.broadcast_mul(sym.FullyConnected(small, num_hidden=8, name="narrow"), small, name="scaled")
    symbol = sym.MakeLoss(sym.sum(y * y, name="total"), name="loss")
    result = planned(symbol, {"data": (64, 16)}, recompute="echo")
    assert "shrunk" not in repeated_nodes(result)


def test_echo_decides_readers_of_one_array_together(training: Any) -> None:
    """The policy ``echo`` stores both of two reductions of one array, because only that frees the array."""
    x = sym.FullyConnected(sym.Variable("data"), num_hidden=256, name="wide")
    left, right = sym.sum(x, axis=1, keepdims=True, name="left"), sym.mean(x, axis=1, keepdims=True, name="right")
    ends = [sym.FullyConnected(small, num_hidden=8, name=f"{small.name}_end") for small in (left, right)]
    symbol = sym.MakeLoss(sym.sum(ends[0] * ends[1], name="total"), name="loss")
    result = training(symbol, {"data": (64, 16)})
    chosen = {result.planned.graph.nodes[nid].name for nid in chosen_echo(result.tape())}
    assert "total" in chosen
    assert not {"left", "right"} & chosen


def test_wrong_options_are_refused() -> None:
    """An unknown policy, and a budget that is no number of bytes, raise a PlanError."""
    with pytest.raises(PlanError, match=r"recompute must be one of off, mxnet, echo, sqrt, cheap; got 'all'"):
        PlanOptions(recompute="all")
    for bad in (-1, 1.5, True, "2GB"):
        with pytest.raises(PlanError, match="budget must be a number of bytes"):
            PlanOptions(budget=bad)  # type: ignore[arg-type]


def test_inference_has_nothing_to_repeat(nets: Any) -> None:
    """Without gradients no policy repeats a node, and a budget below the smallest peak raises an error."""
    plain, apart = (plan_symbol(nets.conv(), SHAPES, options=PlanOptions(fusion=fusion)) for fusion in (True, False))
    least = min(plain.memory.peak, apart.memory.peak)
    for policy in RECOMPUTE:
        plan = plan_symbol(nets.conv(), SHAPES, options=PlanOptions(recompute=policy))
        assert plan.memory.peak == plain.memory.peak <= least / WORTH_A_FORM
        assert not repeated_nodes(plan)
    plan_symbol(nets.conv(), SHAPES, options=PlanOptions(budget=least))
    with pytest.raises(BudgetError, match=f"the smallest budget that works is {least}"):
        plan_symbol(nets.conv(), SHAPES, options=PlanOptions(budget=least - 1))


def test_two_devices(nets: Any) -> None:
    """On two devices, a repeated node runs on the device of its first run."""
    symbol, groups = nets.two_devices()
    options = PlanOptions(recompute="mxnet", strategy="match_range")
    plan = plan_symbol(symbol, {"data": (64, 32)}, grad_req="write", group2ctx=groups, options=options)
    validate(plan)
    homes = {plan.graph.nodes[nid].name: plan.devices[nid] for nid in plan.order}
    repeated = repeated_nodes(plan)
    assert repeated
    for name in repeated:
        assert homes[f"{name}_mirror"] == homes[name]


def test_the_better_of_the_fused_and_the_unfused_graph_is_taken(nets: Any) -> None:
    """The planner chooses between the fused and the unfused graph.

    The policy ``cheap`` chooses the smaller plan, but accepts up to 1 % more memory for fusion. With a budget the
    planner chooses the plan of less modelled time; the smallest possible budget is at most that of the unfused graph.
    """
    symbol = nets.conv(2, filters=32, dropout=0)
    shapes = {"data": (16, 32, 24, 24), "softmax_label": (16,)}

    def plan(**options: Any) -> Any:
        return plan_symbol(symbol, shapes, grad_req="write", options=PlanOptions(**options))

    def names(planned: Any) -> list[str]:
        return [node.op.name for node in planned.graph.nodes if node.op is not None]

    plain = plan()
    assert any(name.endswith(RELU) for name in names(plain))
    cheap, apart = plan(recompute="cheap"), plan(recompute="cheap", fusion=False)
    assert cheap.memory.peak <= min(apart.memory.peak / WORTH_A_FORM, plain.memory.peak)
    tight = plan(fusion=False).memory.peak * 3 // 4  # also less than the peak of the fused plan
    fused, apart = plan(budget=tight), plan(budget=tight, fusion=False)
    assert any(name.endswith(RELU) for name in names(fused))  # it takes less time than the unfused graph
    assert max(fused.memory.peak, apart.memory.peak) <= tight
    assert names(plan(budget=plain.memory.peak)) == names(plain)
    with pytest.raises(BudgetError) as refused:
        plan(budget=1)
    with pytest.raises(BudgetError) as refused_apart:
        plan(budget=1, fusion=False)
    assert refused.value.smallest <= refused_apart.value.smallest
    assert plan(budget=refused.value.smallest).memory.peak <= refused.value.smallest
