"""The search for the best order against all topological orders, judged by the planner's own figure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from weftplan import models
from weftplan import symbol as sym
from weftplan.planner import PlanOptions, plan_symbol, validate
from weftplan.planner.passes import order as order_pass
from weftplan.planner.passes.order_model import Block, OrderModel
from weftplan.planner.passes.order_search import best_order
from weftplan.planner.passes.order_window import bottlenecks, improve
from weftplan.planner.pipeline import plan_symbol as pipeline_plan

OPTIONS = PlanOptions(eliminate_common_expr=False)


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
        made: list[tuple[Any, int]]
        if choice < 2:
            wide = rng.choice([1, 2, 5, 16, 40])
            made = [(sym.FullyConnected(value, num_hidden=wide, no_bias=True, name=name), wide)]
        elif choice == 2 and len(unread) > 1:
            others = rng.sample(unread, min(len(unread), 1 + rng.randrange(2)))
            joined = [pool[i] for i in dict.fromkeys([at, *others])]
            made = [(sym.Concat(*[v for v, _ in joined], dim=1, name=name), sum(w for _, w in joined))]
            unread = [i for i in unread if i not in others]
        elif choice == 3:
            made = [(sym.tanh(value, name=name), width)]
        elif choice == 4:
            made = [(sym.Reshape(value, shape=(-1, width), name=name), width)]
        else:
            made = [(sym.max(value, axis=1, keepdims=True, name=name), 1)]
        if at in unread:
            unread.remove(at)
        unread += range(len(pool), len(pool) + len(made))
        pool += made
    return sym.Group([pool[i][0] for i in unread])


@pytest.fixture
def facts_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """(facts, steps of the forward part) of a planned symbol, as the pipeline hands them to the pass."""

    def find(net: Any, shapes: dict[str, Any], grad_req: str = "null") -> tuple[Any, int]:
        seen = []

        def spy(facts: Any, forward: int, options: Any) -> list[int]:
            seen.append((facts, forward))
            return facts.order  # type: ignore[no-any-return]

        monkeypatch.setattr("weftplan.planner.pipeline.choose_order", spy)
        pipeline_plan(net, shapes, grad_req=grad_req, options=OPTIONS.replace(reorder=True))
        monkeypatch.undo()
        return seen[0]

    return find


def all_orders(before: list[list[int]], nodes: list[int], limit: int) -> Iterator[list[int]]:
    """Topological orders, at most ``limit`` of them."""
    count = 0
    order: list[int] = []
    left = set(nodes)

    def extend() -> Iterator[list[int]]:
        nonlocal count
        if not left:
            count += 1
            yield list(order)
            return
        for nid in nodes:
            if nid in left and not any(b in left for b in before[nid]) and count < limit:
                left.remove(nid)
                order.append(nid)
                yield from extend()
                order.pop()
                left.add(nid)

    return extend()


@pytest.mark.parametrize("seed", range(150))
def test_best_of_all_topological_orders(facts_of: Any, seed: int) -> None:
    """Up to nine nodes: the result has the peak of the best of all orders, and says that this is proven."""
    net = uneven_symbol(seed, 4 + seed % 6, shared=seed % 3 > 0)
    facts, forward = facts_of(net, {"x": (4, 8)})
    graph = order_pass._Dependencies(facts)
    orders = list(all_orders(graph.before, facts.order, 3000))
    if len(orders) == 3000:
        pytest.skip("too many orders for brute force")
    least = min(order_pass.lower_bound(facts, order, OPTIONS) for order in orders)
    found, proven = improve(OrderModel(facts, graph.before, OPTIONS), facts.order, forward)
    assert sorted(found) == sorted(facts.order)
    assert order_pass.lower_bound(facts, found, OPTIONS) == least
    assert proven


@pytest.mark.parametrize("grad_req", ["null", "write"])
@pytest.mark.parametrize("seed", range(25))
def test_model_counts_as_the_planner(facts_of: Any, interpret: Any, seed: int, grad_req: str) -> None:
    """The peak of the model is the lower bound of the planner's walk, in the given order and in random ones."""
    rng = random.Random(seed)
    net = interpret.symbol(seed, 20) if seed % 2 else uneven_symbol(seed, 20)
    shapes = dict.fromkeys(net.list_arguments(), (6, 6)) if seed % 2 else {"x": (4, 8)}
    facts, _ = facts_of(net, shapes, grad_req)
    graph = order_pass._Dependencies(facts)
    model = OrderModel(facts, graph.before, OPTIONS)
    for _ in range(4):
        priority = {nid: rng.random() for nid in facts.order}
        order: list[int] = []
        left = list(facts.order)
        while left:
            here = set(left)
            nid = min((n for n in left if not here.intersection(graph.before[n])), key=priority.__getitem__)
            order.append(nid)
            left.remove(nid)
        assert max(model.profile(order)[1], default=0) == order_pass.lower_bound(facts, order, OPTIONS)


