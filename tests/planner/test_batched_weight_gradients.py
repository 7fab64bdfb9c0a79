"""Gradients of shared FullyConnected weights: one node computes the gradients of a few layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.ops.fusion.shared_gradient import SHARED_GRADIENT
from weftplan.planner import PlanOptions, plan_symbol, validate
from weftplan.planner.symbolic.passes import sizes
from weftplan.planner.symbolic.passes.batch_weight_gradients import MAX_LAYERS, ROWS

BATCH, WIDTH, HIDDEN, STEPS = 4, 24, 12, 14


def recurrent(steps: int = STEPS, *, hidden: int = HIDDEN, no_bias: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return an unrolled recurrent layer, whose steps share their weights, and its input shapes.

    Its inputs are slices of one array.
    """
    kinds = ("weight",) if no_bias else ("weight", "bias")
    x_weights, h_weights = ([mx.sym.Variable(f"{name}_{kind}") for kind in kinds] for name in "xh")
    h = mx.sym.Variable("begin")
    for x in mx.sym.SliceChannel(mx.sym.Variable("data"), num_outputs=steps, axis=1, squeeze_axis=True):
        of_x = mx.sym.FullyConnected(x, *x_weights, num_hidden=hidden, no_bias=no_bias)
        h = mx.sym.tanh(of_x + mx.sym.FullyConnected(h, *h_weights, num_hidden=hidden, no_bias=no_bias))
    return mx.sym.MakeLoss(mx.sym.sum(h * h)), {"data": (BATCH, steps, WIDTH), "begin": (BATCH, hidden)}


