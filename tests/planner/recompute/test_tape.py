"""A tape, which predicts peaks and times with array arithmetic, agrees with a step-by-step computation."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.planner.recompute.stepwise_cost import walk
from weftplan import models
from weftplan.planner.choose_order import stepwise_forward
from weftplan.planner.recompute import Tape
from weftplan.planner.symbolic.node_seconds import node_seconds


def same_partition(mine: Any, theirs: Any) -> bool:
    """Return whether two numberings group the same entries together; entries with a negative number are in no group."""
    if not np.array_equal(mine < 0, theirs < 0):
        return False
    pairs = {(int(a), int(b)) for a, b in zip(mine, theirs, strict=True) if a >= 0}
    return len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


def check_agreement(tape: Tape, rng: random.Random, rounds: int = 12) -> int:
    """Check a tape against :func:`walk` for random sets of repeated nodes; return the number of repeated nodes."""
    twins = 0
    for round in range(rounds):
        share = rng.random()
        chosen = frozenset(nid for nid in tape.repeatable if round == 1 or (round and rng.random() < share))
        price, profile, want = walk(tape, chosen)
        actual, live = tape.look(chosen)
        assert actual == price
        assert live.tolist() == profile.tolist()
        assert int(live.max(initial=0)) == price.peak
        got = tape.trace(chosen)
        for field in ("first", "last"):
            np.testing.assert_array_equal(getattr(got, field), getattr(want, field), err_msg=field)
        held = want.block >= 0
        np.testing.assert_array_equal(got.needed[held], want.needed[held])
        assert same_partition(got.block, want.block)
        twins += len(price.twins)
    return twins


@pytest.mark.parametrize("seed", range(60))
def test_random_graphs(training: Any, interpret: Any, seed: int) -> None:
    """Tape and ``walk`` agree on graphs with diamonds, views, in-place chains, several outputs, ignored inputs."""
    symbol = interpret.symbol(seed, 4 + seed % 30)
    result = training(symbol, dict.fromkeys(symbol.list_arguments(), (6, 6)), workspaces=bool(seed % 2))
    check_agreement(result.tape(), random.Random(seed))


@pytest.mark.parametrize("kind", ["conv", "residual", "lstm"])
def test_networks(training: Any, nets: Any, kind: str) -> None:
    """Tape and ``walk`` agree on networks with batch norm, dropout, skips, and gradient sums of shared weights."""
    shapes: dict[str, Any] = {"data": (4, 3, 10, 10)}
    if kind == "lstm":
        shapes = {"h": (8, 16), "c": (8, 16), **{f"x{i}": (8, 16) for i in range(12)}}
    result = training(getattr(nets, kind)(12), shapes)
    assert check_agreement(result.tape(), random.Random(0)) > 100


def test_another_order(training: Any) -> None:
    """Tape and ``walk`` agree if the forward nodes run in another order than their numbers."""
    result = training(models.get("lstm"), models.input_shapes("lstm", 4))
    program = stepwise_forward(result.program)
    assert program.order != result.program.order
    tape = Tape(program, assignment=result.assignment, options=result.options, seconds=node_seconds(program))
    assert check_agreement(tape, random.Random(1), 4) > 100


def test_two_devices(training: Any, nets: Any) -> None:
    """Tape and ``walk`` agree for a graph on two devices, whose peaks are added."""
    symbol, groups = nets.two_devices()
    result = training(symbol, {"data": (64, 32)}, group2ctx=groups)
    assert len(result.program.contexts) == 2
    check_agreement(result.tape(), random.Random(2))
