"""Elementwise nodes that are fused on GPUs: they compute the same bits in fewer launches and less memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from tests.contract.devices import GPUS, place
from tests.standin_cupy import meter
from tests.support.pointwise_networks import NETWORKS, feed_forward, groups, planned, residual
from weftplan.planner import PlanOptions, plan_symbol, validate
from weftplan.planner.symbolic.passes.pass_manager import hidden_members, unfused

NAME = "elementwise nodes fused"


def operators(graph: Any) -> Counter[str]:
    """Return how many nodes of each operator a planned graph has."""
    return Counter(node.op.name for node in graph.nodes if node.op is not None)


def run(symbol: Any, shape: Any, context: Any, *, dtype: str = "float32", grad_req: str = "write",
        budget: int | None = None, **options: Any) -> Any:  # fmt: skip
    """Run one step and one inference.

    Returns:
        The values by name, the number of launches of the step, and the executor.
    """
    types = dict.fromkeys(symbol.list_arguments(), dtype)
    executor = symbol.simple_bind(
        context,
        grad_req=grad_req,
        type_dict=types,
        options=PlanOptions(**options),
        budget=budget,
        data=shape,
    )
    rng = np.random.default_rng(3)
    for array in (*executor.arg_arrays, *executor.aux_arrays):
        array[:] = mx.nd.array(rng.standard_normal(array.shape), ctx=context, dtype=array.dtype)
    for array in executor.aux_arrays:
        array[:] = mx.nd.abs(array) + 0.5
    for array in executor.grad_arrays:
        if array is not None:
            array[:] = 1.0
    heads = [rng.standard_normal(out.shape) for out in executor.outputs]
    heads = [mx.nd.array(head, ctx=context, dtype=dtype) for head in heads]
    mx.nd.waitall()
    meter.reset()
    executor.forward(is_train=True)
    if grad_req != "null":
        executor.backward(heads)
    mx.nd.waitall()
    launches = sum(meter.launches.values())
    validate(executor.planned)
    assert executor.allocated_bytes == executor.memory_plan.peak
    arrays = {
        **{f"output {k}": one for k, one in enumerate(executor.outputs)},
        **executor.grad_dict,
        **executor.aux_dict,
    }
    values = {name: array.asnumpy() for name, array in arrays.items() if array is not None}
    values["inference"] = executor.forward(is_train=False)[0].asnumpy()
    return values, launches, executor


def assert_same_bits(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Assert that two results have the same names and bits."""
    assert a.keys() == b.keys()
    for name, array in a.items():
        assert array.tobytes() == b[name].tobytes(), name


