"""Depth-first order that visits the deepest input first, and the order of gradient sums that follows."""

from __future__ import annotations

import random

import pytest

import weftplan as mx
from weftplan.planner import PlanOptions, plan_symbol
from weftplan.support.post_order import deepest_first


def recurrent_network(steps):
    """Return (symbol, shapes) of h = tanh(W x_t + U h) over ``steps`` inputs, with W x_t as the first summand."""
    h = mx.sym.Variable("h")
    w, u, b = (mx.sym.Variable(name) for name in ("w", "u", "b"))
    for t in range(steps):
        fed = mx.sym.FullyConnected(mx.sym.Variable(f"x{t}"), w, b, num_hidden=64, name=f"fed{t}")
        h = mx.sym.Activation(fed + mx.sym.FullyConnected(h, u, b, num_hidden=64, name=f"state{t}"), act_type="tanh")
    return mx.sym.sum(h), {"h": (16, 64), **{f"x{t}": (16, 64) for t in range(steps)}}


def test_inputs_come_directly_before_their_reader():
    """Inputs 0, 1 and 2 of a chain come directly before the chain's nodes that read them, not all at first."""
    before = [[], [], [], [], [0, 3], [1, 4], [2, 5]]
    assert deepest_first(range(7), before) == [0, 3, 4, 1, 5, 2, 6]


@pytest.mark.parametrize("seed", range(20))
def test_every_order_is_legal_and_complete(seed):
    """In a random graph each node appears once, after its inputs."""
    rng = random.Random(seed)
    count = rng.randint(1, 60)
    before = [[rng.randrange(n) for _ in range(rng.randint(0, 3))] if n else [] for n in range(count)]
    order = deepest_first(range(count), before)
    assert sorted(order) == list(range(count))
    place = {n: step for step, n in enumerate(order)}
    assert all(place[m] < place[n] for n in range(count) for m in before[n])


def test_outside_nodes_are_skipped():
    """Inputs outside the sorted part of the graph are left out."""
    assert deepest_first([5, 6, 9], {5: [1], 6: [5, 2], 9: [6, 5]}) == [5, 6, 9]


def test_a_deep_chain_does_not_recurse():
    """A chain of 100,000 nodes is sorted without recursion."""
    count = 100_000
    assert deepest_first(range(count), [[n - 1] if n else [] for n in range(count)]) == list(range(count))


def test_sums_of_shared_weights_follow_the_steps_backwards():
    """The gradient of a shared weight is summed from the last step to the first, as its terms are computed.

    If the sum began with step 0, whose gradient is computed last, the gradients of all other steps would have to be
    kept.
    """
    symbol, shapes = recurrent_network(12)
    planned = plan_symbol(symbol, shapes, grad_req="write", options=PlanOptions())
    names = [planned.graph.nodes[nid].name for nid in planned.order]
    steps = [int(name[3:].split("_")[0]) for name in names if name.startswith("fed") and name.endswith("_backward")]
    assert steps == list(range(11, -1, -1))
