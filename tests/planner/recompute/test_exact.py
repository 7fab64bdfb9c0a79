"""The curve compared with the optimum, which is found by trying all choices or by an exact model.

The comparison covers the choice of nodes to repeat, each at most once, in a fixed order. Trying all choices uses the
planner's prices with its in-place rules; the solver uses its own model (:mod:`exact`) without in-place computation.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from itertools import combinations
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from weftplan import symbol as sym
from weftplan.planner.recompute import curve

pytestmark = pytest.mark.usefixtures("whole_searches")


@pytest.fixture(scope="module")
def exact() -> ModuleType:
    """The module ``exact.py``; without OR-Tools the test is skipped."""
    pytest.importorskip("ortools")
    where = Path(__file__).with_name("exact.py")
    spec = importlib.util.spec_from_file_location("recompute_exact", where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recompute_exact"] = module
    spec.loader.exec_module(module)
    return module


def random_chain(size: int, seed: int) -> Any:
    """Return a random chain of ``size`` layers: products, sines, gates, and joins with earlier results."""
    rng = random.Random(seed)
    pool = [sym.Variable("data")]
    for i in range(size):
        kind, last = rng.random(), pool[-1]
        if kind < 0.15 and len(pool) > 3:
            result = sym.Concat(last, rng.choice(pool[-4:-1]), dim=1, name=f"join{i}")
        elif kind < 0.3:
            result = sym.elemwise_mul(last, sym.sigmoid(last, name=f"gate{i}"), name=f"swish{i}")
        elif kind < 0.65:
            result = sym.FullyConnected(last, num_hidden=rng.choice([8, 16, 32, 64]), no_bias=True, name=f"fc{i}")
        else:
            result = sym.sin(last, name=f"sin{i}")
        pool.append(result)
    return sym.MakeLoss(sym.sum(pool[-1], name="total"), name="loss")


def random_costs(made: Any, seed: int) -> list[int]:
    """Return a random cost of 1 to 29 for each operator node, and 0 for each variable."""
    rng = random.Random(seed)
    return [0 if node.op is None else rng.randrange(1, 30) for node in made.program.graph.nodes]


@pytest.mark.parametrize("seed", [0, 1, 2, pytest.param(3, marks=pytest.mark.stress)])
def test_every_choice_tried(training: Any, seed: int) -> None:
    """No set of repeatable nodes is more than 1 % faster than the curve for the same peak."""
    size = 6 + seed
    result = training(random_chain(size, seed), {"data": (16, 32)}, strategy="match_range")
    costs = random_costs(result, seed)
    tape = result.tape([float(c) for c in costs])
    points = curve(tape)
    can = tape.repeatable
    assert len(can) <= 15
    best: dict[int, float] = {}
    for count in range(len(can) + 1):
        for chosen in combinations(can, count):
            price = tape.price(chosen)
            best[price.peak] = min(price.seconds, best.get(price.peak, price.seconds))
    for peak, seconds in best.items():
        mine = min((point.seconds for point in points if point.peak <= peak), default=None)
        assert mine is not None, f"nothing on the curve reaches {peak} bytes"
        assert tape.step_seconds + mine <= 1.01 * (tape.step_seconds + seconds)


@pytest.mark.parametrize(("size", "seed"), [(10, 1), (14, 2)])
def test_no_neighbour_of_a_small_curve_lies_below_it(training: Any, size: int, seed: int) -> None:
    """Adding or removing one or two nodes never improves a point of the curve, for 13 to 24 repeatable nodes."""
    result = training(random_chain(size, seed), {"data": (16, 32)}, workspaces=False, enable_inplace=False)
    tape = result.tape([float(c) for c in random_costs(result, seed)])
    assert 12 < len(tape.repeatable) <= 24
    points = curve(tape)
    for point in points[::4] + points[-1:]:
        for width in (1, 2):
            for step in combinations(tape.repeatable, width):
                price = tape.price(frozenset(point.twins).symmetric_difference(step))
                assert any(p.peak <= price.peak and p.seconds <= price.seconds for p in points)


@pytest.mark.parametrize(("size", "seed"), [(10, 1), (14, 2), (18, 3)])
def test_within_one_percent_of_the_certified_optimum(training: Any, exact: ModuleType, size: int, seed: int) -> None:
    """The curve's step time is within 1 % of the optimum at seven budgets, and no point exists if nothing fits."""
    _certify(training, exact, size, seed)


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_forty_forward_nodes_against_the_certified_optimum(training: Any, exact: ModuleType, seed: int) -> None:
    """For about 40 forward nodes the curve's step time is within 1 % of the optimum."""
    _certify(training, exact, 36, seed)


def _certify(training: Any, exact: ModuleType, size: int, seed: int) -> None:
    """Assert that the curve is within 1 % of the optimum at seven budgets; at least two of them can be met."""
    result = training(
        random_chain(size, seed), {"data": (16, 32)}, workspaces=False, enable_inplace=False, strategy="match_range"
    )
    assert not result.assignment.skipped
    costs = random_costs(result, seed)
    tape = result.tape([float(c) for c in costs])
    points = curve(tape)
    peak = tape.price(()).peak
    proven = 0
    for tenths in (95, 90, 80, 70, 60, 50, 40):
        budget = peak * tenths // 100
        optimum = exact.least_ticks(tape, dict(enumerate(costs)), budget)
        mine = min((point.seconds for point in points if point.peak <= budget), default=None)
        if optimum is None:
            assert mine is None, f"the model says that nothing fits {budget}, the curve has {mine}"
            continue
        assert mine is not None, f"{optimum} ticks fit {budget} bytes, the curve has nothing"
        assert mine >= optimum, "the curve beats the optimum: the models differ"
        assert tape.step_seconds + mine <= 1.01 * (tape.step_seconds + optimum)
        proven += 1
    assert proven >= 2, "the budgets must leave something to certify"
