"""Depthwise convolutions fused with the batch norms around them: equal bits, less memory, and unfused blocks."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.kernels.compiled.target import host
from weftplan.ops.core.schema import Req
from weftplan.ops.fusion.depthwise_block import BLOCK, BLOCK_GRADIENT
from weftplan.ops.fusion.normalize import NORMALIZE
from weftplan.planner import PlanOptions, plan_symbol
from weftplan.planner.validation import validate

HOST = host()
pytestmark = pytest.mark.skipif(isinstance(HOST, str), reason=f"no compiled kernels: {HOST}")
SHAPE = (2, 6, 12, 14)


def norm(data: Any, name: str, relu: bool = True, **more: Any) -> Any:
    """Return a batch norm, followed by a relu if ``relu``."""
    net = mx.sym.BatchNorm(data, name=name, **{"fix_gamma": False, **more})
    return mx.sym.Activation(net, act_type="relu", name=f"{name}_relu") if relu else net


def depthwise(data: Any, name: str = "dw", **more: Any) -> Any:
    """Return a depthwise convolution of six channels."""
    usual = {"kernel": (3, 3), "pad": (1, 1), "num_filter": 6, "num_group": 6, "no_bias": True}
    return mx.sym.Convolution(data, name=name, **{**usual, **more})


def pointwise(data: Any, name: str) -> Any:
    """Return a 1x1 convolution of six filters."""
    return mx.sym.Convolution(data, kernel=(1, 1), num_filter=6, no_bias=True, name=name)


def network(stride: int = 1, relu: bool = True, first: Any = None, **more: Any) -> Any:
    """Return pointwise, norm, relu, depthwise, norm, relu, pointwise and a loss.

    ``first`` are more arguments of the first norm, and ``more`` of the depthwise convolution.
    """
    net = norm(pointwise(mx.sym.Variable("data"), "p1"), "n1", **(first or {}))
    net = norm(depthwise(net, stride=(stride, stride), **more), "n2", relu=relu)
    return mx.sym.LinearRegressionOutput(mx.sym.sum(pointwise(net, "p2"), axis=(2, 3)), mx.sym.Variable("label"))


def operators(net: Any, grad_req: Any = "write", **options: Any) -> list[str]:
    """Return the names of the operators of a planned graph."""
    planned = plan_symbol(net, {"data": SHAPE}, grad_req=grad_req, options=PlanOptions(**options))
    validate(planned)
    return [node.op.name for node in planned.graph.nodes if node.op is not None]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("relu", [True, False])
def test_training_joins_the_block_in_both_directions(stride: int, relu: bool) -> None:
    """Training fuses the block into one forward and one backward node; the plan notes this; its peak is smaller."""
    net = network(stride, relu)
    actual = operators(net)
    assert actual.count(BLOCK.name) == actual.count(BLOCK_GRADIENT.name) == 1
    assert not [name for name in actual if "BatchNorm" in name and name not in (BLOCK.name, BLOCK_GRADIENT.name)]
    joined, apart = (
        plan_symbol(net, {"data": SHAPE}, grad_req="write", options=PlanOptions(fusion=fusion)).memory
        for fusion in (True, False)
    )
    assert any("joined 1 depthwise convolution" in note for note in joined.notes)
    assert joined.peak < apart.peak


def test_blocks_that_stay_unfused() -> None:
    """Nothing is fused without gradients or compiled kernels, for other layers, or if another node reads a result."""
    net = network()
    assert BLOCK.name not in operators(net, grad_req="null")
    assert BLOCK.name not in operators(net, kernels="numpy")
    assert BLOCK.name not in operators(net, fusion=False)
    assert BLOCK.name not in operators(net, compat="mxnet")
    for between in ("n1_relu_output", "dw_output"):
        both = mx.sym.Group([net, mx.sym.BlockGrad(net.get_internals()[between])])
        assert BLOCK.name not in operators(both), between
    for changes in ({"num_group": 3}, {"kernel": (5, 5), "pad": (2, 2)}, {"no_bias": False}):
        assert BLOCK.name not in operators(network(**changes)), changes
    assert BLOCK.name not in operators(network(first={"relu": False}))
    frozen = {
        name: "null" if name.startswith(("n1", "p1")) or name == "data" else "write" for name in net.list_arguments()
    }
    assert BLOCK.name not in operators(net, grad_req=frozen)  # the first batch norm has no gradient


def bare_block(data: Any) -> Any:
    """Return norm, relu, depthwise, norm and relu of ``data``, and a loss."""
    net = norm(depthwise(norm(data, "n1")), "n2")
    return mx.sym.LinearRegressionOutput(mx.sym.sum(net, axis=(2, 3)), mx.sym.Variable("label"))


@pytest.mark.parametrize("data", [mx.sym.Variable("data"), mx.sym.zeros_like(mx.sym.Variable("data"))])
def test_a_block_whose_data_needs_no_gradient_stays_apart(data: Any) -> None:
    """A block whose data needs no gradient stays unfused, because the fused gradient reuses that gradient's memory."""
    net = bare_block(data)
    requests = {name: "null" if name == "data" else "write" for name in net.list_arguments()}
    assert BLOCK.name not in operators(net, grad_req=requests)
    assert (BLOCK.name in operators(net)) == (data.name == "data")
    executor = net.simple_bind(mx.cpu(), grad_req=requests, data=SHAPE)
    executor.forward(is_train=True)
    executor.backward()
    mx.nd.waitall()


