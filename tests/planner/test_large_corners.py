"""Algorithms that must not take quadratic time or memory, compared with simple implementations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from weftplan import symbol as sym
from weftplan.planner import PlanOptions, liveness, plan_symbol
from weftplan.planner.packing.problem import Problem, leaf_parts, sectioned
from weftplan.symbol.node import Node


def test_merging_compares_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging 2,000 nodes of one input, which differ in a parameter, takes less than 20,000 comparisons."""
    compared = 0

    class Counted(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    x = sym.Variable("x")
    heads = [x * float(k % 1000) for k in range(2000)]
    for head in heads:
        node: Node = head.entries[0].node
        node.attrs = {key: Counted(value) for key, value in node.attrs.items()}
    planned = plan_symbol(sym.Group(heads), {"x": (2,)}, options=PlanOptions(strategy="none"))
    copies = [node for node in planned.graph.nodes if node.op is not None and node.op.name == "_copy"]
    assert planned.graph.num_nodes == 1 + 1000 + len(copies)
    assert compared < 10 * len(heads)


def parts(whole: Problem) -> Iterator[Problem]:
    """Yield the independent parts of a problem: no buffer of a part is alive together with one of another part."""
    cuts = [t for t in range(1, whole.sections) if not np.any((whole.lo < t) & (whole.hi > t))]
    part = np.searchsorted(cuts, whole.lo, side="right")
    for number in np.unique(part):
        yield whole.take(part == number)


def layer_by_layer(problem: Problem) -> list[tuple[int, Problem]]:
    """Return (base offset, problem) of all parts, found step by step.

    Buffers that are alive throughout a part are split off, and the others are divided further.
    """
    leaves = []
    todo = [(0, problem)] if len(problem) else []
    while todo:
        base, whole = todo.pop()
        for part in parts(whole):
            always = (part.lo == 0) & (part.hi == part.sections)
            if always.all() or not always.any():
                leaves.append((base, part))
                continue
            ground = part.take(always)
            leaves.append((base, ground))
            todo.append((base + int(ground.size.sum()), part.take(~always)))
    return leaves


@pytest.mark.parametrize("seed", range(40))
def test_leaf_parts_of_random_lifetimes(seed: int) -> None:
    """``leaf_parts`` divides random lifetimes into the parts of the step-by-step method, in the same order."""
    rng = np.random.default_rng(seed)
    for kind in range(4):
        n, times = int(rng.integers(1, 60)), int(rng.integers(2, 50))
        lower = rng.integers(0, times, n)
        upper = lower + rng.integers(1, times if kind == 0 else 4, n)
        if kind == 1:
            lower = np.arange(n)
            upper = 2 * n - lower + rng.integers(0, 2, n)
        elif kind == 2:
            upper = np.where(rng.random(n) < 0.5, times + 5, upper)
        problem = sectioned(lower, upper, rng.integers(1, 9, n), np.arange(n))
        (offsets, actual), steps = leaf_parts(problem), layer_by_layer(problem)
        expected = [(base, part) for base, part in steps if len(part) > 1]
        alone = {int(part.index[0]): base for base, part in steps if len(part) == 1}
        assert offsets.tolist() == [alone.get(k, 0) for k in range(n)]
        assert [base for base, _ in actual] == [base for base, _ in expected]
        for (_, part), (_, second) in zip(actual, expected, strict=True):
            assert part.sections == second.sections
            for field in ("lo", "hi", "size", "index"):
                assert getattr(part, field).tolist() == getattr(second, field).tolist()


@pytest.mark.parametrize("twins", [1, 2])
def test_nested_lifetimes_are_copied_once(twins: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5,000 nested lifetimes each buffer is copied at most once, and a buffer without a twin never."""
    taken = 0
    take = Problem.take

    def counted(self: Problem, which: Any) -> Problem:
        nonlocal taken
        taken += len(which)
        return take(self, which)

    monkeypatch.setattr(Problem, "take", counted)
    n = 5000
    level = np.arange(n) // twins
    problem = sectioned(level, 2 * n - level, np.full(n, 8), np.arange(n))
    offsets, leaves = leaf_parts(problem)
    assert len(leaves) == taken // 2 == (0 if twins == 1 else n // 2)
    assert offsets.tolist() == ([8 * k for k in range(n)] if twins == 1 else [0] * n)


@pytest.mark.parametrize("block", [1, 3, 64])
def test_dependencies_by_blocks_of_steps(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``last_step_depends`` gives the same answers with sets of a few steps at a time and with sets of all steps."""
    rng = random.Random(block)
    for _ in range(50):
        count = rng.randrange(1, 30)
        producers = [rng.sample(range(step), min(step, rng.randrange(3))) for step in range(count)]
        rows = [sorted(rng.choices(range(count), k=rng.randrange(4))) for _ in range(20)]
        sets = liveness.ancestors(producers)
        expected = [not row or all(sets[row[-1]] >> step & 1 for step in row) for row in rows]
        with monkeypatch.context() as patch:
            patch.setattr(liveness, "MAX_STEPS", block)
            assert liveness.last_step_depends(producers, rows) == expected


def test_paddle_counts_no_waits_of_long_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit on steps Paddle's plan has the same storages, but its added waits are not counted."""
    x = sym.Variable("x")
    for _ in range(6):
        x = sym.tanh(x) * sym.exp(x)
    options = PlanOptions(compat="paddle", strategy="match_range")
    counted = plan_symbol(x, {"x": (4,)}, options=options).memory
    monkeypatch.setattr("weftplan.planner.strategies.MAX_STEPS", 5)
    plan = plan_symbol(x, {"x": (4,)}, options=options).memory
    assert counted.num_added_waits is not None
    assert plan.num_added_waits is None
    assert plan.entry_storage.tolist() == counted.entry_storage.tolist()
