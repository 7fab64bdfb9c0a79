"""The search for an order of execution, on lists of steps small enough to say which order is right."""

from __future__ import annotations

from tests.planner.plain_steps import Step, plan_steps, program_of_steps
from weftplan.planner import PlanOptions, validate
from weftplan.planner.order import _Dependencies, _greedy_forwards


def test_a_part_of_three_steps_is_put_into_another_order() -> None:
    """What needs much scratch runs before much is alive; three steps are the fewest that the search looks at."""
    steps = [Step("wide", ("x",), 5000), Step("busy", ("x",), 1000, scratch=10_000), Step("end", ("wide", "busy"), 64)]
    given = plan_steps({"x": 64}, steps, ["end"])
    chosen = plan_steps({"x": 64}, steps, ["end"], options=PlanOptions(reorder=True))
    validate(chosen)
    assert given.memory.lower_bound >= 16_000
    assert chosen.memory.lower_bound < 12_000
    assert [chosen.graph.names[nid] for nid in chosen.order] == ["busy", "wide", "end"]


def test_a_last_reader_is_pulled_forward_as_soon_as_it_is_the_last() -> None:
    """Greedy order forwards: with ``p`` gone ``q`` alone reads ``big``, so it runs before the smaller ``r``."""
    steps = [
        Step("big", ("x",), 1000),
        Step("p", ("big",), 10),
        Step("r", ("x",), 12),
        Step("q", ("big",), 20),
        Step("end", ("p", "q", "r"), 8),
    ]
    program = program_of_steps({"x": 64}, steps, ["end"])
    order = _greedy_forwards(_Dependencies(program), program.order)
    assert [program.graph.names[nid] for nid in order] == ["r", "big", "p", "q", "end"]
    late = [*steps[:2], Step("r", ("p", "x"), 12), *steps[3:]]
    program = program_of_steps({"x": 64}, late, ["end"])
    order = _greedy_forwards(_Dependencies(program), program.order)
    assert [program.graph.names[nid] for nid in order] == ["big", "p", "q", "r", "end"]