def test_images_of_one_pixel_stay_apart() -> None:
    """Blocks on images of one pixel stay unfused, because NumPy normalizes them with another order of additions."""
    planned = plan_symbol(network(), {"data": (4, 6, 1, 1)}, grad_req="write")
    assert BLOCK.name not in [node.op.name for node in planned.graph.nodes if node.op is not None]


def test_a_shared_weight_keeps_its_block_apart() -> None:
    """Two blocks that share a depthwise weight stay unfused."""
    weight = mx.sym.Variable("w")
    net = norm(pointwise(mx.sym.Variable("data"), "p1"), "n1")
    for number in (2, 3):
        net = norm(depthwise(net, f"dw{number}", weight=weight), f"n{number}")
    net = mx.sym.LinearRegressionOutput(mx.sym.sum(net, axis=(2, 3)), mx.sym.Variable("label"))
    assert BLOCK.name not in operators(net)


def values(
    net: Any, monkeypatch: pytest.MonkeyPatch, fusion: bool, grad_req: Any = "write", recompute: str = "off"
) -> dict[str, bytes]:
    """Run three training steps and one inference; return the bytes of outputs, gradients and states."""
    monkeypatch.setenv("MXNET_USE_FUSION", str(int(fusion)))
    rng = np.random.default_rng(5)
    options = PlanOptions.from_environment(recompute=recompute)
    executor = net.simple_bind(mx.cpu(), grad_req=grad_req, plan_options=options, data=SHAPE)
    for array in (*executor.arg_dict.values(), *executor.aux_dict.values()):
        array[:] = rng.uniform(0.2, 1, array.shape)
    for array in executor.grad_dict.values():
        if array is not None:
            array[:] = 0
    for _ in range(3):
        executor.forward(is_train=True, data=mx.nd.array(rng.normal(size=SHAPE)))
        executor.backward()
    by_name = {name: array.asnumpy().tobytes() for name, array in executor.grad_dict.items() if array is not None}
    by_name |= {name: array.asnumpy().tobytes() for name, array in executor.aux_dict.items()}
    by_name["trained"] = executor.outputs[0].asnumpy().tobytes()
    by_name["not trained"] = executor.forward(is_train=False)[0].asnumpy().tobytes()
    return by_name


