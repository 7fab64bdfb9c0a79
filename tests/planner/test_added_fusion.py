"""The fusion that CONTRIBUTING.md adds as an example, and the checks of passes and their edits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops.core import registry
from weftplan.planner import PlanOptions, plan_symbol, validate
from weftplan.planner.symbolic.network import Edit, Network, translated
from weftplan.planner.symbolic.passes import pass_manager as passes
from weftplan.planner.symbolic.passes.graph_pass import BACKWARD, FORWARD, PLACED, SIZES, GraphPass, PassSettings

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
SHAPE = (2, 3, 8, 9)


@pytest.fixture
def guide_names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the guide's code, add its pass to the list of passes, and return the names that the code defines."""
    section = GUIDE.read_text().split("## Add a fusion")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names: dict[str, Any] = {}
    monkeypatch.setattr(registry, "_PLANNERS", dict(registry._PLANNERS))
    exec(code, names)
    place = [one.name for one in passes.PASSES].index("layers joined") + 1
    monkeypatch.setattr(passes, "PASSES", [*passes.PASSES[:place], names["PASS"], *passes.PASSES[place:]])
    monkeypatch.setattr("weftplan.planner.symbolic.passes.pass_manager.PASSES", passes.PASSES)
    return names


def network(**scale: Any) -> Any:
    """Return two convolutions, each followed by a scale, and a pooling; ``scale`` are more arguments of the scales."""
    net = mx.sym.Variable("data")
    for k, factor in enumerate((0.5, -3.0)):
        net = mx.sym.Convolution(net, kernel=(3, 3), pad=(1, 1), num_filter=4, name=f"c{k}")
        net = mx.sym._mul_scalar(net, scalar=factor, name=f"s{k}", **scale)
    return mx.sym.Pooling(net, kernel=(2, 2), pool_type="avg", name="end")


def operators(net: Any, **options: Any) -> list[str]:
    """Return the names of the operators of a planned graph."""
    planned = plan_symbol(net, {"data": SHAPE}, options=PlanOptions(**options))
    validate(planned)
    return [node.op.name for node in planned.graph.nodes if node.op is not None]


def values(net: Any, grad_req: str, *, fusion: bool) -> tuple[list[bytes], Any]:
    """Run one step; return the bytes of outputs and gradients, and the executor."""
    options = PlanOptions(fusion=fusion, kernels="numpy")  # the guide's kernel uses NumPy
    executor = net.simple_bind(mx.cpu(), grad_req=grad_req, plan_options=options, data=SHAPE)
    rng = np.random.default_rng(3)
    for array in executor.arg_arrays:
        array[:] = rng.normal(size=array.shape)
    executor.forward(is_train=grad_req != "null")
    if grad_req != "null":
        executor.backward(mx.nd.ones(executor.outputs[0].shape))
    arrays = [*executor.outputs, *(grad for grad in executor.grad_arrays if grad is not None)]
    return [array.asnumpy().tobytes() for array in arrays], executor


def test_guide_fuses_scales(guide_names: dict[str, Any]) -> None:
    """The pass fuses each scale with its convolution, unless it is switched off or another node reads a convolution.

    The plan's notes name the pass. Nodes with forced recomputation stay unfused.
    """
    assert operators(network()) == ["Convolution+scale"] * 2 + ["Pooling"]
    assert operators(network(), fusion=False) == ["Convolution", "_mul_scalar"] * 2 + ["Pooling"]
    text = "\n".join(one.text for one in plan_symbol(network(), {"data": SHAPE}).memory.passes)
    assert "scales fused: fused 2 convolutions with a scale (MXNET_USE_FUSION)" in text
    net = network()
    shared = mx.sym.Group([net, net.get_internals()["c0_output"]])
    assert operators(shared).count("Convolution+scale") == 1
    assert operators(network(attr={"__force_mirroring__": "1"})).count("Convolution+scale") == 0


@pytest.mark.parametrize("grad_req", ["null", "write", "add"])
def test_same_bits_and_the_symbol_comes_back(guide_names: dict[str, Any], grad_req: str) -> None:
    """A fused graph computes the bits of the unfused graph, and the executor's symbol has the unfused nodes."""
    fused, executor = values(network(), grad_req, fusion=True)
    assert fused == values(network(), grad_req, fusion=False)[0]
    assert any(node.op is guide_names["SCALED"] for node in executor.planned.graph.nodes)
    names = executor.get_optimized_symbol().get_internals().list_outputs()
    assert {"c0_output", "s0_output", "c1_output", "s1_output", "end_output"} <= set(names)
    with pytest.warns(mx.errors.ConfigWarning, match="c0.*c1"):
        executor.set_monitor_callback(lambda name, array: None)


def settings(**options: Any) -> PassSettings:
    """Return the settings of a plan with these options."""
    return PassSettings(options=PlanOptions(**options), context=Context("cpu", 0), shapes={"data": SHAPE})


def start() -> Network:
    """Return the graph before the first pass."""
    return translated(network(), grad_req="write", context=Context("cpu", 0))


