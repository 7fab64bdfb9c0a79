"""The passes of a plan: what each changes, how plans list them, and how they are switched off."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import weftplan as mx
from weftplan import sym
from weftplan.cli.inspect import command as inspect_command
from weftplan.cli.plan.command import command as plan_command
from weftplan.convert import fold_batch_norm, fold_constants
from weftplan.planner import MemoryPlan, plan_symbol, validate
from weftplan.planner.memory_plan import PassReport
from weftplan.symbol.node import topological_order

SHAPES: Any = {"data": (2, 3, 20, 20)}


def network() -> Any:
    """Return a convolution between batch norms, followed by a relu and two equal nodes."""
    net = sym.BatchNorm(sym.Variable("data"), name="scaled")
    net = sym.Convolution(net, kernel=(3, 3), num_filter=64, no_bias=True, name="layer")
    net = sym.Activation(sym.BatchNorm(net, name="norm"), act_type="relu")
    return sym.tanh(net) * sym.tanh(net) * 2 + 1


def passes(symbol: Any) -> dict[str, PassReport]:
    """Return the passes of a plan by name."""
    return {one.name: one for one in plan_symbol(symbol, SHAPES).memory.passes}


def test_each_pass_says_what_it_changed() -> None:
    """Passes are listed in execution order, with their changes and their switches."""
    actual = list(passes(network()).values())
    assert actual == [
        ("equal expressions merged", "merged 1 node into others that compute the same", "MXNET_ELIMINATE_COMMON_EXPR"),
        ("layers joined", "joined 2 pairs of nodes that follow one another", "MXNET_USE_FUSION"),
        ("shared gradients gathered", "", "MXNET_USE_FUSION"),
        ("depthwise blocks joined", "", "MXNET_USE_FUSION"),
        (
            "dead outputs dropped",
            "left out 2 outputs that nobody reads: 24 B",
            "WEFTPLAN_DROP_DEAD_OUTPUTS",
        ),
    ]
    assert actual[0].text.endswith("that compute the same (MXNET_ELIMINATE_COMMON_EXPR)")


@pytest.mark.parametrize("variable", ["MXNET_ELIMINATE_COMMON_EXPR", "MXNET_USE_FUSION", "WEFTPLAN_DROP_DEAD_OUTPUTS"])
def test_a_variable_switches_a_pass_off(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting the variable of a pass to 0 removes that pass from the list and no other."""
    names = {one.switch for one in passes(network()).values()}
    monkeypatch.setenv(variable, "0")
    assert {one.switch for one in passes(network()).values()} == names - {variable}


def test_pass_without_changes() -> None:
    """A pass that changes nothing is listed with "nothing to change"."""
    actual = passes(sym.tanh(sym.Variable("data")))["dead outputs dropped"]
    assert actual.changed == ""
    assert "nothing to change" in actual.text


