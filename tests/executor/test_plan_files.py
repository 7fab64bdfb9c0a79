"""Plans that an earlier process stored: a bind uses one only if planning would give the same plan."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weftplan as mx
from weftplan import planner
from weftplan.executor import plan_cache
from weftplan.ops.core import implementations, registry
from weftplan.planner import PlannedGraph, PlanOptions, stop_request

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the cache folder needs permissions of POSIX")


@pytest.fixture
def plan_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stored plans, which is empty."""
    target = tmp_path.resolve()
    monkeypatch.setenv("XDG_CACHE_HOME", str(target))
    monkeypatch.setattr(plan_cache, "_CODE", plan_cache._state_of_code())
    return target / "weftplan" / "plans"


def network(hidden: int = 8) -> Any:
    """Return a classifier with batch norm."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=hidden, name="a")
    x = mx.sym.BatchNorm(x, name="norm")
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=4, name="b"), name="softmax")


def elementwise_network() -> Any:
    """Return elementwise nodes on arrays that are large enough to be fused."""
    x = mx.sym.Variable("data")
    for _ in range(3):
        x = mx.sym.tanh(x * 2 + 1)
    return mx.sym.MakeLoss(mx.sym.sum(x))


def two_groups() -> Any:
    """Return two layers in two groups."""
    with mx.AttrScope(ctx_group="one"):
        x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=6, name="a")
    with mx.AttrScope(ctx_group="two"):
        return mx.sym.MakeLoss(mx.sym.FullyConnected(x, num_hidden=3, name="b"))


def deep(count: int = 12) -> Any:
    """Return ``count`` layers whose results are worth recomputing or offloading."""
    x = mx.sym.Variable("data")
    for k in range(count):
        x = mx.sym.Activation(mx.sym.FullyConnected(x, num_hidden=64, name=f"f{k}"), act_type="sigmoid", name=f"s{k}")
    x = mx.sym.Dropout(x, p=0.3)
    return mx.sym.SoftmaxOutput(mx.sym.FullyConnected(x, num_hidden=4, name="last"), name="softmax")


def model_function(name: str) -> Callable[[], Any]:
    """Return a function that returns a built-in network."""
    return lambda: mx.models.get(name)


def tight_budget(share: float, ctx: mx.Context) -> dict[str, Any]:
    """Return bind arguments for ``deep`` with a budget of ``share`` of its planned memory."""
    plan = deep().plan(data=(256, 64), context=ctx)
    return {"ctx": ctx, "data": (256, 64), "budget": plan.total - int(plan.peak * (1 - share))}


CASES: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "small": (network, lambda: {"data": (6, 5)}),
    "inference": (network, lambda: {"data": (6, 5), "grad_req": "null"}),
    "added gradients": (network, lambda: {"data": (6, 5), "grad_req": "add"}),
    "mixed gradients": (network, lambda: {"data": (6, 5), "grad_req": {"a_weight": "write", "b_bias": "add"}}),
    "float64": (network, lambda: {"data": (6, 5), "type_dict": {"data": "float64"}}),
    "chains": (elementwise_network, lambda: {"data": (64, 4096)}),
    "two devices": (two_groups, lambda: {"data": (4, 5), "group2ctx": {"one": mx.cpu(1), "two": mx.cpu(2)}}),
    "simulated": (network, lambda: {"ctx": mx.sim(0), "data": (6, 5)}),
    "computed again": (deep, lambda: tight_budget(0.7, mx.cpu())),
    "sent elsewhere": (deep, lambda: tight_budget(0.6, mx.sim(0))),
    "echo": (deep, lambda: {"data": (32, 64), "options": PlanOptions(recompute="echo")}),
    "whole blocks": (network, lambda: {"data": (6, 5), "options": PlanOptions(strategy="match_range")}),
    "another order": (model_function("resnet"), lambda: {"data": (4, 3, 32, 32), "options": PlanOptions(reorder=True)}),
    "mlp": (model_function("mlp"), lambda: mx.models.input_shapes("mlp", 4)),
    "lenet": (model_function("lenet"), lambda: mx.models.input_shapes("lenet", 4)),
    "joined batch norms": (
        model_function("resnet18"),
        lambda: {**mx.models.input_shapes("resnet18", 1), "grad_req": "null"},
    ),
    "joined gradients": (model_function("mobilenet"), lambda: mx.models.input_shapes("mobilenet", 1)),
    "lstm": (model_function("lstm"), lambda: mx.models.input_shapes("lstm", 2)),
}


def bind(symbol: Any, ctx: mx.Context | None = None, **more: Any) -> Any:
    """Bind ``symbol`` and return the executor."""
    return symbol.simple_bind(ctx or mx.cpu(), **more)


def plan_of(symbol: Any) -> PlannedGraph:
    """Return the only cached plan of a symbol."""
    ((_, actual),) = symbol.cached_plans.plans
    return actual


def assert_equal(a: Any, b: Any, at: str) -> None:
    """Assert that two nested values have equal types and values."""
    assert type(a) is type(b), at
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype, at
        assert np.array_equal(a, b), at
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), at
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{at}[{k}]")
    elif isinstance(a, dict):
        assert list(a) == list(b), at
        for key in a:
            assert_equal(a[key], b[key], f"{at}[{key!r}]")
    else:
        assert a == b, at


def facts(plan: PlannedGraph) -> dict[str, Any]:
    """Return everything in a planned graph that can be compared."""
    graph, memory = plan.graph, plan.memory
    labels = memory.labels
    numbers = {"names", "inputs", "controls", "row", "entry_node", "is_variable", "outputs"}
    return {
        **{name: value for name, value in vars(plan).items() if name not in ("graph", "memory", "kernels")},
        **{name: list(getattr(graph, name)) for name in numbers},
        "nodes": [
            (
                node.name, None if node.op is None else node.op.name, dict(node.attrs),
                {name: repr(value) for name, value in node.params.items()},
                node.created_at, node.version, None if node.mirror_of is None else node.mirror_of.name,
            )
            for node in graph.nodes
        ],
        "kernels": {k: (one.text, one.several, one.implementation.name) for k, one in plan.kernels.items()},
        "memory": {
            field.name: dict(value) if field.name in ("kernels", "external_bytes") else value
            for field in fields(memory)
            if field.name not in ("labels", "again")
            for value in [getattr(memory, field.name)]
        },
        "labels": [(labels.name(e), labels.source(e), labels.makers[e]) for e in range(len(labels.makers))],
        "makers": [(labels.node_op(n), labels.node_names[n]) for n in range(graph.num_nodes)],
        "steps": (list(labels.steps), list(labels.shapes), list(labels.dtypes)),
    }  # fmt: skip


def train(executor: Any) -> list[np.ndarray]:
    """Run two steps from fixed values, and return outputs, gradients and states."""
    random = np.random.RandomState(3)
    mx.random.seed(5)
    for array in executor.arg_arrays:
        array[:] = random.randint(0, 3, array.shape) / 2
    for array in executor.aux_arrays:
        array[:] = 1
    for _ in range(2):
        executor.forward(is_train=True)
        if any(grad is not None for grad in executor.grad_arrays):
            executor.backward()
    arrays = (*executor.outputs, *executor.grad_arrays, *executor.aux_arrays)
    return [array.asnumpy().copy() for array in arrays if array is not None]


@pytest.mark.parametrize("case", CASES)
def test_loaded_plan_equals_the_planned_one(plan_folder: Path, planned: list[None], case: str):
    """A loaded plan equals the stored one in every value and type, and steps by both have the same bits."""
    make, arguments = CASES[case]
    inputs = arguments()
    text = make().tojson()
    first, second = mx.sym.load_json(text), mx.sym.load_json(text)
    del planned[:]
    executor = bind(first, **inputs)
    assert len(planned) == 1
    assert len(list(plan_folder.glob("*/*"))) == 1
    repeated = bind(second, **inputs)
    assert len(planned) == 1, "the second bind must load its plan"
    assert_equal(facts(plan_of(first)), facts(plan_of(second)), case)
    for graph in (plan_of(first), plan_of(second)):
        planner.validate(graph)
    assert repeated.allocated_bytes == executor.allocated_bytes == repeated.memory_plan.peak
    for a, b in zip(train(executor), train(repeated), strict=True):
        assert np.array_equal(a, b)


def test_nodes_are_those_of_the_symbol(plan_folder: Path):
    """A loaded plan refers to the nodes of the symbol that is bound, with their source lines."""
    first = network()
    bind(first, data=(6, 5))
    second = network()
    bind(second, data=(6, 5))
    plan = plan_of(second)
    own = {entry[0] for entry in second.get_internals().entries}
    assert own <= set(plan.graph.nodes)
    lines = {node.name: node.created_at for node in plan.graph.nodes}
    backward = next(node for node in plan.graph.nodes if node.op is not None and node.op.backward_of == "BatchNorm")
    assert backward not in own
    assert backward.created_at == lines["norm"] is not None


CHANGES: dict[str, dict[str, Any]] = {
    "shape": {"data": (7, 5)},
    "dtype": {"type_dict": {"data": "float64"}},
    "gradients": {"grad_req": "null"},
    "one gradient": {"grad_req": {"a_weight": "add"}},
    "device": {"ctx": mx.sim(0)},
    "options": {"options": PlanOptions(strategy="none")},
    "budget": {"budget": 1 << 20},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_argument_needs_another_file(plan_folder: Path, planned: list[None], change: str):
    """A bind with another argument stores another plan, and a repeated one loads it."""
    bind(network(), data=(6, 5))
    for _ in range(2):
        bind(network(), **{"data": (6, 5), **CHANGES[change]})
    assert len(planned) == len(list(plan_folder.glob("*/*"))) == 2


def test_the_graph_and_its_surroundings_count(plan_folder: Path, planned: list[None], monkeypatch: pytest.MonkeyPatch):
    """Another size, name, attribute, variable, implementation or version of the code needs another plan."""
    bind(network(), data=(6, 5))
    bind(network(9), data=(6, 5))
    renamed = mx.sym.load_json(network().tojson().replace('"norm', '"other'))
    bind(renamed, data=(6, 5))
    hinted = network()
    hinted.get_internals()["data"]._set_attr(__force_mirroring__="0")
    bind(hinted, data=(6, 5))
    assert len(planned) == 4
    monkeypatch.setenv("MXNET_EXEC_NUM_TEMP", "2")
    bind(network(), data=(6, 5))
    assert len(planned) == 5
    monkeypatch.delenv("MXNET_EXEC_NUM_TEMP")
    way = replace(implementations.numpy_of(registry.get("FullyConnected")), name="other")
    table = implementations._PROVIDED["host"]
    monkeypatch.setitem(table.registered, "FullyConnected", table["FullyConnected"])  # restores it afterwards
    monkeypatch.setitem(table.replaced, "FullyConnected", way)
    implementations.provide("FullyConnected", way)
    bind(network(), data=(6, 5))
    assert len(planned) == 6
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(plan_folder.parents[1]))
    monkeypatch.setattr(plan_cache, "_CODE", "other code")
    before = len(list(plan_folder.glob("*/*")))
    bind(network(), data=(6, 5))
    assert len(list(plan_folder.glob("*/*"))) == before + 1


def test_another_compiler_plans_anew(plan_folder: Path, planned: list[None], monkeypatch: pytest.MonkeyPatch):
    """With another compiler, a network with convolutions is planned again; a network without convolutions is not."""

    def convolution() -> Any:
        return mx.sym.Convolution(mx.sym.Variable("data"), kernel=(3, 3), num_filter=4, name="c")

    bind(convolution(), data=(1, 3, 8, 8))
    monkeypatch.setattr(plan_cache, "compiler", lambda: "nothing compiles")
    bind(convolution(), data=(1, 3, 8, 8))
    assert len(planned) == 2
    bind(convolution(), data=(1, 3, 8, 8))
    assert len(planned) == 2, "the new plan must have replaced the old one"
    monkeypatch.setattr(plan_cache, "compiler", pytest.fail)
    for _ in range(2):
        bind(mx.sym.MakeLoss(mx.sym.Variable("data"), name="loss"), data=(6, 5))
    assert len(planned) == 3


@pytest.mark.shows("WEFTPLAN_PLAN_CACHE")
def test_damage_is_mended_and_nothing_is_kept_where_nobody_wants_it(
    plan_folder: Path, planned: list[None], monkeypatch: pytest.MonkeyPatch
):
    """A bind plans again if the file is damaged, if others can read the folder, or if the cache is switched off.

    A damaged file is replaced.
    """
    bind(network(), data=(6, 5))
    (only,) = plan_folder.glob("*/*")
    whole = only.read_bytes()
    only.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    bind(network(), data=(6, 5))
    assert len(planned) == 2
    assert only.read_bytes() == whole
    bind(network(), data=(6, 5))
    assert len(planned) == 2
    plan_folder.chmod(0o755)
    bind(network(), data=(6, 5))
    assert len(planned) == 3
    plan_folder.chmod(0o700)
    monkeypatch.setenv("WEFTPLAN_PLAN_CACHE", "0")
    bind(network(), data=(6, 5))
    assert len(planned) == 4
    assert list(plan_folder.glob("*/*")) == [only]


def test_plans_with_custom_operators_are_not_stored(plan_folder: Path):
    """Plans with custom or replaced operators, which may change without notice, are not stored."""

    class Same(mx.operator.CustomOp):
        def forward(self, is_train: Any, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
            self.assign(out_data[0], req[0], in_data[0])

    @mx.operator.register("kept_nowhere")
    class Described(mx.operator.CustomOpProp):
        def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> Any:
            return Same()

    bind(mx.sym.Custom(mx.sym.Variable("data"), op_type="kept_nowhere"), data=(2,), grad_req="null")
    assert not plan_folder.exists()
    op = registry.get("FullyConnected")
    symbol = network()
    symbol.get_internals()["a_output"].entries[0].node.op = replace(op, doc="mine")
    bind(symbol, data=(6, 5))
    assert not plan_folder.exists()


def test_stopped_search_is_not_stored(plan_folder: Path):
    """The plan of a search that was stopped is not stored, because a longer search may find a better plan."""
    with stop_request.stoppable():
        stop_request.stop()
        bind(network(), data=(6, 5))
    assert not plan_folder.exists()


def test_a_second_process_reads(tmp_path: Path):
    """A second process loads the plan that the first process stored."""
    script = (
        "import weftplan as mx\nfrom weftplan import planner\n"
        "made, true = [], planner.size_symbol\n"
        "planner.size_symbol = lambda *args, **more: made.append(1) or true(*args, **more)\n"
        "x = mx.sym.FullyConnected(mx.sym.Variable('data'), num_hidden=3)\n"
        "print(mx.sym.MakeLoss(x).simple_bind(mx.cpu(), data=(2, 3)).memory_plan.peak, len(made))\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path.resolve()), "PYTHONHASHSEED": "random"}
    actual = [
        subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert [text.split()[1] for text in actual] == ["1", "0"]
    assert actual[0].split()[0] == actual[1].split()[0]
