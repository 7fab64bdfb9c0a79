"""A forward order that suits recomputation: every node next to what it feeds.

Depth-first order by the number of the input may run a whole family of branches before the chain that they feed (all
projections of the inputs of an unrolled recurrent network). No cut of such an order separates early steps from late
ones, and backward nodes sorted by it come at the wrong time.
"""

from __future__ import annotations

from dataclasses import replace

from weftplan.planner.liveness import Facts, dependencies
from weftplan.planner.passes.order_deep import deepest_first


def stepwise_forward(facts: Facts, num_forward: int) -> Facts:
    """``facts`` with the forward part in depth-first order, deepest input first.

    Nodes that touch one auxiliary state keep their given order. Returns ``facts`` itself when that is the given order.
    """
    part = facts.order[:num_forward]
    order = deepest_first(part, dependencies(facts))
    return facts if order == part else replace(facts, order=[*order, *facts.order[num_forward:]])
