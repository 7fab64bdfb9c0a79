"""Rare cases of offloading, planned from lists of steps."""

from __future__ import annotations

import pytest

from tests.planner.plain_steps import Step, plan_steps, program_of_steps
from weftplan.device.context import Context
from weftplan.errors import BudgetError
from weftplan.ops.core.schema import Req
from weftplan.planner import PlanOptions, validate
from weftplan.planner.drafts import planned_steps
from weftplan.planner.rewiring import Spill, spilled
from weftplan.planner.spill.search import SMALLEST
from weftplan.planner.strategies import plan_graph

SIM = Context("sim", 0)


def forward_and_backward(count: int, size: int) -> list[Step]:
    """Return ``count`` forward steps, and backward steps that read their results in reverse order.

    Each forward result has ``size`` bytes, and no forward step may be repeated.
    """
    forward = [
        Step(f"f{k}", (f"f{k - 1}" if k else "x",), size, seconds=1e-3, repeats=False, device=SIM) for k in range(count)
    ]
    backward = [
        Step(f"g{k}", (f"f{k}", f"g{k + 1}") if k < count - 1 else (f"f{k}",), 64, seconds=1e-3, device=SIM)
        for k in reversed(range(count))
    ]
    return [*forward, *backward]


@pytest.mark.parametrize("size", [SMALLEST, SMALLEST - 64])
def test_smallest_offloaded_result(size: int) -> None:
    """Results of 4,096 bytes are offloaded to meet a budget; with smaller results the budget raises an error."""
    steps = forward_and_backward(6, size)
    plain = plan_steps({"x": 64}, steps, ["f5"], gradients=["g0"], forward=6).memory.peak
    options = PlanOptions(budget=plain * 3 // 4)
    if size < SMALLEST:
        with pytest.raises(BudgetError):
            plan_steps({"x": 64}, steps, ["f5"], gradients=["g0"], forward=6, options=options)
        return
    tight = plan_steps({"x": 64}, steps, ["f5"], gradients=["g0"], forward=6, options=options)
    validate(tight)
    assert tight.memory.on_host > 0


def test_peak_in_the_forward_part() -> None:
    """If scratch memory of a forward step is the peak, idle results are offloaded before it at no cost in time."""
    size = 1 << 20
    steps = [
        Step("f0", ("x",), size, seconds=1e-3, repeats=False, device=SIM),
        Step("f1", ("f0",), size, seconds=1e-3, repeats=False, device=SIM),
        Step("f2", ("f1",), 64, seconds=1.0, repeats=False, device=SIM),
        Step("busy", ("f2",), 64, scratch=4 * size, seconds=1.0, repeats=False, device=SIM),
        Step("end", ("busy",), 64, seconds=1.0, repeats=False, device=SIM),
        Step("g1", ("f1", "end"), 64, seconds=1.0, device=SIM),
        Step("g0", ("f0", "g1"), 64, seconds=1.0, device=SIM),
    ]
    plain = plan_steps({"x": 64}, steps, ["end"], gradients=["g0"], forward=5).memory.peak
    options = PlanOptions(budget=plain - size // 2)
    tight = plan_steps({"x": 64}, steps, ["end"], gradients=["g0"], forward=5, options=options)
    validate(tight)
    names = [tight.graph.names[nid] for nid in tight.order]
    out = next(name for name in names if name.endswith("_spill"))
    assert names.index(out) < names.index("busy")
    assert tight.memory.more_time == 0.0


def test_a_fetched_term_is_not_added_by_its_copy() -> None:
    """A copy back overwrites its target, so a sum that reads the fetched result runs as a separate step."""
    size = 1 << 16
    steps = [
        Step("f0", ("x",), size, device=SIM),
        Step("f1", ("f0",), size, device=SIM),
        Step("total", ("f1",), size, device=SIM),
        Step("sum", ("total", "f0"), size, over=0, adds=True, device=SIM),
        Step("g", ("sum",), 64, device=SIM),
    ]
    program = program_of_steps({"x": 64}, steps, ["f1"], gradients=["g"], forward=2)
    f0 = program.graph.row[1]
    assert program.graph.entry_name(f0) == "f0_output"
    after = spilled(program, [Spill(f0, out=2, back=3, target=Context("cpu_pinned", 0))])
    draft = plan_graph(after, PlanOptions(compat="mxnet"))
    outputs = after.graph.outputs
    planned = planned_steps(draft, outputs[:1], gradients={"g": outputs[1]})
    validate(planned)
    assert not planned.skipped
    assert Req.ADD not in planned.requests