def test_blocks_agree_with_the_profile(facts_of: Any) -> None:
    """A block of any steps has the figures that the whole order has there."""
    facts, _ = facts_of(uneven_symbol(5, 30), {"x": (4, 8)}, "write")
    model = OrderModel(facts, order_pass._Dependencies(facts).before, OPTIONS)
    held, during = model.profile(facts.order)
    for start in range(0, len(facts.order) - 6, 5):
        block = Block.of(model, facts.order, start, start + 6, held[start])
        assert block.peak(range(6)) == max(during[start : start + 6])


def test_bottlenecks_of_a_diamond(facts_of: Any) -> None:
    r"""Of s -> (a, b) -> t -> u, the two branches are comparable with all but each other.

        a
      /   \
    s       t - u
      \   /
        b
    """
    s = sym.FullyConnected(sym.Variable("x"), num_hidden=3, name="s")
    t = sym.Concat(sym.exp(s, name="a"), sym.tanh(s, name="b"), name="t")
    facts, forward = facts_of(sym.tanh(t, name="u"), {"x": (4, 8)})
    model = OrderModel(facts, order_pass._Dependencies(facts).before, OPTIONS)
    names = [facts.graph.nodes[facts.order[step]].name for step in bottlenecks(model, facts.order, 0, forward)]
    assert names == ["s", "t", "u"]


def test_limits_are_kept(facts_of: Any) -> None:
    """A search that may price few steps says that it has proven nothing, and gives no order."""
    facts, _ = facts_of(uneven_symbol(7, 40), {"x": (4, 8)})
    model = OrderModel(facts, order_pass._Dependencies(facts).before, OPTIONS)
    block = Block.of(model, facts.order, 0, len(facts.order), 0)
    found = best_order(block, 1 << 40, 1)
    assert (found.order, found.proven) == (None, False)
    assert 0 < found.work < 2000


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("grad_req", ["null", "write"])
def test_never_worse_and_valid(seed: int, grad_req: str) -> None:
    """Larger random graphs: a valid plan, the parts kept apart, and no higher peak than the given order's."""
    net = uneven_symbol(1000 + seed, 20 + 2 * seed)
    given = plan_symbol(net, {"x": (4, 8)}, grad_req=grad_req, options=PlanOptions())
    chosen = plan_symbol(net, {"x": (4, 8)}, grad_req=grad_req, options=PlanOptions(reorder=True))
    validate(chosen)
    assert chosen.memory.peak <= given.memory.peak
    assert chosen.num_forward_nodes == given.num_forward_nodes
    assert sorted(chosen.order[: chosen.num_forward_nodes]) == sorted(given.order[: given.num_forward_nodes])


@pytest.mark.parametrize("grad_req", ["null", "write"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet50", "inception_v3", "densenet121", "lstm"])
def test_orders_of_ordinary_networks_are_proven(facts_of: Any, name: str, grad_req: str) -> None:
    """No order with the forward part in front has a smaller peak, found without giving up anywhere."""
    facts, forward = facts_of(models.get(name), models.input_shapes(name, 16), grad_req)
    model = OrderModel(facts, order_pass._Dependencies(facts).before, OPTIONS)
    found, proven = improve(model, facts.order, forward)
    assert proven
    assert order_pass.lower_bound(facts, found, OPTIONS) <= order_pass.lower_bound(facts, facts.order, OPTIONS)
