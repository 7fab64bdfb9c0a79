"""Plans as JSON text: reading and writing, damaged and edited files, and reports."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from weftplan import models
from weftplan import symbol as sym
from weftplan.errors import FormatError, PlanError
from weftplan.planner import MemoryPlan, PlanOptions, plan_symbol, validate


@pytest.fixture(params=["match_range", "auto"])
def plan(request: pytest.FixtureRequest) -> MemoryPlan:
    """The training plan of LeNet, by each of two strategies."""
    net, shapes = models.get("lenet"), models.input_shapes("lenet", 4)
    return plan_symbol(net, shapes, grad_req="write", options=PlanOptions(strategy=request.param)).memory


def test_round_trip(plan: MemoryPlan) -> None:
    """A plan that was written and read again has equal arrays, figures and text, and is valid."""
    text = plan.to_json()
    back = MemoryPlan.from_json(text)
    assert back.to_json() == text
    for name, value in vars(plan).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(getattr(back, name), value), name
    assert (back.peak, back.total, back.lower_bound) == (plan.peak, plan.total, plan.lower_bound)
    assert back.options == plan.options
    assert back.summary() == plan.summary()
    validate(back)


def test_a_plan_edited_by_hand_is_rejected(plan: MemoryPlan) -> None:
    """If two live entries are edited to share a storage, validation raises an error with both names."""
    document = json.loads(plan.to_json())
    rows = document["entries"]
    alive = [row for row in rows if row["storage"] >= 0 and row["source"] < 0]
    a, b = next(
        (x, y)
        for x in alive
        for y in alive
        if x["first"] < y["first"] < x["last"] and y["nbytes"] <= x["nbytes"] and x["storage"] != y["storage"]
    )
    b["storage"] = a["storage"]
    with pytest.raises(PlanError) as caught:
        validate(MemoryPlan.from_json(json.dumps(document)))
    assert "is written over" in str(caught.value)
    assert str(caught.value).count("entry '") == 2


def test_a_lifetime_edited_by_hand_is_rejected(plan: MemoryPlan) -> None:
    """If lifetimes are edited to last to the end, validation finds that their bytes are overwritten."""
    document = json.loads(plan.to_json())
    for row in document["entries"]:
        if row["storage"] >= 0:
            row["last"] = len(document["steps"])
    with pytest.raises(PlanError, match="is written over"):
        validate(MemoryPlan.from_json(json.dumps(document)))


def test_sizes_edited_by_hand_are_rejected(plan: MemoryPlan) -> None:
    """A size that contradicts shape and dtype is refused."""
    document = json.loads(plan.to_json())
    row = next(row for row in document["entries"] if row["storage"] >= 0)
    row["nbytes"] -= 4
    with pytest.raises(PlanError, match=rf"entry '{row['name']}' is planned with {row['nbytes']} bytes, but shape"):
        validate(MemoryPlan.from_json(json.dumps(document)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "truncated or malformed"),
        (lambda text: "[]", "expected a JSON object with"),
        (lambda text: text.replace('"version": 1', '"version": 7'), "plan of version 7; this release reads version 1"),
        (lambda text: text.replace('"lower_bound"', '"lowest"'), "lacks field 'lower_bound'"),
        (lambda text: text.replace('"kind": "OWN"', '"kind": "MINE"', 1), "lacks field 'MINE'"),
        (
            lambda text: text.replace('"storage": 0', '"storage": 9999', 1),
            "storage of an entry must be an integer from",
        ),
        (lambda text: text.replace('"first": 1,', '"first": "soon",', 1), "field 'first' must hold integers"),
        (lambda text: text.replace('"dtype": "float32"', '"dtype": "float33"', 1), "the plan is malformed"),
        (lambda text: text.replace('"strategy": "auto"', '"strategy": "best"', 1), "plan is malformed|must be one of"),
    ],
)
def test_damaged_files(damage: Any, message: str) -> None:
    """Each kind of damage raises a FormatError with its own message."""
    net = sym.exp(sym.tanh(sym.Variable("x")))
    text = plan_symbol(net, {"x": (4, 4)}, grad_req="write", options=PlanOptions(strategy="auto")).memory.to_json()
    damaged = damage(text)
    assert damaged != text
    with pytest.raises(FormatError, match=message):
        MemoryPlan.from_json(damaged)


def test_reports_agree_with_the_plan(plan: MemoryPlan) -> None:
    """The timeline's maximum and the buffers alive at the peak equal the lower bound, and bars lie within the peak."""
    timeline = plan.timeline()
    assert timeline.max() == plan.lower_bound
    assert sum(item.nbytes for item in plan.alive_at_peak()) == plan.lower_bound
    assert [item.nbytes for item in plan.alive_at_peak(3)] == sorted(
        (item.nbytes for item in plan.alive_at_peak()), reverse=True
    )[:3]
    bars = plan.bars()
    assert bars
    assert all(bar.address >= 0 and bar.address + bar.nbytes <= plan.peak for bar in bars)
    assert all(0 <= bar.first < bar.last <= len(timeline) for bar in bars)


def test_summary_names_what_fills_the_peak(plan: MemoryPlan) -> None:
    """The summary has the peak, the total, the largest buffers, and a list of memory that is not included."""
    text = plan.summary(3)
    assert f"{plan.peak:,} bytes" in text
    assert f"{plan.total:,} bytes" in text
    for item in plan.alive_at_peak(3):
        assert item.name in text
    assert "Not in these figures" in text


def test_compare() -> None:
    """``compare`` shows both peaks and their ratio, second to first."""
    net = sym.exp(sym.tanh(sym.Variable("x")) * 2)
    small, large = (plan_symbol(net, {"x": (n, 8)}, options=PlanOptions(strategy="none")).memory for n in (4, 12))
    peak = next(line for line in small.compare(large).splitlines() if line.startswith("peak"))
    assert peak.split() == ["peak", f"{small.peak:,}", f"{large.peak:,}", "3.000"]
