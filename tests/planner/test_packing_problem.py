"""Packing under constraints: every packing satisfies them, the checker finds each violation, bad input is named."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftplan.errors import PlanError
from weftplan.planner.packing import Packing, PackingError, PackingProblem, check_problem, pack, pack_problem

ROWS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 10), st.integers(1, 30)).map(lambda b: (b[0], b[0] + b[1], b[2])),
    min_size=1,
    max_size=16,
)


@given(ROWS, st.data(), st.sampled_from([1, 8]))
@settings(deadline=None, max_examples=80)
def test_random_problems_satisfy_their_constraints(rows: list[tuple[int, int, int]], data: Any, unit: int) -> None:
    """Random pins, banks, pairs, ranges and holes hold, and the peak is at least the lower bound."""
    lower, upper, size = ([row[k] for row in rows] for k in range(3))
    count = len(rows)
    number = st.integers(0, count - 1)
    pin = data.draw(st.one_of(st.none(), number))
    pairs = data.draw(st.lists(st.tuples(number, number), max_size=4))
    bank = data.draw(st.lists(st.integers(-1, 1), min_size=count, max_size=count))
    if pin is not None:
        bank[pin] = 1
    problem = PackingProblem(
        lower=lower,
        upper=upper,
        size=size,
        alignment=unit,
        pins={} if pin is None else {pin: 64},
        banks=(32, None),
        bank=[b if size[k] <= 16 or b else 1 for k, b in enumerate(bank)] if unit == 1 else [1] * count,
        apart=[(a, b) for a, b in pairs if a != b],
        reserved=[(1, 24, 40)],
        holes={k: [(lower[k] + 1, lower[k] + 2)] for k in range(0, count, 2) if upper[k] - lower[k] > 2},
    )
    try:
        packing = pack_problem(problem, effort="fast")
    except PackingError:
        return  # the 32 bytes of the first bank may be too few
    check_problem(problem, packing)
    assert packing.peak >= packing.lower_bound
    assert packing == pack_problem(problem, effort="fast")


def test_without_constraints_it_is_the_same_packing() -> None:
    """A problem of lifetimes and sizes alone gets the packing of `pack`."""
    rng = np.random.default_rng(0)
    lower = rng.integers(0, 50, 60)
    columns = lower, lower + rng.integers(1, 20, 60), rng.integers(1, 100, 60)
    problem = PackingProblem(lower=columns[0], upper=columns[1], size=columns[2])
    packing = pack_problem(problem)
    assert packing.offsets.tolist() == pack(*columns).offsets.tolist()
    assert packing.is_optimal == (packing.peak == packing.lower_bound)
    check_problem(problem, packing)


def test_hole_of_a_lifetime_is_used() -> None:
    """A buffer that is idle for a while lends its bytes, so two buffers that overlap in time need the bytes of one."""
    problem = PackingProblem(lower=[0, 2], upper=[6, 4], size=[8, 8], holes={0: [(2, 4)]})
    packing = pack_problem(problem)
    assert (packing.peak, packing.is_optimal) == (8, True)
    check_problem(problem, packing)


def test_holes_that_touch_are_one_hole() -> None:
    """Two holes, one of which begins where the other ends, lend their bytes to one buffer."""
    problem = PackingProblem(lower=[0, 2], upper=[6, 5], size=[8, 8], holes={0: [(2, 3), (3, 5)]})
    packing = pack_problem(problem)
    assert packing.peak == 8
    check_problem(problem, packing)


def test_many_pins_on_the_same_bytes_are_checked_in_time() -> None:
    """20,000 pinned buffers that follow each other on the same bytes take less than a second, not minutes."""
    count = 20_000
    rows: dict[str, Any] = {"lower": range(count), "upper": range(1, count + 1), "size": [8] * count}
    began = time.process_time()
    problem = PackingProblem(**rows, pins=dict.fromkeys(range(count), 0))
    assert time.process_time() - began < 5
    assert pack_problem(problem).peak == 8
    with pytest.raises(PackingError, match="buffers 7 and 8 are both pinned and overlap"):
        PackingProblem(**rows | {"upper": [*range(1, 8), 9, *range(9, count + 1)]}, pins=dict.fromkeys(range(count), 0))


def test_open_buffers_fill_the_first_bank_first() -> None:
    """A buffer with an open bank takes the fast bank if that has room, else the next one."""
    problem = PackingProblem(lower=[0, 0, 0], upper=[1, 1, 1], size=[8, 8, 8], banks=(16, None))
    packing = pack_problem(problem)
    assert packing.bank is not None
    assert sorted(packing.bank.tolist()) == [0, 0, 1]
    assert packing.bank_peaks == (16, 8)
    check_problem(problem, packing)


BASE: dict[str, Any] = {"lower": [0, 0, 4], "upper": [2, 2, 6], "size": [8, 8, 8]}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"pins": {0: 0, 1: 4}}, "buffers 0 and 1 are both pinned and overlap: 0 at bytes 0..8, 1 at 4..12"),
        ({"pins": {0: 0, 2: 0}, "apart": [(0, 2)]}, "buffers 0 and 2 are both pinned and overlap"),
        ({"pins": {7: 0}}, "pins: expected the number of one of the 3 buffers, got 7"),
        ({"pins": {0: -8}}, "pin of buffer 0: expected an integer from 0"),
        ({"pins": {0: 4}, "alignment": 8}, "buffer 0 is pinned at bytes 4..12; expected a multiple of 8"),
        ({"pins": {0: 4}, "reserved": [(0, 8, 9)]}, "buffer 0 is pinned at bytes 4..12, but 8..9 is reserved"),
        ({"pins": {0: 4}, "banks": (8,)}, "inside bank 0 of 8 bytes"),
        ({"pins": {0: 4}, "banks": (8, 8)}, "its bank is open"),
        ({"banks": ()}, "at least one capacity"),
        ({"bank": [0, 0, 1]}, "bank: expected 3 numbers from -1"),
        ({"apart": [(1, 1)]}, "buffer 1 cannot be kept apart from itself"),
        ({"reserved": [(0, 8, 8)]}, "end > first byte"),
        ({"holes": {0: [(0, 1)]}}, "holes of buffer 0: expected disjoint"),
        ({"holes": {2: [(5, 5.5)]}}, "holes of buffer 2: expected integers that fit 64 bits, got 5.5"),
        ({"holes": {0: [(1, 2, 3)]}}, "holes of buffer 0: expected rows of 2 integers"),
        ({"holes": {0: None}}, "holes of buffer 0: expected rows of 2 integers, got None"),
        ({"holes": [(0, 1)]}, "holes: expected a mapping from buffers"),
        ({"pins": [0]}, "pins: expected a mapping from buffers"),
        ({"pins": {0: True}}, "pin of buffer 0: expected an integer from 0"),
        ({"apart": [(0, 1, 2)]}, "apart: expected rows of 2 integers"),
        ({"apart": 3}, "apart: expected rows of 2 integers, got 3"),
        ({"reserved": [(0, 8)]}, "reserved: expected rows of 3 integers"),
        ({"banks": 8}, "banks: expected a sequence, got 8"),
        ({"banks": (float("nan"),)}, "capacity of bank 0: expected an integer from 0"),
        ({"bank": [0, -2, 0]}, r"got bank\[1\] = -2"),
        ({"pins": {0: 0}, "alignment": 16, "banks": (8,)}, "pinned at bytes 0..16; .* inside bank 0 of 8 bytes"),
        ({"pins": {0: 0}, "alignment": 16, "reserved": [(0, 9, 10)]}, "pinned at bytes 0..16, but 9..10 is reserved"),
    ],
)
def test_contradictory_problem_is_refused(more: dict[str, Any], message: str) -> None:
    """Each malformed or contradictory constraint is named when the problem is made."""
    with pytest.raises(PackingError, match=message):
        PackingProblem(**BASE | more)


def test_too_small_banks_are_named() -> None:
    """The error of a bank without room names the bank or the buffer."""
    with pytest.raises(PackingError, match="bank 0 has 8 bytes, but the best packing needs 16"):
        pack_problem(PackingProblem(**BASE, banks=(8,)))
    with pytest.raises(PackingError, match=r"buffer \d of 8 bytes fits in no bank"):
        pack_problem(PackingProblem(**BASE, banks=(8,), apart=[(0, 2)]))


@pytest.mark.parametrize(
    ("more", "offsets", "message"),
    [
        ({"pins": {0: 8}}, [0, 8, 0], "buffer 0 is pinned at 8, but lies at 0"),
        ({"apart": [(0, 2)]}, [0, 8, 4], "buffers 0 and 2 must be kept apart, but both use byte 4"),
        ({"reserved": [(0, 12, 20)]}, [0, 8, 0], "buffer 1 uses bytes 8..16, but 12..20 is reserved"),
        ({"banks": (12,)}, [0, 8, 0], "buffer 1 ends at byte 16 of bank 0, which has 12 bytes"),
        ({}, [0, 4, 0], "buffers 0 and 1 overlap"),
        ({}, [0, 12, 0], "reports a peak of 16 bytes"),
    ],
)
def test_checker_finds_each_violation(more: dict[str, Any], offsets: list[int], message: str) -> None:
    """A packing that violates one constraint is refused by the checker, which shares no code with the packer."""
    problem = PackingProblem(**BASE | more)
    valid = Packing(np.array([0, 8, 0]), 16, 16, bank=np.zeros(3, np.int64), bank_peaks=(16,))
    with pytest.raises(PlanError, match=message):
        check_problem(problem, replace(valid, offsets=np.array(offsets)))