def towers(count: int = STEPS) -> tuple[Any, dict[str, Any]]:
    """Return parallel layers that share one weight, each with its own data of three axes, and their input shapes."""
    weight, bias = mx.sym.Variable("weight"), mx.sym.Variable("bias")
    sources = [mx.sym.Variable(f"data{k}") for k in range(count)]
    outs = [mx.sym.FullyConnected(source, weight, bias, num_hidden=HIDDEN) for source in sources]
    return mx.sym.MakeLoss(mx.sym.sum(mx.sym.add_n(*(mx.sym.tanh(out) for out in outs)))), {
        f"data{k}": (BATCH, 2, WIDTH // 2) for k in range(count)
    }


def stacked(count: int = STEPS) -> tuple[Any, dict[str, Any]]:
    """Return layers in sequence that share one weight, which the loss also reads, and the input shape."""
    weight = mx.sym.Variable("weight", shape=(HIDDEN, HIDDEN))
    net = mx.sym.Variable("data")
    for _ in range(count):
        net = mx.sym.tanh(mx.sym.FullyConnected(net, weight, num_hidden=HIDDEN, no_bias=True))
    return mx.sym.MakeLoss(mx.sym.sum(net) + mx.sym.sum(weight * weight)), {"data": (BATCH, HIDDEN)}


def two_shapes(count: int = STEPS) -> tuple[Any, dict[str, Any]]:
    """Return layers that share one weight but have two numbers of rows, and their input shapes."""
    weight = mx.sym.Variable("weight")
    sources = [mx.sym.Variable(f"data{k}") for k in range(count)]
    outs = [mx.sym.FullyConnected(source, weight, num_hidden=HIDDEN, no_bias=True) for source in sources]
    net = mx.sym.add_n(*(mx.sym.sum(mx.sym.tanh(out)) for out in outs))
    return mx.sym.MakeLoss(net), {f"data{k}": (BATCH + k % 2, WIDTH) for k in range(count)}


def groups(net: Any, shapes: Any, grad_req: Any = "write", **options: Any) -> list[Any]:
    """Return the nodes of a valid plan that compute the gradients of several layers."""
    planned = plan_symbol(net, shapes, grad_req=grad_req, options=PlanOptions(**options))
    validate(planned)
    return [node for node in planned.graph.nodes if node.op is SHARED_GRADIENT]


def run(net: Any, shapes: Any, grad_req: str = "write", dtype: str = "float64") -> tuple[dict[str, Any], Any]:
    """Return the gradients of one step by name, and the executor.

    With ``grad_req="add"`` the gradient arrays start with random values.
    """
    rng = np.random.default_rng(3)
    names = net.list_arguments()
    exe = net.simple_bind(mx.cpu(), grad_req=grad_req, type_dict=dict.fromkeys(names, dtype), **shapes)
    for name in names:
        exe.arg_dict[name][:] = 0.3 * rng.standard_normal(exe.arg_dict[name].shape)
        if grad_req == "add":
            exe.grad_dict[name][:] = rng.standard_normal(exe.grad_dict[name].shape)
    exe.forward(is_train=True)
    exe.backward()
    by_name = {name: array.asnumpy() for name, array in exe.grad_dict.items()}
    assert exe.allocated_bytes == exe.memory_plan.peak
    return by_name, exe


def test_gradients_of_a_recurrent_layer_are_batched():
    """Nodes for the weight of the data also compute the data's gradients; those for the recurrent weight do not.

    Each step is in one node, and nodes have almost equal numbers of steps.
    """
    net, shapes = recurrent()
    actual = groups(net, shapes)
    assert {node.params["whole"] for node in actual} == {True, False}
    for whole, most in ((True, -(-WIDTH // BATCH)), (False, HIDDEN // BATCH)):
        counts = [node.params["count"] for node in actual if node.params["whole"] is whole]
        assert sum(counts) == STEPS
        assert max(counts) <= most
        assert max(counts) - min(counts) <= 1
    notes = plan_symbol(net, shapes, grad_req="write").memory.notes
    assert any(f"gathered gradients of {2 * STEPS} layers" in note for note in notes)


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("made", [recurrent, lambda: recurrent(no_bias=True), towers, stacked, two_shapes])
@pytest.mark.shows("MXNET_USE_FUSION")
def test_gradients_are_those_without_the_pass(made, grad_req, monkeypatch):
    """Gradients equal those without the pass within rounding, and the allocated bytes equal the plan."""
    net, shapes = made()
    actual, _ = run(net, shapes, grad_req)
    monkeypatch.setenv("MXNET_USE_FUSION", "0")
    wanted, exe = run(net, shapes, grad_req)
    assert not any(node.op is SHARED_GRADIENT for node in exe.planned.graph.nodes)
    for name, array in wanted.items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("wanted", [["h_weight"], ["x_weight", "h_bias"], ["x_bias", "data"], ["begin"]])
def test_gradients_of_some_arguments(wanted):
    """If only some gradients are requested, they equal those of a step with all gradients."""
    net, shapes = recurrent()
    every, _ = run(net, shapes)
    request = {name: "write" if name in wanted else "null" for name in net.list_arguments()}
    exe = net.simple_bind(mx.cpu(), grad_req=request, type_dict=dict.fromkeys(request, "float64"), **shapes)
    rng = np.random.default_rng(3)
    for name in net.list_arguments():
        exe.arg_dict[name][:] = 0.3 * rng.standard_normal(exe.arg_dict[name].shape)
    exe.forward(is_train=True)
    exe.backward()
    for name in wanted:
        np.testing.assert_allclose(exe.grad_dict[name].asnumpy(), every[name], rtol=1e-12, atol=1e-13)
    assert exe.allocated_bytes == exe.memory_plan.peak


def test_gradients_that_are_not_batched():
    """Short sums, many rows, float16, and plans for another framework are not batched."""
    net, shapes = recurrent()
    assert not groups(*recurrent(steps=7))
    assert not groups(net, {**shapes, "data": (WIDTH, STEPS, WIDTH), "begin": (WIDTH, HIDDEN)})
    assert groups(net, {**shapes, "data": (WIDTH - 1, STEPS, WIDTH), "begin": (WIDTH - 1, HIDDEN)})
    for options in ({"fusion": False}, {"compat": "mxnet"}, {"compat": "paddle"}, {"drop_dead_outputs": False}):
        assert not groups(net, shapes, **options)
    halves = plan_symbol(net, shapes, dict.fromkeys(net.list_arguments(), "float16"), grad_req="write")
    assert not any(node.op is SHARED_GRADIENT for node in halves.graph.nodes)
    assert not groups(*two_shapes())


def test_shapes_are_solved_once(monkeypatch):
    """Shapes are inferred once, for the forward graph; shapes of gradients and of new nodes follow from them."""
    solved = []

    def counted(nodes, seeds, *, edges=None, solve=sizes.infer_shapes):
        solved.append(len(nodes))
        return solve(nodes, seeds, edges=edges)

    monkeypatch.setattr(sizes, "infer_shapes", counted)
    for no_bias in (False, True):
        net, shapes = recurrent(no_bias=no_bias)
        planned = plan_symbol(net, shapes, grad_req="write")
        graph = planned.graph
        assert solved.pop() == max(graph.entry_node[e] for e in planned.outputs) + 1
        assert not solved
        for name, eid in planned.gradients.items():
            assert planned.shapes[eid] == planned.shapes[graph.row[planned.arguments[name]]]
        result = [k for k, node in enumerate(graph.nodes) if node.op is SHARED_GRADIENT and node.params["whole"]]
        for k in result:
            count = graph.nodes[k].params["count"]
            data = [planned.shapes[e] for e in graph.inputs[k][count : 2 * count]]
            assert planned.shapes[graph.row[k + 1] - count : graph.row[k + 1]] == data
        assert result


def test_the_largest_groups():
    """Of 40 layers with many rows, each node has 20, because the number of a node's inputs is limited."""
    net, shapes = recurrent(steps=40, hidden=2 * ROWS)
    counts = [node.params["count"] for node in groups(net, shapes, {"h_weight": "write"})]
    assert max(counts) == 20
    assert MAX_LAYERS < ROWS // BATCH


def test_same_bits_on_any_number_of_cores(monkeypatch, four_cores):
    """Gradients have the same bits on one thread and on four cores."""
    net, shapes = recurrent(hidden=512)
    results = []
    for engine in ("NaiveEngine", "ThreadedEnginePerDevice"):
        with mx.engine.using(mx.engine.create(engine)):
            results.append(run(net, {**shapes, "data": (32, STEPS, 256), "begin": (32, 512)}, dtype="float32")[0])
    for name, array in results[0].items():
        assert array.tobytes() == results[1][name].tobytes()
