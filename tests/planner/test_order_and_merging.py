"""Execution order and common-subexpression elimination: less memory or work, the same bits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from weftplan import symbol as sym
from weftplan.planner import PlanOptions, plan_symbol, validate


def test_late_consumers_are_pulled_forward() -> None:
    """Depth-first order makes all five large entries before it reduces the first of them.

    It reaches each entry as an input of zeros_like, which ignores the values; the reductions come last.
    """
    x = sym.Variable("x")
    bigs = [sym.Concat(*[sym.tanh(x, name=f"t{k}")] * 32, dim=0, name=f"big{k}") for k in range(5)]
    order_only = [sym.zeros_like(big, name=f"z{k}") for k, big in enumerate(bigs)]
    tops = [sym.max(z, axis=0, keepdims=True) for z in order_only]
    sums = [sym.max(big, axis=0, keepdims=True, name=f"m{k}") for k, big in enumerate(bigs)]
    net = sym.Concat(*tops, *sums, dim=0)
    inputs = plan_symbol(net, {"x": (4, 64)}, options=PlanOptions(eliminate_common_expr=False))
    chosen = plan_symbol(net, {"x": (4, 64)}, options=PlanOptions(eliminate_common_expr=False, reorder=True))
    validate(chosen)
    assert chosen.memory.peak < inputs.memory.peak / 2
    assert any("another order" in note for note in chosen.memory.notes)
    assert sorted(chosen.order) == sorted(inputs.order)


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
    assert merged.memory.notes == ("merged 1 node into others that compute the same (MXNET_ELIMINATE_COMMON_EXPR)",)
    values = {"x": np.linspace(-1, 1, 36, dtype=np.float32).reshape(6, 6)}
    assert np.array_equal(interpret.planned(merged, values)["output0"], interpret.planned(plain, values)["output0"])


def test_merging_cascades() -> None:
    """exp(tanh(x)) twice: both levels merge in one pass."""
    x = sym.Variable("x")
    net = sym.exp(sym.tanh(x)) + sym.exp(sym.tanh(x))
    assert plan_symbol(net, {"x": (2, 2)}).graph.num_nodes == 4


def test_kinds_that_read_the_same_are_told_apart() -> None:
    """Of four powers of one entry the first and the third are one, and so are the second and the fourth."""
    x = sym.Variable("x")
    powers = [x**power for power in (2, 3, 2, 3)]
    planned = plan_symbol(sym.add_n(*(sym.sin(power) for power in powers)), {"x": (2, 3)})
    names = [node.op.name for node in planned.graph.nodes if node.op is not None]
    assert names == ["_power_scalar", "sin"] * 2 + ["add_n"]


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
        assert not planned.memory.notes


def test_merged_outputs_stay_two_arrays() -> None:
    """Two equal heads: the second goes through a copy, as a caller may write into either."""
    x = sym.Variable("x")
    planned = plan_symbol(sym.Group([sym.tanh(x, name="a"), sym.tanh(x, name="b")]), {"x": (2, 2)})
    validate(planned)
    assert [planned.graph.entry_name(e) for e in planned.outputs] == ["a_output", "a_1_copy_output"]


def uneven_symbol(seed: int, size: int, *, shared: bool = True) -> Any:
    """A random graph whose entries have very different sizes: wide and narrow layers, joins, views, in place."""
    rng = random.Random(seed)
    pool: list[tuple[Any, int]] = [(sym.Variable("x"), 8)]
    unread: list[int] = []
    k = 0
    while k < size:
        name, k = f"n{k}", k + 1
        at = rng.choice(unread) if unread and (not shared or rng.random() < 0.6) else rng.randrange(len(pool))
        if not shared and rng.random() < 0.4:
            at = 0
        value, width = pool[at]
        choice = rng.randrange(6)
        result: list[tuple[Any, int]]
        if choice < 2:
            wide = rng.choice([1, 2, 5, 16, 40])
            result = [(sym.FullyConnected(value, num_hidden=wide, no_bias=True, name=name), wide)]
        elif choice == 2 and len(unread) > 1:
            others = rng.sample(unread, min(len(unread), 1 + rng.randrange(2)))
            joined = [pool[i] for i in dict.fromkeys([at, *others])]
            result = [(sym.Concat(*[v for v, _ in joined], dim=1, name=name), sum(w for _, w in joined))]
            unread = [i for i in unread if i not in others]
        elif choice == 3:
            result = [(sym.tanh(value, name=name), width)]
        elif choice == 4:
            result = [(sym.Reshape(value, shape=(-1, width), name=name), width)]
        else:
            result = [(sym.max(value, axis=1, keepdims=True, name=name), 1)]
        if at in unread:
            unread.remove(at)
        unread += range(len(pool), len(pool) + len(result))
        pool += result
    return sym.Group([pool[i][0] for i in unread])


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("grad_req", ["null", "write"])
def test_never_worse_and_valid(seed: int, grad_req: str) -> None:
    """Larger random graphs: a valid plan, the parts kept apart, and no higher peak than the given order's."""
    net = uneven_symbol(1000 + seed, 20 + 2 * seed)
    inputs = plan_symbol(net, {"x": (4, 8)}, grad_req=grad_req, options=PlanOptions())
    chosen = plan_symbol(net, {"x": (4, 8)}, grad_req=grad_req, options=PlanOptions(reorder=True))
    validate(chosen)
    assert chosen.memory.peak <= inputs.memory.peak
    assert chosen.num_forward_nodes == inputs.num_forward_nodes
    assert sorted(chosen.order[: chosen.num_forward_nodes]) == sorted(inputs.order[: inputs.num_forward_nodes])
