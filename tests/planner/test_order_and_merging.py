"""Search for an order of execution, and merging of equal expressions: less memory or work, unchanged bits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from weftplan import symbol as sym
from weftplan.planner import PlanOptions, plan_symbol, validate


def test_late_consumers_are_pulled_forward() -> None:
    """Reordering runs each reduction right after the large entry that it reads, and halves the peak.

    Depth-first order computes all five large entries first, as inputs of ``zeros_like``, which ignores their values.
    """
    x = sym.Variable("x")
    bigs = [sym.Concat(*[sym.tanh(x, name=f"t{k}")] * 32, dim=0, name=f"big{k}") for k in range(5)]
    order_only = [sym.zeros_like(big, name=f"z{k}") for k, big in enumerate(bigs)]
    tops = [sym.max(z, axis=0, keepdims=True) for z in order_only]
    sums = [sym.max(big, axis=0, keepdims=True, name=f"m{k}") for k, big in enumerate(bigs)]
    net = sym.Concat(*tops, *sums, dim=0)
    inputs = plan_symbol(net, {"x": (4, 64)}, options=PlanOptions(eliminate_common_expr=False, reorder=False))
    chosen = plan_symbol(net, {"x": (4, 64)}, options=PlanOptions(eliminate_common_expr=False))
    validate(chosen)
    assert chosen.memory.peak < inputs.memory.peak / 2
    assert any("another order" in note for note in chosen.memory.notes)
    assert sorted(chosen.order) == sorted(inputs.order)


@pytest.mark.parametrize("name", ["lenet", "resnet", "mlp"])
def test_reordering_is_never_worse(name: str) -> None:
    """Reordering never raises the peak, because the given order is a candidate."""
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
    """In tanh(x) * tanh(x) one tanh is computed, and the output has the bits of the graph with two."""
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


def test_nested_expressions_are_merged() -> None:
    """Two nodes exp(tanh(x)) are merged at both levels in one pass."""
    x = sym.Variable("x")
    net = sym.exp(sym.tanh(x)) + sym.exp(sym.tanh(x))
    assert plan_symbol(net, {"x": (2, 2)}).graph.num_nodes == 4


def test_equal_operators_with_other_parameters() -> None:
    """Of four powers with exponents 2, 3, 2 and 3, only equal exponents are merged."""
    x = sym.Variable("x")
    powers = [x**power for power in (2, 3, 2, 3)]
    planned = plan_symbol(sym.add_n(*(sym.sin(power) for power in powers)), {"x": (2, 3)})
    names = [node.op.name for node in planned.graph.nodes if node.op is not None]
    assert names == ["_power_scalar", "sin"] * 2 + ["add_n"]


def test_nodes_that_must_not_be_merged() -> None:
    """Random nodes, losses, and nodes with different parameters or groups are not merged."""
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
    """Of two equal outputs the second is a copy, because the caller may write to either."""
    x = sym.Variable("x")
    planned = plan_symbol(sym.Group([sym.tanh(x, name="a"), sym.tanh(x, name="b")]), {"x": (2, 2)})
    validate(planned)
    assert [planned.graph.entry_name(e) for e in planned.outputs] == ["a_output", "a_1_copy_output"]


def uneven_symbol(seed: int, size: int, *, shared: bool = True) -> Any:
    """Return a random graph of entries of very different sizes; its outputs are all unread entries.

    It has wide and narrow layers, concatenations, views and reductions. Without ``shared`` few entries have two
    readers.
    """
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
    """On random graphs, reordering gives a valid plan with no higher peak and the same forward nodes."""
    net = uneven_symbol(1000 + seed, 20 + 2 * seed)
    inputs = plan_symbol(net, {"x": (4, 8)}, grad_req=grad_req, options=PlanOptions())
    chosen = plan_symbol(net, {"x": (4, 8)}, grad_req=grad_req, options=PlanOptions(reorder=True))
    validate(chosen)
    assert chosen.memory.peak <= inputs.memory.peak
    assert chosen.num_forward_nodes == inputs.num_forward_nodes
    assert sorted(chosen.order[: chosen.num_forward_nodes]) == sorted(inputs.order[: inputs.num_forward_nodes])
