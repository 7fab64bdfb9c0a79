"""Packing of large parts: merging of exact neighbours, and the tallest buffers before all others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.packing_instances import KINDS, rectangles
from weftplan.planner.packing import check_packing, pack, place_by_birth
from weftplan.planner.packing.exact_neighbours import merge_exact_neighbours, unmerge
from weftplan.planner.packing.place_by_birth import pack_by_birth, pack_tall_first
from weftplan.planner.packing.problem import sectioned

few_buffers = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 4), st.integers(1, 3)).map(lambda b: (b[0], b[0] + b[1], b[2])),
    min_size=1,
    max_size=40,
)


@given(few_buffers)
@settings(deadline=None, max_examples=150)
def test_merging_keeps_the_bound_and_packings_valid(rows: list[tuple[int, int, int]]) -> None:
    """A packing of the merged buffers is one of the original buffers, with the same height and lower bound."""
    lower, upper, size = np.array(rows, np.int64).T
    problem = sectioned(lower, upper, size, np.arange(len(rows)))
    merged, rounds = merge_exact_neighbours(problem)
    assert merged.lower_bound() == problem.lower_bound()
    packed = pack_by_birth(merged)
    peak = check_packing(merged.lo, merged.hi, merged.size, packed)
    assert check_packing(lower, upper, size, unmerge(packed, rounds)) == peak


@given(few_buffers, st.integers(0, 12))
@settings(deadline=None, max_examples=150)
def test_tall_first_is_valid_for_any_number_of_tall_buffers(rows: list[tuple[int, int, int]], tall: int) -> None:
    """The packing is valid if none, some or all buffers count as tall."""
    lower, upper, size = np.array(rows, np.int64).T
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place_by_birth, "NUM_TALL", tall)
        offsets = pack_tall_first(sectioned(lower, upper, size, np.arange(len(rows))))
    check_packing(lower, upper, size, offsets)


def test_rectangles_are_merged_into_the_rectangle_they_were_cut_from() -> None:
    """Buffers that tile a rectangle reach the lower bound, in any number."""
    for count in (500, 20_000):
        assert pack(*rectangles(count, 3)).is_optimal


@pytest.mark.parametrize("kind", ["rectangles, 15 % removed", "rectangles, trimmed"])
def test_a_few_tall_buffers_do_not_determine_the_height(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without first fit, large problems of short-lived tall buffers need at most 1.5 times the lower bound."""
    monkeypatch.setattr("weftplan.planner.packing.api.MAX_FOR_FIRST_FIT", 0)
    buffers = KINDS[kind](40_000, 7)
    packing = pack(*buffers, effort="fast")
    assert check_packing(*buffers, packing.offsets) == packing.peak
    assert packing.ratio <= 1.5
