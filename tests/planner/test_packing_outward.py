"""Packing outwards from the peak: valid, at the bound for nested lifetimes, with few waits for earlier users."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weftplan import models
from weftplan.planner import PlanOptions, plan_symbol
from weftplan.planner.packing import Precedence, check_packing, reuse_edges
from weftplan.planner.packing.place_from_the_peak import VARIANTS, Variant, pack_outwards, variants_of
from weftplan.planner.packing.problem import Problem, peak_of, sectioned

NO_LIMIT = 1 << 60

buffers = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 14), st.integers(1, 40)).map(lambda b: (b[0], b[0] + b[1], b[2])),
    min_size=1,
    max_size=30,
)


def problem_of(rows: list[tuple[int, int, int]]) -> Problem:
    """Return the rows (lower, upper, size) as a problem."""
    lower, upper, size = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return sectioned(lower, upper, size, np.arange(len(rows)))


def precedence(count: int, holds: Callable[[int, int], bool]) -> Precedence:
    """Return a precedence: step k alone uses buffer k, and step i needs step k if ``holds(k, i)``."""
    needed = [sum(1 << k for k in range(count) if k == i or holds(k, i)) for i in range(count)]
    return Precedence([1 << k for k in range(count)], needed)


@given(buffers, st.sampled_from(VARIANTS), st.integers(0, 60), st.booleans())
@settings(deadline=None, max_examples=150)
def test_every_variant_is_valid(rows: list[tuple[int, int, int]], variant: Variant, slack: int, judged: bool) -> None:
    """No live buffers overlap, for any variant, floor and precedence."""
    problem = problem_of(rows)
    order = precedence(len(rows), lambda earlier, later: (earlier + 2 * later) % 3 > 0) if judged else None
    actual = pack_outwards(problem, floor=problem.lower_bound() + slack, limit=NO_LIMIT, variant=variant, order=order)
    assert actual is not None
    peak = check_packing(problem.lo, problem.hi, problem.size, actual[0])
    assert peak == peak_of(problem, actual[0])


@given(buffers)
@settings(deadline=None, max_examples=100)
def test_omitted_variants_are_redundant(rows: list[tuple[int, int, int]]) -> None:
    """Every variant packs like one of the variants that ``variants_of`` returns."""
    problem = problem_of(rows)

    def packed(variant: Variant) -> list[int]:
        actual = pack_outwards(problem, floor=problem.lower_bound(), limit=NO_LIMIT, variant=variant)
        assert actual is not None
        return list(actual[0].tolist())

    tried = variants_of(problem)
    assert tried == [variant for variant in VARIANTS if variant in tried]
    assert all(packed(variant) in [packed(second) for second in tried] for variant in VARIANTS)
    assert variants_of(problem, 2)[0] is VARIANTS[0]


def test_late_peak_needs_two_moments() -> None:
    """The variant ``late_peak`` is omitted if the peak occurs at a single moment.

    time   0   1   2   3
           aaaaaaaa
               bbbbbbbb       one moment: 1; two adjacent buffers of one size give two moments
    """
    assert Variant(late_peak=True) not in variants_of(problem_of([(0, 2, 8), (1, 3, 8)]))
    assert Variant(late_peak=True) in variants_of(problem_of([(0, 2, 8), (2, 3, 8)]))


@given(buffers, st.sampled_from(VARIANTS))
@settings(deadline=None, max_examples=100)
def test_packing_fails_only_above_the_limit(rows: list[tuple[int, int, int]], variant: Variant) -> None:
    """With its own peak as limit a packing has the same offsets; with one byte less the result is None."""
    problem = problem_of(rows)
    floor = problem.lower_bound()
    free = pack_outwards(problem, floor=floor, limit=NO_LIMIT, variant=variant)
    assert free is not None
    peak = peak_of(problem, free[0])
    repeated = pack_outwards(problem, floor=floor, limit=peak, variant=variant)
    assert repeated is not None
    assert repeated[0].tolist() == free[0].tolist()
    if peak > floor:
        assert pack_outwards(problem, floor=floor, limit=peak - 1, variant=variant) is None


@given(buffers, st.sampled_from(VARIANTS))
@settings(deadline=None, max_examples=100)
def test_waits_are_the_unordered_reuse_edges(rows: list[tuple[int, int, int]], variant: Variant) -> None:
    """The waits that a packing counts are its reuse edges between unordered users.

    Above the bound, buffers placed before and after the peak may share bytes, which packing does not notice. Therefore
    only packings at the bound are compared.
    """
    problem = problem_of(rows)
    order = precedence(len(rows), lambda earlier, later: (earlier * 5 + later * 3) % 4 == 0)
    actual = pack_outwards(problem, floor=problem.lower_bound(), limit=NO_LIMIT, variant=variant, order=order)
    assert actual is not None
    offsets, waits = actual
    if peak_of(problem, offsets) > problem.lower_bound():
        return
    pointers, earlier = reuse_edges(problem.lo, problem.size, offsets)
    later = np.repeat(np.arange(len(problem)), np.diff(pointers)).tolist()
    assert waits == sum(
        order.users[k] | order.needed[i] != order.needed[i] for k, i in zip(earlier.tolist(), later, strict=True)
    )
    assert waits == order.waits(pointers, earlier)


def test_nested_lifetimes_are_packed_at_the_bound() -> None:
    """Every variant packs the buffers of a training step at the bound.

    Buffer k is alive from step k of the forward part to its backward step, which computes a gradient of the same size.
    """
    rng = np.random.default_rng(0)
    size = (rng.integers(1, 50, 300) * 64).tolist()
    rows = [(k, 600 - k, size[k]) for k in range(300)]
    rows += [(600 - k, 602 - k, size[k]) for k in range(300)]
    problem = problem_of(rows)
    for variant in VARIANTS:
        actual = pack_outwards(problem, floor=problem.lower_bound(), limit=NO_LIMIT, variant=variant)
        assert actual is not None
        assert peak_of(problem, actual[0]) == problem.lower_bound()


@pytest.mark.parametrize(
    ("name", "above"),
    [
        *((name, 0.0) for name in ("alexnet", "resnet18", "resnet50", "mobilenet", "inception_v3")),
        ("densenet121", 2e-4),
    ],
)
def test_training_graphs_are_packed_at_the_bound(name: str, above: float) -> None:
    """Arenas of networks are at the bound, except for DenseNet-121, which needs up to 0.02 % more."""
    memory = plan_symbol(
        models.get(name), models.input_shapes(name, 32), grad_req="write", options=PlanOptions(strategy="arena")
    ).memory
    assert memory.lower_bound <= memory.peak <= memory.lower_bound * (1 + above)


def test_hole_without_waits_is_preferred() -> None:
    """Of two equal holes at step 2, ``c`` takes the hole whose last user precedes it anyway.

    ::

        step       0 1 2 3
        x (0, 4)   # # # #
        a          # #
        b          # #
        c              # #   may follow b, not a
    """
    problem = problem_of([(0, 4, 8), (0, 2, 4), (0, 2, 4), (2, 4, 4)])
    plain = pack_outwards(problem, floor=16, limit=NO_LIMIT, variant=Variant())
    assert plain is not None
    below = 1 if plain[0][3] == plain[0][1] else 2
    order = precedence(4, lambda earlier, later: earlier != below)
    actual = pack_outwards(problem, floor=16, limit=NO_LIMIT, variant=Variant(), order=order)
    assert actual is not None
    offsets, waits = actual
    assert waits == 0
    assert offsets[3] == offsets[3 - below]