@pytest.mark.shows("WEFTPLAN_DROP_DEAD_OUTPUTS")
def test_dead_outputs_are_computed_where_the_pass_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the pass off, unread outputs have planned memory, and results are the same."""
    net = sym.BatchNorm(sym.Variable("data"), name="norm", fix_gamma=False)
    by_name = {}
    for drop in (True, False):
        monkeypatch.setenv("WEFTPLAN_DROP_DEAD_OUTPUTS", str(int(drop)))
        bound = net.simple_bind(mx.cpu(), grad_req="null", **SHAPES)
        validate(bound.planned)
        assert bound.allocated_bytes == bound.memory_plan.peak
        bound.arg_dict["data"][:] = np.arange(2400.0).reshape(SHAPES["data"])
        bound.arg_dict["norm_gamma"][:] = 1
        bound.aux_dict["norm_moving_var"][:] = 1
        by_name[drop] = bound.forward()[0].asnumpy(), bound.memory_plan.peak
    np.testing.assert_array_equal(by_name[True][0], by_name[False][0])
    assert by_name[True][1] < by_name[False][1]


@pytest.mark.parametrize("name", ["resnet18", "lstm", "mobilenet"])
def test_no_pass_touches_the_nodes_of_the_symbol(name: str) -> None:
    """Planning does not change the nodes of the symbol, and planning again gives the same plan."""
    net, shapes = mx.models.get(name), mx.models.input_shapes(name, 8)
    wanted = dict.fromkeys(set(net.list_arguments()) - set(shapes), "write")

    def state() -> list[Any]:
        nodes = topological_order(net.entries)
        return [(node, list(node.inputs), list(node.control_deps), dict(node.attrs)) for node in nodes]

    before = state()
    first, repeated = (plan_symbol(net, shapes, grad_req=wanted) for _ in range(2))
    assert state() == before
    assert any(one.changed for one in first.memory.passes)
    assert first.graph.names == repeated.graph.names
    assert first.graph.inputs == repeated.graph.inputs
    assert (first.memory.storage_offset == repeated.memory.storage_offset).all()


def test_folding_before_is_in_the_list() -> None:
    """A plan lists ``fold_constants`` and ``fold_batch_norm`` if they made its symbol, also after saving the symbol."""
    rng = np.random.default_rng(0)
    data, weight = sym.Variable("data"), sym.Variable("w") * 2
    net = sym.BatchNorm(sym.Convolution(data, weight, kernel=(3, 3), num_filter=4, no_bias=True, name="c"), name="n")
    args, _, aux = net.infer_shape(**SHAPES, w=(4, 3, 3, 3))
    values = {
        name: mx.nd.array(rng.uniform(0.5, 1, shape))
        for name, shape in zip(net.list_arguments(), args or [], strict=True)
    }
    del values["data"]
    states = {
        name: mx.nd.array(rng.uniform(0.5, 1, shape))
        for name, shape in zip(net.list_auxiliary_states(), aux or [], strict=True)
    }
    once, values, states = fold_constants(net, values, states)
    twice, values, states = fold_batch_norm(once, values, states)
    for symbol in (twice, mx.sym.load_json(twice.tojson())):
        actual = passes(symbol)
        assert actual["constants folded"].switch == "convert.fold_constants"
        assert actual["constants folded"].changed == "1 result of parameters alone became parameters"
        assert actual["batch norm folded"].changed == "1 node became part of the layers before them"
        assert list(actual)[:2] == ["constants folded", "batch norm folded"]


def test_the_list_is_shown(tmp_path: Path) -> None:
    """Passes are shown by ``debug_str``, by two commands and their JSON, by a saved plan and by its HTML page."""
    net = network()
    bound = net.simple_bind(mx.cpu(), grad_req="null", **SHAPES)
    assert "\nPass: layers joined: joined 2 pairs" in bound.debug_str()
    net.save(str(tmp_path / "net-symbol.json"))
    shape = ["--shape", "data=2,3,20,20", "--kernels"]
    runner = CliRunner()
    for command, more in ((plan_command, ["--inference"]), (inspect_command, [])):
        arguments = [str(tmp_path / "net-symbol.json"), *shape, *more]
        shown = runner.invoke(command, arguments, catch_exceptions=False)
        assert shown.exit_code == 0, shown.output
        assert "WEFTPLAN_DROP_DEAD_OUTPUTS=0" in shown.output
        assert "BatchNorm+relu" in shown.output
        assert re.search(r"layers joined .*joined 2 pairs .* \d+\.\d\d ms", shown.output)
        assert re.search(r"steps of every plan: sizes inferred \d+\.\d\d ms, gradients added", shown.output)
        as_json = json.loads(runner.invoke(command, [*arguments, "--json"], catch_exceptions=False).stdout)
        assert [one["name"] for one in as_json["passes"]][:2] == [
            "equal expressions merged",
            "layers joined",
        ]
    plan = bound.memory_plan
    assert MemoryPlan.from_json(plan.to_json()).passes == plan.passes != ()
    page = net.plan(**SHAPES, train=False).to_html()
    assert re.search(r"<li>layers joined: joined 2 pairs .*\(MXNET_USE_FUSION\), \d+\.\d\d ms</li>", page)
