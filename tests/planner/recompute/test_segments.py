"""Segments of the forward part: their memory, their number, and the stored results of the last segment."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from weftplan import symbol as sym
from weftplan.planner.recompute import Tape
from weftplan.planner.recompute.ladder import Bundle, _enough
from weftplan.planner.recompute.segments import capacities, least_capacity, measure, segments, square_root


@pytest.fixture
def chain(training: Any) -> Any:
    """A function that returns the tape of ``length`` sines in a row, each with a result of 4,096 bytes."""

    def make(length: int) -> Tape:
        x = sym.Variable("data")
        for i in range(length):
            x = sym.sin(x, name=f"sin{i}")
        tape: Tape = training(sym.sum(x, name="total"), {"data": (32, 32)}, strategy="match_range").tape()
        return tape

    return make


def test_the_least_room_of_a_chain_is_near_the_root_of_twice_its_length(chain: Any) -> None:
    """The smallest possible room of a segment, for a chain of n results, is about sqrt(2 n) results.

    Segments of M, M - 1, M - 2, ... results cover M (M + 1) / 2 of them.
    """
    tape = chain(450)
    room = least_capacity(measure(tape)) / 4096
    assert math.sqrt(2 * 450) * 0.95 <= room <= math.sqrt(2 * 450) * 1.25


def test_the_peak_follows_the_room_and_time_falls_with_it(chain: Any) -> None:
    """The peak is at most six results above the room of a segment, and more room never costs more time."""
    tape = chain(300)
    cuts = measure(tape)
    before = None
    for room in reversed(capacities(cuts, 16)):
        chosen = segments(cuts, room)
        assert chosen is not None
        price = tape.price(chosen)
        assert price.peak <= room + 6 * 4096
        assert before is None or price.seconds <= before
        before = price.seconds
    assert before is not None
    assert before < 0.1 * tape.step_seconds


@pytest.mark.parametrize(("second", "taken"), [(20, ["first", "second"]), (21, ["first"])])
def test_redundant_bundles_are_skipped(second: int, taken: list[str]) -> None:
    """A bundle of nodes is skipped if less than half of the bytes that it frees would still reduce an excess."""
    names = {frozenset([1]): "first", frozenset([2]): "second"}
    bundles = [Bundle(frozenset([1]), 0, 2, 30), Bundle(frozenset([2]), 1, 4, second)]
    actual = _enough(bundles, np.array([30, 40, 10, 0], dtype=np.int64))
    assert [names[nodes] for nodes in actual] == taken


def test_too_little_room_is_said(chain: Any) -> None:
    """``segments`` returns None if the room of a segment is too small."""
    tape = chain(100)
    cuts = measure(tape)
    assert segments(cuts, 3 * 4096) is None
    assert segments(cuts, least_capacity(cuts) * 0.9) is None


def test_the_last_segment_is_kept_but_for_light_nodes(chain: Any) -> None:
    """The last segment recomputes light nodes only, so that fewer heavy nodes are recomputed in total."""
    tape = chain(100)
    cuts = measure(tape)
    room = 50 * 4096
    plain = segments(cuts, room)
    every = frozenset(tape.forward[1::2])
    light = segments(cuts, room, light=every)
    assert plain is not None
    assert light is not None
    last = max(tape.step_of[nid] for nid in plain)
    assert last < 60
    assert all(tape.step_of[nid] % 2 for nid in light if tape.step_of[nid] > last)
    heavy = [nid for nid in light if nid not in every]
    assert len(heavy) < sum(nid not in every for nid in plain)


def test_the_square_root_rule_lowers_the_peak_by_more_than_trying_nothing(chain: Any) -> None:
    """The square-root rule lowers the peak of 450 results to less than a tenth, and does not raise that of two."""
    tape = chain(450)
    assert square_root(tape).peak < tape.price(()).peak / 10
    short = chain(2)
    assert square_root(short).peak <= short.price(()).peak