@pytest.mark.shows("MXNET_USE_FUSION")
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("request_", ["write", "add"])
def test_same_bits_with_blocks_and_without(stride: int, request_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, gradients and states have the bits of unfused nodes, also if gradients are added."""
    net = network(stride, relu=stride == 1)
    assert values(net, monkeypatch, True, request_) == values(net, monkeypatch, False, request_)


def test_some_gradients_may_be_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused block with a fixed weight and a fixed beta computes the other gradients of the unfused nodes."""
    net = network()
    wanted = {
        name: "null" if name in ("dw_weight", "n2_beta", "label", "data") else "write" for name in net.list_arguments()
    }
    assert BLOCK_GRADIENT.name in operators(net, grad_req=wanted)
    assert values(net, monkeypatch, True, wanted) == values(net, monkeypatch, False, wanted)


def stack(count: int) -> Any:
    """Return ``count`` blocks in sequence, and a loss."""
    net = mx.sym.Variable("data")
    for number in range(count):
        net = norm(pointwise(net, f"p{number}"), f"n{number}")
        net = norm(depthwise(net, f"d{number}"), f"m{number}")
    return mx.sym.LinearRegressionOutput(mx.sym.sum(net, axis=(2, 3)), mx.sym.Variable("label"))


@pytest.mark.parametrize(("recompute", "count"), [("mxnet", 14), ("echo", 14), ("sqrt", 6), ("cheap", 6)])
def test_same_bits_where_blocks_are_computed_again(recompute: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training with recomputed blocks has the bits of training without recomputation."""
    net = stack(count)
    planned = plan_symbol(net, {"data": SHAPE}, grad_req="write", options=PlanOptions(recompute=recompute))
    graph = planned.graph
    blocks = [nid for nid, node in enumerate(graph.nodes) if node.op is BLOCK]
    assert any(planned.requests[e] == Req.NULL for nid in blocks for e in range(graph.row[nid], graph.row[nid + 1]))
    assert NORMALIZE in [node.op for node in graph.nodes]
    assert values(net, monkeypatch, True, recompute=recompute) == values(net, monkeypatch, True)


def test_the_optimized_symbol_has_the_nodes_of_a_block(tmp_path: Any) -> None:
    """The symbol that an executor returns, and its file, have the unfused nodes."""
    net = network()
    executor = net.simple_bind(mx.cpu(), data=SHAPE)
    back = executor.get_optimized_symbol()
    assert back.list_arguments() == net.list_arguments()
    assert back.list_auxiliary_states() == net.list_auxiliary_states()
    assert {"n1_relu_output", "dw_output", "n2_relu_output"} <= set(back.get_internals().list_outputs())
    back.save(str(tmp_path / "net.json"))
    assert mx.sym.load(str(tmp_path / "net.json")).list_arguments() == net.list_arguments()


def test_a_monitor_names_what_it_cannot_show() -> None:
    """A monitor warns with the names of nodes inside a block, whose results it cannot show after a run."""
    executor = network().simple_bind(mx.cpu(), data=SHAPE)
    executor.forward()
    with pytest.warns(mx.errors.ConfigWarning, match=r"n1_relu.*dw"):
        executor.set_monitor_callback(lambda name, array: None)


def test_stored_plan_has_the_blocks() -> None:
    """A plan that was written to bytes and read again has the same nodes."""
    from weftplan.planner.symbolic.stored_plans import dumped, loaded
    from weftplan.symbol.node import depth_first_order

    net = network()
    planned = plan_symbol(net, {"data": SHAPE}, grad_req="write")
    order = depth_first_order(entry[0] for entry in net.entries)
    reloaded = loaded(dumped(planned, order), order[0])
    names = [(node.op and node.op.name, node.name) for node in planned.graph.nodes]
    assert [(node.op and node.op.name, node.name) for node in reloaded.graph.nodes] == names
    assert (BLOCK.name, "n2_relu") in names


def test_mobilenet_joins_its_thirteen_blocks() -> None:
    """Training of MobileNet fuses all its thirteen blocks."""
    from weftplan import models

    planned = plan_symbol(models.get("mobilenet"), models.input_shapes("mobilenet", 1), grad_req="write")
    actual = [node.op.name for node in planned.graph.nodes if node.op is not None]
    assert actual.count(BLOCK.name) == actual.count(BLOCK_GRADIENT.name) == 13


@pytest.mark.parametrize("recompute", ["mxnet", "echo", "sqrt", "cheap"])
def test_recomputing_takes_the_smaller_of_both_plans(recompute: str) -> None:
    """With recomputation a fused plan is never larger than an unfused one.

    A fused node can be repeated only as a whole, so the unfused graph may need less memory; the planner takes it then.
    """
    from weftplan import models

    symbol, shapes = models.get("mobilenet"), models.input_shapes("mobilenet", 8)
    joined, apart = (
        plan_symbol(symbol, shapes, grad_req="write", options=PlanOptions(recompute=recompute, fusion=fusion)).memory
        for fusion in (True, False)
    )
    assert joined.peak <= apart.peak


def mobilenet(batch: int = 2, **options: Any) -> Any:
    """Plan a training step of MobileNet."""
    from weftplan import models

    symbol, shapes = models.get("mobilenet"), models.input_shapes("mobilenet", batch)
    return plan_symbol(symbol, shapes, grad_req="write", options=PlanOptions(**options))


@pytest.mark.parametrize("recompute", ["mxnet", "echo"])
def test_rules_keep_the_blocks_of_mobilenet(recompute: str) -> None:
    """The policies ``mxnet`` and ``echo`` lower the peak of MobileNet by 30 % or more with all blocks fused.

    The results of blocks are recomputed in one pass, for at most 5 % more modelled time.
    """
    usual, planned = mobilenet(), mobilenet(recompute=recompute)
    validate(planned)
    operators = [node.op for node in planned.graph.nodes]
    assert operators.count(BLOCK_GRADIENT) == operators.count(NORMALIZE) == 13
    assert planned.memory.peak <= 0.7 * usual.memory.peak
    assert 0.0 < planned.memory.more_time <= 0.05
    assert any("made 13 results of blocks again" in note for note in planned.memory.notes)


def seconds(planned: Any) -> float:
    """Return the modelled seconds of one step."""
    from weftplan.planner.program import Program
    from weftplan.planner.symbolic.node_seconds import node_seconds

    steps, contexts = planned.order, tuple(dict.fromkeys(planned.devices))
    program = Program(
        graph=planned.graph, order=steps, num_forward=planned.num_forward_nodes, shapes=planned.shapes,
        dtypes=planned.dtypes, contexts=contexts, device=[contexts.index(one) for one in planned.devices],
        nbytes=[prod(shape) * dtype.itemsize for shape, dtype in zip(planned.shapes, planned.dtypes, strict=True)],
        gradients=frozenset(planned.gradients.values()), added=frozenset(), workspaces={}, external_bytes={},
    )  # fmt: skip
    return sum(node_seconds(program))


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_a_budget_takes_the_form_of_least_modelled_time(share: float) -> None:
    """A plan within a budget takes less modelled time than the unfused plan within it."""
    budget = int(share * mobilenet().memory.peak)
    planned, unfused = mobilenet(budget=budget, spill=False), mobilenet(budget=budget, spill=False, fusion=False)
    validate(planned)
    assert planned.memory.peak <= budget
    assert seconds(planned) < seconds(unfused)


def test_result_read_for_its_shape_is_not_recomputed() -> None:
    """The result of a block is not recomputed if the backward part, here of a sum, reads its shape only."""
    planned = plan_symbol(bare_block(mx.sym.Variable("data")), {"data": SHAPE}, grad_req="write",
                          options=PlanOptions(recompute="mxnet"))  # fmt: skip
    assert NORMALIZE not in [node.op for node in planned.graph.nodes]
