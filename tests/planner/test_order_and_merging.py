"""Execution order and common-subexpression elimination: less memory or work, the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weftplan import symbol as sym
from weftplan.planner import PlanOptions, plan_symbol, validate


def test_late_consumers_are_pulled_forward() -> None:
    """Depth-first order makes all five large entries before it reduces the first of them.

    It meets each one as an input of zeros_like, which ignores the values; the reductions come last.
    """
    x = sym.Variable("x")
    bigs = [sym.Concat(*[sym.tanh(x, name=f"t{k}")] * 32, dim=0, name=f"big{k}") for k in range(5)]
    order_only = [sym.zeros_like(big, name=f"z{k}") for k, big in enumerate(bigs)]
    tops = [sym.max(z, axis=0, keepdims=True) for z in order_only]
    sums = [sym.max(big, axis=0, keepdims=True, name=f"m{k}") for k, big in enumerate(bigs)]
    net = sym.Concat(*tops, *sums, dim=0)
    given = plan_symbol(net, {"x": (4, 64)}, options=PlanOptions(eliminate_common_expr=False))
    chosen = plan_symbol(net, {"x": (4, 64)}, options=PlanOptions(eliminate_common_expr=False, reorder=True))
    validate(chosen)
    assert chosen.memory.peak < given.memory.peak / 2
    assert any("another order" in note for note in chosen.notes)
    assert sorted(chosen.order) == sorted(given.order)


@pytest.mark.parametrize("name", ["lenet", "resnet", "mlp"])
def test_reordering_is_never_worse(name: str) -> None:
    """The given order is a candidate."""
    from weftplan import models

    net, shapes = models.get(name), models.input_shapes(name, 8)
    for grad_req in ("null", "write"):
        plans = [
            plan_symbol(net, shapes, grad_req=grad_req, options=PlanOptions(reorder=reorder))
            for reorder in (False, True)
        ]
        validate(plans[1])
        assert plans[1].memory.peak <= plans[0].memory.peak
        assert plans[1].num_forward_nodes == plans[0].num_forward_nodes


def test_equal_expressions_are_computed_once(interpret: Any) -> None:
    """tanh(x) * tanh(x) has one tanh after merging; its two gradients are summed."""
    x = sym.Variable("x")
    net = sym.tanh(x, name="a") * sym.tanh(x, name="b")
    merged, plain = (
        plan_symbol(net, {"x": (6, 6)}, grad_req="write", options=PlanOptions(eliminate_common_expr=flag))
        for flag in (True, False)
    )
    assert merged.graph.num_nodes < plain.graph.num_nodes
    assert merged.notes == ("merged 1 node(s) that compute the same as others",)
    values = {"x": np.linspace(-1, 1, 36, dtype=np.float32).reshape(6, 6)}
    assert np.array_equal(interpret.planned(merged, values)["output0"], interpret.planned(plain, values)["output0"])


def test_merging_cascades() -> None:
    """exp(tanh(x)) twice: both levels merge in one pass."""
    x = sym.Variable("x")
    net = sym.exp(sym.tanh(x)) + sym.exp(sym.tanh(x))
    assert plan_symbol(net, {"x": (2, 2)}).graph.num_nodes == 4


def test_what_must_not_be_merged() -> None:
    """Random nodes, losses, other parameters, other groups."""
    x = sym.Variable("x")
    pairs = [
        (sym.Dropout(x, p=0.5), sym.Dropout(x, p=0.5)),
        (sym.MakeLoss(x), sym.MakeLoss(x)),
        (sym.clip(x, a_min=0, a_max=1), sym.clip(x, a_min=0, a_max=2)),
        (sym.tanh(x, attr={"__ctx_group__": "a"}), sym.tanh(x, attr={"__ctx_group__": "b"})),
    ]
    for one, two in pairs:
        planned = plan_symbol(sym.Group([one, two]), {"x": (2, 2)})
        assert len({int(e) for e in planned.outputs}) == 2
        assert not planned.notes


def test_merged_outputs_stay_two_arrays() -> None:
    """Two equal heads: the second goes through a copy, as a caller may write into either."""
    x = sym.Variable("x")
    planned = plan_symbol(sym.Group([sym.tanh(x, name="a"), sym.tanh(x, name="b")]), {"x": (2, 2)})
    validate(planned)
    assert [planned.graph.entry_name(e) for e in planned.outputs] == ["a_output", "a_1_copy_output"]