@pytest.mark.parametrize("where", GPUS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("grad_req", ["write", "add", "null"])
@pytest.mark.parametrize("name", NETWORKS)
def test_same_bits_in_fewer_launches(name: str, grad_req: str, dtype: str, where: str):
    """Fused nodes compute all values of training and inference in fewer launches, with no more nodes or memory."""
    make, shape = NETWORKS[name]
    if name == "recurrent" and dtype == "float64":
        pytest.skip("the states at the beginning are float32")
    with place(where, kind="NaiveEngine") as context:
        apart, more, first = run(make(), shape, context(0), dtype=dtype, grad_req=grad_req, fusion=False)
        fused, fewer, second = run(make(), shape, context(0), dtype=dtype, grad_req=grad_req)
        assert_same_bits(apart, fused)
        assert groups(second.planned.graph)
        assert where == "gpu" or fewer < more
        assert len(second.planned.graph.nodes) <= len(first.planned.graph.nodes)
        assert second.memory_plan.peak <= first.memory_plan.peak
        assert second.memory_plan.unshared_bytes <= first.memory_plan.unshared_bytes


def test_values_are_those_of_the_host():
    """Values on a stand-in GPU, which runs the generated source, are close to those of the host."""
    for make, shape in NETWORKS.values():
        with place("standin", kind="NaiveEngine") as context:
            expected = run(make(), shape, mx.cpu())[0]
            actual = run(make(), shape, context(0))[0]
        for name, array in expected.items():
            np.testing.assert_allclose(actual[name], array, rtol=2e-4, atol=2e-4, err_msg=name)


def test_gelu_is_one_launch():
    """A fused GELU is one launch; unfused it is more than 100."""
    symbol = mx.sym.LeakyReLU(mx.sym.Variable("data"), act_type="gelu")
    launches = {}
    for fusion in (False, True):
        with place("standin", kind="NaiveEngine") as context:
            launches[fusion] = run(symbol, (4, 9), context(0), grad_req="null", fusion=fusion)[1]
    assert launches[True] == 1
    assert launches[False] > 100


@pytest.mark.shows("MXNET_USE_FUSION")
def test_variables_switch_the_fusion_off(monkeypatch: pytest.MonkeyPatch):
    """``MXNET_USE_FUSION=0`` and ``WEFTPLAN_KERNELS=numpy`` disable the fusion, which a plan otherwise notes."""
    note = next(one for one in planned(residual(), (2, 4, 5, 6)).memory.passes if one.name == NAME)
    assert note.text.startswith(NAME)
    assert note.changed == "fused 15 elementwise nodes into 8"
    monkeypatch.setenv("MXNET_USE_FUSION", "0")
    off = plan_symbol(residual(), {"data": (2, 4, 5, 6)}, context=mx.gpu(0))
    assert not groups(off.graph)
    monkeypatch.delenv("MXNET_USE_FUSION")
    monkeypatch.setenv("WEFTPLAN_KERNELS", "numpy")
    off = plan_symbol(residual(), {"data": (2, 4, 5, 6)}, context=mx.gpu(0))
    assert not groups(off.graph)


@pytest.mark.parametrize("context", [mx.cpu(), mx.sim(0)])
def test_other_devices_have_no_such_pass(context: Any):
    """Plans for hosts and simulated devices fuse no elementwise nodes, and do not mention the pass."""
    plan = plan_symbol(residual(), {"data": (2, 4, 5, 6)}, grad_req="write", context=context)
    assert not groups(plan.graph)
    assert NAME not in {one.name for one in plan.memory.passes}


def test_a_node_on_the_host_is_not_fused():
    """Nodes are fused with nodes on the same GPU only, and nodes on the host are not fused."""
    with mx.AttrScope(ctx_group="first"):
        x = mx.sym.exp(mx.sym.Variable("data") * 2.0)
    with mx.AttrScope(ctx_group="second"):
        x = mx.sym.sqrt(x + 1.0) * 3.0
    for second in (mx.cpu(), mx.gpu(1)):
        plan = plan_symbol(x, {"data": (3, 4)}, context=mx.gpu(0), group2ctx={"first": mx.gpu(0), "second": second})
        members = [[one.op.name for one in group.members] for group in groups(plan.graph)]
        remaining = [["_plus_scalar", "sqrt", "_mul_scalar"]] if second != mx.cpu() else []
        assert members == [["_mul_scalar", "exp"], *remaining]


def test_a_group_waits_for_no_node_that_waits_for_it():
    """Two nodes are not fused if a layer between them reads the first and is read by the second."""
    x = mx.sym.Variable("data") * 2.0 + 1.0
    y = mx.sym.Activation(mx.sym.FullyConnected(x, num_hidden=5, name="layer"), act_type="tanh") * 0.5 + x
    actual = planned(y, (3, 5), grad_req="null")
    assert [len(group.members) for group in groups(actual.graph)] == [2, 4]
    with place("standin", kind="NaiveEngine") as context:
        assert_same_bits(run(y, (3, 5), context(0))[0], run(y, (3, 5), context(0), fusion=False)[0])


def test_memory_of_long_lived_results_stays():
    """Fusion does not raise the peak by keeping two inputs alive in place of their product, which is read late."""
    data = mx.sym.Variable("data")
    left, right = mx.sym.dot(data, data), mx.sym.dot(data, data, transpose_a=True)
    early = left * right
    late = data
    for _ in range(4):
        late = mx.sym.dot(late, data)
    symbol = mx.sym.sqrt(mx.sym.square(late)) + early
    peaks = {fusion: planned(symbol, (64, 64), grad_req="null", fusion=fusion).memory.peak for fusion in (False, True)}
    assert groups(planned(symbol, (64, 64), grad_req="null").graph)
    assert peaks[True] <= peaks[False]


def test_forced_recomputation_keeps_nodes_apart():
    """A node with forced recomputation is not fused with a node without it."""
    with mx.AttrScope(__force_mirroring__="1"):
        x = mx.sym.exp(mx.sym.Variable("data"))
    assert not groups(planned(x + 1.0, (3, 4), grad_req="null").graph)


@pytest.mark.parametrize("recompute", ["mxnet", "echo", "sqrt"])
@pytest.mark.parametrize("name", ["residual", "gelu", "recurrent"])
def test_same_bits_under_recomputation(name: str, recompute: str):
    """Fused graphs with recomputation compute the bits of unfused graphs without it."""
    make, shape = NETWORKS[name]
    with place("standin", kind="NaiveEngine") as context:
        assert_same_bits(run(make(), shape, context(0), fusion=False)[0],
                         run(make(), shape, context(0), recompute=recompute)[0])  # fmt: skip


def test_a_budget_takes_the_better_of_both_forms():
    """A plan meets a budget of 40 % of the plain peak, and gives the bits of the plan without a budget."""
    symbol, shape = feed_forward(*["gelu", "tanh"] * 4), (8, 16, 7)
    with place("standin", kind="NaiveEngine") as context:
        plain, _, executor = run(symbol, shape, context(0))
        plan = executor.memory_plan
        budget = sum(plan.external_bytes.values()) + int(0.4 * plan.peak)
        spent, _, executor = run(symbol, shape, context(0), budget=budget, spill=False)
        assert executor.memory_plan.total <= budget < plan.total
        assert_same_bits(plain, spent)


def test_unfused_nodes_are_those_of_the_symbol():
    """``unfused`` returns the nodes of the symbol: the same arguments, and the operators of an unfused plan."""
    for name in ("residual", "activations", "recurrent"):
        make, shape = NETWORKS[name]
        symbol = make()
        graph = planned(symbol, shape, grad_req="null").graph
        assert groups(graph)
        repeated = mx.sym.Group([mx.symbol.Symbol([entry]) for entry in unfused(graph, graph.outputs)])
        assert sorted(repeated.list_arguments()) == sorted(symbol.list_arguments())
        plain = plan_symbol(symbol, {"data": shape}, options=PlanOptions(fusion=False)).graph
        redone = plan_symbol(repeated, {"data": shape}, options=PlanOptions(fusion=False)).graph
        assert operators(redone) == operators(plain)


def test_hidden_members_are_named():
    """``hidden_members`` names the nodes whose outputs do not exist, for monitors."""
    graph = planned(residual(), (2, 4, 5, 6), grad_req="null").graph
    hidden = hidden_members(graph.nodes)
    assert {"anorm1", "anorm2"} <= set(hidden)
    assert "arelu1" not in hidden


def test_unaligned_arrays_are_computed_one_by_one():
    """A fused node computes the same bits from an unaligned slice as from an aligned one."""
    symbol = mx.sym.exp(mx.sym.Variable("data") * 2.0) + 1.0
    values = np.linspace(-1, 1, 13).astype(np.float32)
    with place("standin", kind="NaiveEngine") as context:
        results = []
        for start in (0, 1):
            whole = mx.nd.zeros((14,), ctx=context(0))
            whole[start : start + 13] = values
            executor = symbol.bind(context(0), {"data": whole[start : start + 13]}, grad_req="null")
            results.append(executor.forward()[0].asnumpy().tobytes())
    assert results[0] == results[1]
