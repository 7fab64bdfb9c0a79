"""The planner's core knows neither symbols nor operators: its imports say so, and a list of steps can be planned."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.plain_steps import Step, plan_steps
from tests.support.together import together
from weftplan.device.context import Context
from weftplan.errors import BudgetError
from weftplan.planner import PlanOptions, validate
from weftplan.planner.storage_assignment import Kind

PLANNER = Path(__file__).parents[2] / "weftplan" / "planner"


def core() -> list[Path]:
    """Every module of the planner but the front end and the package itself, which offers both."""
    return sorted(
        path for path in PLANNER.rglob("*.py") if "symbolic" not in path.parts and path != PLANNER / "__init__.py"
    )


def strangers(path: Path) -> list[str]:
    """Imports of a module that the core must not have."""
    results = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            results += [a.name for a in node.names if a.name.startswith(("weftplan.symbol", "weftplan.ops"))]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.name for alias in node.names}
            if node.module.startswith(("weftplan.symbol", "weftplan.planner.symbolic")):
                results.append(node.module)
            elif node.module == "weftplan.planner" and "symbolic" in names:
                results.append("weftplan.planner.symbolic")
            elif node.module == "weftplan.ops" or node.module.startswith("weftplan.ops."):
                results += [f"{node.module}.{name}" for name in names]
    return results


@together()
@pytest.mark.parametrize("path", core(), ids=lambda path: path.relative_to(PLANNER).as_posix())
def test_the_core_imports_no_symbol_and_no_operator(path: Path) -> None:
    """The arrow goes from the front end to the core only."""
    assert strangers(path) == []


def test_the_rule_can_fail(tmp_path: Path) -> None:
    """The check sees symbols, operators, the front end, and words of operators."""
    path = tmp_path / "module.py"
    path.write_text(
        "from weftplan.symbol.node import Node\nimport weftplan.ops.core.registry\n"
        "from weftplan.ops.core import registry\n"
        "from weftplan.planner.symbolic.node_seconds import node_seconds\n"
        "from weftplan.ops.core.schema import Req, Op\n"
        "from weftplan.planner import symbolic\n"
    )
    assert sorted(strangers(path)) == [
        "weftplan.ops.core.registry",
        "weftplan.ops.core.registry",
        "weftplan.ops.core.schema.Op",
        "weftplan.ops.core.schema.Req",
        "weftplan.planner.symbolic",
        "weftplan.planner.symbolic.node_seconds",
        "weftplan.symbol.node",
    ]


CHAIN = [
    Step("a", ("x",), 4096),
    Step("b", ("a",), 4096, over=0),
    Step("c", ("b",), 8192, scratch=1024),
    Step("d", ("c", "x"), 4096),
]


def test_a_list_of_steps_shares_memory() -> None:
    """Over dead inputs where a step allows it, and else in bytes that are free again: to the byte what is alive."""
    planned = plan_steps({"x": 4096}, CHAIN, ["d"])
    validate(planned)
    plan = planned.memory
    assert Kind(int(plan.entry_kind[2])) is Kind.INPLACE  # b over a
    assert plan.peak == plan.lower_bound == 4096 + 8192 + 1024
    apart = plan_steps({"x": 4096}, CHAIN, ["d"], options=PlanOptions(enable_inplace=False, strategy="none"))
    validate(apart)
    assert apart.memory.peak > plan.peak


def test_steps_of_one_device_do_not_share_with_another() -> None:
    """Each device has slabs of its own."""
    there = Context("cpu", 1)
    planned = plan_steps({"x": 64}, [*CHAIN[:2], replace(CHAIN[2], device=there), CHAIN[3]], ["d"])
    validate(planned)
    assert set(planned.memory.peak_by_device) == {Context("cpu", 0), there}


def _training(device: Context, *, repeats: bool = True) -> list[Step]:
    """Six results that are read again in reverse order, each by a step that makes little."""
    size = 1 << 20
    forward = [
        Step(f"f{k}", (f"f{k - 1}" if k else "x",), size, seconds=1e-3, repeats=repeats, device=device)
        for k in range(6)
    ]
    backward = [
        Step(f"g{k}", (f"f{k}", f"g{k + 1}") if k < 5 else (f"f{k}",), 64, seconds=1e-3, device=device)
        for k in reversed(range(6))
    ]
    return [*forward, *backward]


def test_a_budget_repeats_steps() -> None:
    """Steps are run again before they are needed, each by its number in the list; the plan fits."""
    steps = _training(Context("cpu", 0))
    plain = plan_steps({"x": 64}, steps, ["f5"], gradients=["g0"], forward=6)
    tight = plan_steps(
        {"x": 64}, steps, ["f5"], gradients=["g0"], forward=6, options=PlanOptions(budget=plain.memory.peak * 3 // 4)
    )
    validate(tight)
    assert tight.memory.peak <= plain.memory.peak * 3 // 4
    repeated = [tight.graph.names[nid] for nid in tight.order if nid in tight.graph.again]
    assert repeated
    assert all(name.endswith("_mirror") for name in repeated)


def test_what_may_not_be_repeated_is_not() -> None:
    """With steps that must run once there is nothing to gain on a host, and the error says so."""
    steps = _training(Context("cpu", 0), repeats=False)
    plain = plan_steps({"x": 64}, steps, ["f5"], gradients=["g0"], forward=6)
    with pytest.raises(BudgetError) as error:
        plan_steps(
            {"x": 64},
            steps,
            ["f5"],
            gradients=["g0"],
            forward=6,
            options=PlanOptions(budget=plain.memory.peak * 3 // 4),
        )
    assert error.value.smallest == plain.memory.peak


def test_a_budget_sends_results_to_the_host() -> None:
    """On a device with memory of its own, copies out and back are added to the list."""
    steps = _training(Context("sim", 0), repeats=False)
    plain = plan_steps({"x": 64}, steps, ["f5"], gradients=["g0"], forward=6)
    tight = plan_steps(
        {"x": 64}, steps, ["f5"], gradients=["g0"], forward=6, options=PlanOptions(budget=plain.memory.peak * 3 // 4)
    )
    validate(tight)
    copies = [tight.graph.names[nid] for nid in tight.order if tight.graph.origin[nid] < 0]
    assert sorted({name.rsplit("_", 1)[1] for name in copies}) == ["fetch", "spill"]
    assert tight.memory.on_host > 0
    assert tight.memory.peak - tight.memory.on_host <= plain.memory.peak * 3 // 4
    assert tight.memory.counted == tight.memory.peak - tight.memory.on_host + 64