def test_each_pass_is_timed_and_gives_its_facts() -> None:
    """``run_passes`` runs all enabled passes in order, measures their seconds, and returns shapes and reports."""
    seconds: dict[str, float] = {}
    result = passes.run_passes(start(), settings(), checked=True, seconds=seconds)
    wanted = [one.name for one in passes.PASSES if one.enabled(settings())]
    assert list(seconds) == wanted
    assert all(value >= 0 for value in seconds.values())
    assert result.wanted
    assert len(result.shapes) == result.graph.num_entries
    shown = [one.name for one in passes.PASSES if one.shown and one.enabled(settings())]
    assert [one.name for one in result.reports] == shown
    off = passes.run_passes(start(), settings(fusion=False, eliminate_common_expr=False))
    assert off.reports == ()


def test_a_pass_comes_after_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that needs shapes before they are inferred raises a PlanError that names the pass."""
    early = replace(next(one for one in passes.PASSES if one.needs), needs=frozenset((SIZES,)))
    monkeypatch.setattr(passes, "PASSES", [early, *passes.PASSES])
    with pytest.raises(PlanError, match=f"pass '{early.name}' needs sizes"):
        passes.run_passes(start(), settings())


@pytest.mark.shows("WEFTPLAN_ENGINE_DEBUG")
def test_a_graph_that_contradicts_itself_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In debug mode a pass that makes a cyclic graph raises a PlanError that names the pass."""

    def breaks(network: Network, settings: PassSettings) -> tuple[Network, str]:
        graph = network.graph
        graph.inputs[-1] = [graph.row[-1] - 1]
        return network, ""

    wrong = GraphPass(name="breaks it", switch="none", run=breaks)
    monkeypatch.setattr(passes, "PASSES", [*passes.PASSES, wrong])
    with pytest.raises(PlanError, match=r"after pass 'breaks it': node .* needs something that comes after it"):
        passes.run_passes(start(), settings(), checked=True)
    monkeypatch.setenv("WEFTPLAN_ENGINE_DEBUG", "1")
    with pytest.raises(PlanError, match="after pass 'breaks it'"):
        plan_symbol(network(), {"data": SHAPE})


def test_an_edit_leaves_the_given_network_as_it_is() -> None:
    """An edit changes only its copy of the network, and removes nodes that are no longer needed."""
    inputs = start()
    before = ([list(ins) for ins in inputs.graph.inputs], list(inputs.graph.names), list(inputs.graph.outputs))
    edit = Edit(inputs)
    scale = inputs.graph.names.index("s0")
    exp = registry.get("exp")
    result = edit.add(
        exp, "instead", inputs=inputs.graph.inputs[scale], main=scale, params=registry.parse_params(exp, {})
    )
    edit.fuse((scale,), {inputs.graph.row[scale]: result})
    after = edit.finish()
    after.check()
    assert "s0" not in after.graph.names
    assert "instead" in after.graph.names
    assert before == ([list(ins) for ins in inputs.graph.inputs], list(inputs.graph.names), list(inputs.graph.outputs))


def _without_controls(network: Network, settings: PassSettings) -> tuple[Network, str]:
    """A pass that removes all control dependencies."""
    edit = Edit(network)
    edit.controls = [[] for _ in edit.controls]
    return edit.finish(), "dropped what nodes wait for"


def _elsewhere(network: Network, settings: PassSettings) -> tuple[Network, str]:
    """A pass that moves all nodes to another device."""
    edit = Edit(network)
    edit.devices = [Context("cpu", 1)] * len(edit.devices)
    return edit.finish(), "moved all nodes"


def _renamed(network: Network, settings: PassSettings) -> tuple[Network, str]:
    """A pass that renames all arguments."""
    return replace(network, arguments={f"my_{name}": nid for name, nid in network.arguments.items()}), "renamed"


def _larger(network: Network, settings: PassSettings) -> tuple[Network, str]:
    """A pass that appends an axis of length 1 to all shapes."""
    return replace(network, shapes=[(*shape, 1) for shape in network.shapes]), "gave arrays an axis more"


@pytest.mark.parametrize(
    ("run", "part"),
    [(_without_controls, BACKWARD), (_elsewhere, PLACED), (_renamed, "variables"), (_larger, SIZES)],
)
@pytest.mark.shows("WEFTPLAN_ENGINE_DEBUG")
def test_a_pass_changes_only_what_its_record_lists(
    run: Callable[[Network, PassSettings], tuple[Network, str]], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In debug mode a pass that changes more than its record lists raises an error naming the pass and the part."""
    wrong = GraphPass(name="does more", switch="none", run=run, changes=frozenset((FORWARD,)))
    monkeypatch.setattr(passes, "PASSES", [*passes.PASSES, wrong])
    with pytest.raises(PlanError, match=f"pass 'does more' has changed {part}: its record must list that"):
        passes.run_passes(start(), settings(), checked=True)
    allowed = replace(wrong, changes=frozenset((FORWARD, part)))
    monkeypatch.setattr(passes, "PASSES", [*passes.PASSES[:-1], allowed])
    passes.run_passes(start(), settings(), checked=True)
