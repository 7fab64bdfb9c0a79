"""The search for an order of execution, on small lists of steps whose right order is known."""

from __future__ import annotations

import random

import pytest

from tests.planner.plain_steps import Step, plan_steps, program_of_steps
from tests.support.together import together
from weftplan.planner import PlanOptions, validate
from weftplan.planner.choose_order import _Dependencies, _greedy_backwards, _greedy_forwards
from weftplan.planner.program import Program


def test_a_part_of_three_steps_is_put_into_another_order() -> None:
    """Of three steps, one with much scratch memory is moved to the front, which lowers the peak."""
    steps = [Step("wide", ("x",), 5000), Step("busy", ("x",), 1000, scratch=10_000), Step("end", ("wide", "busy"), 64)]
    inputs = plan_steps({"x": 64}, steps, ["end"], options=PlanOptions(reorder=False))
    chosen = plan_steps({"x": 64}, steps, ["end"])
    validate(chosen)
    assert inputs.memory.lower_bound >= 16_000
    assert chosen.memory.lower_bound < 12_000
    assert [chosen.graph.names[nid] for nid in chosen.order] == ["busy", "wide", "end"]


def test_last_reader_runs_as_soon_as_it_frees_memory() -> None:
    """In greedy forward order ``q`` runs before the smaller ``r``, once ``q`` is the last reader of ``big``."""
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


def random_program(seed: int) -> tuple[Program, list[int]]:
    """Return a random program of ten steps, and the steps of its forward or its backward part."""
    rng = random.Random(seed)
    known, steps = ["x", "y"], []
    for k in range(10):
        reads = tuple(rng.choice(known[-5:]) for _ in range(rng.randint(1, 3)))
        steps.append(Step(f"s{k}", reads, rng.choice((0, 8, 16, 24, 100))))
        known.append(f"s{k}")
    program = program_of_steps({"x": 64, "y": 1000}, steps, rng.sample(known[2:], 2), forward=rng.randint(4, 7))
    return program, rng.choice((program.forward, program.backward))


def pairs_of(program: Program, nodes: list[int]) -> tuple[dict[int, set[int]], set[int]]:
    """Return the planned results that each node reads, and the results of ``nodes`` that later nodes need."""
    reads = {n: {e for e in program.reads[n] if not program.external[e]} for n in program.order}
    later = set(program.order) - set(nodes)
    return reads, {e for e in nodes if e in program.graph.outputs or any(e in reads[n] for n in later)}


@together()
@pytest.mark.parametrize("seed", range(60))
def test_greedy_forward_order(seed: int) -> None:
    """The next step is the ready step that adds the fewest live bytes; ties follow the given order.

    An entry dies with its last reader, unless it is computed in this part and needed after it.
    """
    program, nodes = random_program(seed)
    reads, kept = pairs_of(program, nodes)
    every = {e for row in reads.values() for e in row} | set(program.graph.outputs)
    left, expected = list(nodes), list[int]()

    def growth(n: int) -> int:
        others = {e for m in left if m != n for e in reads[m]}
        dies = [e for e in reads[n] if e not in others and e not in kept and e not in program.graph.outputs]
        return (program.nbytes[n] if n in every else 0) - sum(program.nbytes[e] for e in dies)

    while left:
        ready = [n for n in left if not reads[n] & set(left)]
        expected.append(min(ready, key=growth))
        left.remove(expected[-1])
    assert _greedy_forwards(_Dependencies(program), nodes) == expected


@together()
@pytest.mark.parametrize("seed", range(60))
def test_greedy_backward_order(seed: int) -> None:
    """From the end, the next step has the fewest live bytes before it; ties take the last step.

    Candidates are the steps without remaining readers. An entry is alive from its last reader back to its own step.
    """
    program, nodes = random_program(seed)
    reads, alive = pairs_of(program, nodes)
    left, expected = list(nodes), list[int]()

    def growth(n: int) -> int:
        return sum(program.nbytes[e] for e in reads[n] - alive) - (program.nbytes[n] if n in alive else 0)

    while left:
        ready = [n for n in reversed(left) if not any(n in reads[m] for m in left)]
        expected.insert(0, min(ready, key=growth))
        alive |= reads[expected[0]]
        left.remove(expected[0])
    assert _greedy_backwards(_Dependencies(program), nodes) == expected
