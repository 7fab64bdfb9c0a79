"""Features of the planner's core that symbols do not use.

These are held results, effects, mandatory sharing, sizes in bytes, and backward steps that may be moved.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.planner import PlanOptions, plan_program, validate
from weftplan.planner.buffers import Buffers
from weftplan.planner.choose_order import lazy_backward
from weftplan.planner.drafts import Drafts, PlannedSteps, planned_steps
from weftplan.planner.liveness import dependencies, lifetimes
from weftplan.planner.program import VARIABLE, Graph, Program, Work
from weftplan.planner.recompute import Tape, repeat
from weftplan.planner.rewiring import repeatable
from weftplan.planner.strategies import assignment, plan_graph
from weftplan.support.tensor_types import InplacePair

PLAIN = PlanOptions(enable_inplace=False, alignment=8)
VIEW, WRITE = InplacePair(0, 0, identity=True), InplacePair(0, 0)


@dataclass(frozen=True)
class Node:
    """One step, which reads named results and writes a result with its own name."""

    name: str
    reads: tuple[str, ...]
    nbytes: int
    over: tuple[InplacePair, ...] = ()


def program_of(
    given: Mapping[str, int],
    nodes: Sequence[Node],
    outputs: Sequence[str],
    *,
    forward: int | None = None,
    held: Mapping[str, str] | None = None,
    effects: Sequence[str] = (),
    tangents: Sequence[str] = (),
) -> Program:
    """Return a program of ``nodes``; the entry and the node of a result have the same number.

    Args:
        given: results that exist before the first node, with their bytes.
        forward: number of forward nodes; None for all.
        held: for a result, the node until whose end it must stay alive.
        effects: nodes that run for their effects.
        tangents: given results that belong to the backward part.
    """
    names = [*given, *(node.name for node in nodes)]
    number = {name: nid for nid, name in enumerate(names)}
    graph = Graph(
        names=names,
        works=[VARIABLE] * len(given) + [Work(label="node", over=node.over) for node in nodes],
        inputs=[[] for _ in given] + [[number[name] for name in node.reads] for node in nodes],
        controls=[[] for _ in names],
        counts=[1] * len(names),
        heads=[number[name] for name in outputs],
        effects=[number[name] for name in effects],
    )
    return Program(
        graph=graph,
        order=list(range(len(given), len(names))),
        num_forward=len(nodes) if forward is None else forward,
        nbytes=[*given.values(), *(node.nbytes for node in nodes)],
        contexts=(Context("cpu", 0),),
        device=[0] * len(names),
        gradients=frozenset(),
        added=frozenset(),
        workspaces={},
        external_bytes={"given": sum(given.values())},
        held={number[e]: number[n] for e, n in (held or {}).items()},
        tangents=frozenset(number[name] for name in tangents),
    )


def planned(program: Program, options: PlanOptions = PLAIN) -> PlannedSteps:
    """Plan a program and return the plan after it has been validated."""
    steps = planned_steps(plan_graph(program, options), program.graph.outputs, gradients={})
    validate(steps)
    return steps


def bound(program: Program) -> int:
    """Return the largest number of bytes that are alive at the same time."""
    return Buffers(program, assignment(program, PLAIN), options=PLAIN).lower_bound


CHAIN = [Node("a", ("x",), 104), Node("b", ("a",), 8), Node("c", ("b",), 8), Node("d", ("c",), 104)]


def test_held_results_outlive_their_last_reader() -> None:
    """A held result is alive until the end of its node, and is not repeatable."""
    free, held = program_of({"x": 1}, CHAIN, ["d"]), program_of({"x": 1}, CHAIN, ["d"], held={"a": "d"})
    assert (bound(free), bound(held)) == (112, 216)
    assert lifetimes(held)[1][1] == 4
    assert planned(held).memory.peak == 216
    assert repeatable(held) == [2, 3]


def test_a_plan_that_drops_a_held_result_is_refused() -> None:
    """The validator refuses a plan whose held result dies too early."""
    steps = planned(program_of({"x": 1}, CHAIN, ["d"]))
    object.__setattr__(steps, "held", {1: 4})
    with pytest.raises(PlanError, match="'a_output' lives from step 0 to 4"):
        validate(steps)


def test_effects_stay_in_rewritten_graphs() -> None:
    """A rewritten graph contains nodes with effects even if no node reads them; other unread nodes raise an error."""
    nodes = [Node("a", ("x",), 64), Node("b", ("a",), 64), Node("loss", ("b",), 4)]
    nodes += [Node("g", ("a", "b"), 64), Node("update", ("g",), 0)]
    changed = repeat(program_of({"x": 1}, nodes, ["loss"], forward=3, effects=["update"]), [1])
    assert changed.graph.effects == [changed.graph.names.index("update")]
    assert [changed.graph.names[nid] for nid in changed.order] == ["a", "b", "loss", "a_mirror", "g", "update"]
    planned(changed)
    with pytest.raises(PlanError, match="no output and no effect needs step"):
        repeat(program_of({"x": 1}, nodes, ["loss"], forward=3), [1])


def test_views_share_the_memory_of_their_base() -> None:
    """A view shares the memory of its base and keeps it alive, even if in-place computation is switched off."""
    nodes = [Node("a", ("x",), 104), Node("v", ("a",), 16, (VIEW,)), Node("b", ("v",), 24), Node("c", ("v", "b"), 8)]
    program = program_of({"x": 1}, nodes, ["c"])
    steps = planned(program)
    assert steps.memory.peak == 136
    assert steps.memory.entry_storage[1] == steps.memory.entry_storage[2]


def test_views_of_variables_have_no_planned_memory() -> None:
    """Views of a variable, and views of these, have no planned memory."""
    nodes = [Node("v", ("x",), 50, (VIEW,)), Node("w", ("v",), 10, (VIEW,)), Node("b", ("w",), 24)]
    steps = planned(program_of({"x": 100}, nodes, ["b"]))
    assert steps.memory.peak == 24
    assert steps.memory.entry_storage.tolist() == [-1, -1, -1, 0]


def test_writes_to_results_follow_their_readers() -> None:
    """A write in place runs after all readers of the old value; another order is refused."""
    nodes = [Node("a", ("x",), 64), Node("r", ("a",), 8), Node("a2", ("a",), 64, (WRITE,)), Node("s", ("a2", "r"), 8)]
    program = program_of({"x": 1}, nodes, ["s"])
    assert planned(program).memory.peak == 64 + 8 + 8
    assert 2 in dependencies(program)[3]
    with pytest.raises(PlanError, match="reads 'a_output'"):
        planned(program.in_order([1, 3, 2, 4]))


def test_readers_of_overwritten_results_are_not_repeated() -> None:
    """A node whose input is overwritten is not repeatable, because it would read the new value."""
    nodes = [Node("a", ("x",), 64), Node("r", ("a",), 8), Node("a2", ("a",), 64, (WRITE,)), Node("l", ("a2",), 4)]
    nodes += [Node("g", ("r", "a2"), 8)]
    assert repeatable(program_of({"x": 1}, nodes, ["l", "g"], forward=4)) == [1]


def test_mandatory_sharing_must_fit() -> None:
    """A view that is larger than its base raises an error."""
    with pytest.raises(PlanError, match=r"'v_output' \(20 bytes\) must lie in the memory of 'a_output' \(10 bytes\)"):
        program_of({"x": 1}, [Node("a", ("x",), 10), Node("v", ("a",), 20, (VIEW,))], ["v"])


def test_free_backward_steps_are_placed_lazily() -> None:
    """A backward step that reads no tangent is moved to its first reader; other steps keep their positions."""
    nodes = [Node("a", ("x",), 64), Node("l", ("a",), 4)]
    nodes += [Node("mask", ("a",), 64), Node("g1", ("dy", "a"), 64), Node("g2", ("g1", "mask"), 64)]
    program = program_of({"x": 1, "dy": 4}, nodes, ["l", "g2"], forward=2, tangents=["dy"])
    moved = lazy_backward(program)
    assert [program.graph.names[nid] for nid in moved.order] == ["a", "l", "g1", "mask", "g2"]
    assert lazy_backward(moved) is moved
    silent = program_of({"x": 1, "dy": 4}, nodes, ["l", "g2"], forward=2)
    assert lazy_backward(silent) is silent


def random_program(seed: int) -> Program:
    """Return a random program of a forward and a backward part, with views and held results."""
    draw = random.Random(seed)
    names, nodes, size = ["x"], [], {"x": 64}
    count = draw.randint(6, 12)
    for k in range(count):
        reads = tuple(dict.fromkeys(draw.choices(names[-4:], k=draw.randint(1, 2))))
        view = draw.random() < 0.3
        nbytes = draw.randint(1, size[reads[0]]) if view else draw.choice([16, 64, 128])
        nodes.append(Node(f"f{k}", reads, nbytes, (VIEW,) if view else ()))
        names.append(f"f{k}")
        size[f"f{k}"] = nbytes
    back = "dy"
    for k in reversed(range(count)):
        view = draw.random() < 0.2 and back != "dy"
        nbytes = draw.randint(1, size[back]) if view else 32
        reads = (back, *draw.sample(names, 1), *draw.sample(names, 1))
        nodes.append(Node(f"b{k}", tuple(dict.fromkeys(reads)), nbytes, (VIEW,) if view else ()))
        back, size[f"b{k}"] = f"b{k}", nbytes
    held = {f"f{k}": draw.choice(nodes[k:]).name for k in range(count) if draw.random() < 0.2}
    held[back] = back
    loss, effects = f"f{count - 1}", [node.name for node in nodes]
    return program_of({"x": 64, "dy": 4}, nodes, [loss], forward=count, held=held, effects=effects, tangents=["dy"])


@pytest.mark.parametrize("seed", range(60))
def test_prices_are_those_of_plans(seed: int) -> None:
    """The tape's peak for a set of repeated nodes is the bound of the rewritten program, whose plan is valid."""
    program = random_program(seed)
    draw = random.Random(seed)
    for options in (PLAIN, PLAIN.replace(enable_inplace=True)):
        tape = Tape(program, assignment=assignment(program, options), options=options, seconds=[1.0] * 99)
        for _ in range(4):
            chosen = [nid for nid in tape.repeatable if draw.random() < 0.5]
            changed = repeat(program, chosen)
            actual = Buffers(changed, assignment(changed, options), options=options)
            assert tape.price(chosen).peak == actual.lower_bound
            planned(changed, options)


