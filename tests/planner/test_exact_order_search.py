"""The search for the best order of execution, against all orders of small programs, and its limits."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.planner.plain_steps import Step, program_of_steps
from weftplan.planner import PlanOptions, plan_program, validate
from weftplan.planner.choose_order import choose_order, lower_bound
from weftplan.planner.exact_order_search import PartModel
from weftplan.planner.liveness import dependencies
from weftplan.planner.program import VARIABLE, Graph, Program, Work
from weftplan.support.tensor_types import InplacePair

PLAIN = PlanOptions(reorder=False)


def random_program(seed: int, count: int = 7) -> Program:
    """Return a program of ``count`` steps with in-place pairs, identities, views, scratch, states, unread results."""
    rng = random.Random(seed)
    works, inputs, nbytes, controls = [VARIABLE, VARIABLE], [[], []], [64, 64], [[], []]  # type: ignore[var-annotated]
    for nid in range(2, count + 2):
        reads = [rng.choice(range(max(0, nid - 4), nid)) for _ in range(rng.randint(1, 2))]
        kind = rng.choice(["plain", "plain", "inplace", "identity", "view", "state", "control"])
        kind = "plain" if nid == count + 1 else kind
        size = rng.choice([64, 128, 192, 640])
        work = Work(label="step")
        if kind in ("inplace", "identity", "view"):
            size = nbytes[reads[0]]
            pair = InplacePair(0, 0, identity=kind != "inplace")
            reads = reads[:1] if kind == "identity" else reads
            work = Work(label=kind, over=(pair,)) if kind == "view" else Work(label=kind, inplace=(pair,))
        if kind == "state":
            reads, work = [reads[0], 1], Work(label="state", writes=(1,))
        works.append(work)
        inputs.append(reads)
        nbytes.append(size)
        controls.append([rng.randrange(2, nid)] if kind == "control" and nid > 2 else [])
    forward = rng.choice([count, count // 2])
    heads = sorted({count + 1, rng.randrange(2, forward + 2)})
    names = [f"n{k}" for k in range(count + 2)]
    graph = Graph(names=names, works=works, inputs=inputs, controls=controls, heads=heads)
    scratch = {nid: 256 for nid in range(2, count + 2) if rng.random() < 0.3}
    late = frozenset(e for e in heads if e >= forward + 2)
    return Program(graph=graph, nbytes=nbytes, num_forward=forward, workspaces=scratch, gradients=late)


def all_orders(nodes: list[int], before: list[list[int]]) -> Iterator[list[int]]:
    """Yield every order of ``nodes`` in which each node follows those in ``before``."""
    if not nodes:
        yield []
    for nid in nodes:
        if not set(before[nid]) & set(nodes):
            for rest in all_orders([n for n in nodes if n != nid], before):
                yield [nid, *rest]


@pytest.mark.parametrize("seed", range(150))
def test_proved_order_is_the_best_of_all_orders(seed: int) -> None:
    """The chosen order is valid and has the lowest bound of all orders; the search proves that on most programs."""
    program = random_program(seed)
    before = dependencies(program)
    chosen = choose_order(program, PLAIN)
    best = min(
        lower_bound(program, [*forward, *backward], options=PLAIN)
        for forward in all_orders(program.forward, before)
        for backward in all_orders(program.backward, before)
    )
    assert chosen.bound == lower_bound(program, chosen.nodes, options=PLAIN)
    assert set(chosen.nodes[: program.num_forward]) == set(program.forward)
    for step, nid in enumerate(chosen.nodes):
        assert set(before[nid]) <= set(chosen.nodes[:step])
    if chosen.proved:
        assert chosen.bound == best
    assert chosen.bound <= lower_bound(program, program.order, options=PLAIN)
    validate(plan_program(program))


def test_most_small_programs_are_proved() -> None:
    """Of 150 programs of seven steps at least 140 are proved."""
    assert sum(choose_order(random_program(seed), PLAIN).proved for seed in range(150)) >= 140


def wide_program(branches: int) -> Program:
    """Return a program of branches of two steps and their sum, whose orders are many and hard to compare."""
    rng = random.Random(branches)
    steps, last = [], []
    for k in range(branches):
        steps += [Step(f"a{k}", ("x",), rng.randrange(1, 1000)), Step(f"b{k}", (f"a{k}",), rng.randrange(1, 1000))]
        last.append(f"b{k}")
    return program_of_steps({"x": 64}, [*steps, Step("end", tuple(last), 8)], ["end"])


def test_work_is_bounded_and_repeatable() -> None:
    """A search of many branches ends near its work, with a valid order that is equal in every run."""
    program = wide_program(40)
    model = PartModel(program, program.order, predecessors=dependencies(program), options=PLAIN)
    first, second = (model.search(20_000) for _ in range(2))
    assert first == second
    assert sorted(first.nodes) == sorted(program.order)


def test_draws_with_effects_keep_their_order() -> None:
    """Steps with effects that may not be repeated stay in order, although the other order needs less memory."""
    graph = Graph(
        names=["x", "wide", "busy", "end"],
        works=[VARIABLE, Work(label="draw", may_repeat=False), Work(label="draw", may_repeat=False), Work(label="sum")],
        inputs=[[], [0], [0], [1, 2]],
        heads=[3],
        effects=[1, 2],
    )
    program = Program(graph=graph, nbytes=[64, 5000, 1000, 64], workspaces={2: 10_000})
    assert plan_program(program).order == [1, 2, 3]
    graph.effects = []
    assert plan_program(program).order == [2, 1, 3]