def test_budget_with_views_and_held_results() -> None:
    """A program with views and held results is planned within a budget below its plain peak."""
    program = random_program(5)
    drafts = Drafts(program)
    plain = drafts.plain(PLAIN).memory.peak
    fitted = drafts.plan(PLAIN.replace(budget=plain - 1), cost=lambda p: [1.0] * p.graph.num_nodes)
    assert fitted.memory.peak < plain


def test_an_identity_does_not_share_memory_that_is_overwritten_later() -> None:
    """The copy of a result keeps its value when a later step overwrites that result."""
    copy, write = Work(label="copy", inplace=(VIEW,)), Work(label="add_", over=(WRITE,))
    works = [VARIABLE, Work(label="a"), copy, write, Work(label="sum")]
    graph = Graph(names=["x", "a", "copy", "b", "sum"], works=works, inputs=[[], [0], [1], [1], [2, 3]], heads=[4])
    program = Program(graph=graph, nbytes=[64] * 5)
    assert planned(program, PlanOptions()).memory.peak == 192


def test_an_identity_of_an_input_that_is_read_twice_is_no_write_over_it() -> None:
    """A step that reads a result by two slots does not compute in its place before the result is dead."""
    works = [VARIABLE, Work(label="a"), Work(label="step", inplace=(VIEW,)), Work(label="sum")]
    graph = Graph(names=["x", "a", "b", "sum"], works=works, inputs=[[], [0], [1, 1], [1, 2]], heads=[3])
    planned(Program(graph=graph, nbytes=[64] * 4), PlanOptions())


def test_a_holder_follows_the_maker_in_every_order() -> None:
    """The node until which a result is held stays after the step that makes it, although it reads nothing of it."""
    nodes = [Node("a", ("x",), 640), Node("b", ("a",), 8), Node("holder", ("x",), 8), Node("end", ("holder", "b"), 8)]
    program = program_of({"x": 1}, nodes, ["end"], held={"a": "holder"})
    assert dependencies(program)[3] == [1]
    steps = plan_program(program)
    validate(steps)
    assert steps.order.index(1) < steps.order.index(3)
