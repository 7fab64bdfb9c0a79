"""Numbering of graphs: MXNet's depth-first order, ids of entries, malformed graphs and deep chains."""

from __future__ import annotations

import pytest

from weftplan import symbol as sym
from weftplan.errors import PlanError
from weftplan.ops.core import registry
from weftplan.planner import plan_symbol
from weftplan.planner.symbolic.indexed_graph import indexed
from weftplan.symbol.node import Entry, Node


def _node(name: str, *inputs: Entry, op: str = "elemwise_add", deps: tuple[Node, ...] = ()) -> Node:
    """Return a node with the given inputs and control dependencies."""
    operator = registry.get(op)
    return Node(
        operator, name, params=registry.parse_params(operator, {}), inputs=list(inputs), control_deps=list(deps)
    )


def test_inputs_come_first_then_control_dependencies() -> None:
    """A node is numbered after its inputs and then after its control dependencies, in the order of the heads.

        a   b   c        d = a + b, e = d + b (after f), f = c + c
         \\ / \\
          d   |   f
           \\ /
            e
    """
    a, b, c = (Node(None, name) for name in "abc")
    d = _node("d", Entry(a), Entry(b))
    f = _node("f", Entry(c), Entry(c))
    e = _node("e", Entry(d), Entry(b), deps=(f,))
    graph = indexed([Entry(e), Entry(d)])
    assert [node.name for node in graph.nodes] == ["a", "b", "d", "c", "f", "e"]
    assert graph.inputs == [[], [], [0, 1], [], [3, 3], [2, 1]]
    assert graph.controls[5] == [4]
    assert graph.outputs == [5, 2]
    assert graph.variables() == [0, 1, 3]


def test_hidden_outputs_have_ids() -> None:
    """BatchNorm has three entries, also for its two hidden outputs, and writes two auxiliary states."""
    net = sym.BatchNorm(sym.Variable("x"), name="bn") + sym.Variable("y")
    graph = indexed(net.entries)
    norm = graph.names.index("bn")
    assert graph.row[norm + 1] - graph.row[norm] == 3
    assert [graph.entry_name(graph.inputs[norm][k]) for k in graph.works[norm].writes] == [
        "bn_moving_mean",
        "bn_moving_var",
    ]
    assert graph.num_entries == graph.row[-1] == len(graph.entry_node)


def test_a_cycle_is_refused_and_named() -> None:
    """A cyclic graph raises an error that lists the cycle."""
    x = Node(None, "x")
    p = _node("p", Entry(x), Entry(x))
    q = _node("q", Entry(p), Entry(x))
    p.inputs[1] = Entry(q)
    with pytest.raises(PlanError, match="cycle: 'q' <- 'p' <- 'q'"):
        indexed([Entry(q)])


def test_an_output_that_does_not_exist_is_refused() -> None:
    """An input or a head that refers to an output that does not exist raises an error."""
    x = Node(None, "x")
    p = _node("p", Entry(x), Entry(x))
    with pytest.raises(PlanError, match="node 'q' refers to output 1 of 'p', which has 1 output"):
        indexed([Entry(_node("q", Entry(p, 1), Entry(x)))])
    with pytest.raises(PlanError, match="the list of outputs refers to output 2 of 'p'"):
        indexed([Entry(p, 2)])


def test_a_variable_with_inputs_is_refused() -> None:
    """A variable with inputs raises an error."""
    bad = Node(None, "bad", inputs=[Entry(Node(None, "x"))])
    with pytest.raises(PlanError, match="variable 'bad' has inputs"):
        indexed([Entry(bad)])


@pytest.mark.parametrize("deep", [10_000, pytest.param(100_000, marks=pytest.mark.stress)])
def test_a_chain_of_many_thousand_nodes(deep: int) -> None:
    """Training graphs of 10,000 and 100,000 nodes in sequence are planned without recursion."""
    last = Entry(Node(None, "x"))
    for k in range(deep):
        last = Entry(_node(f"n{k}", last, op="tanh"))
    planned = plan_symbol([last], {"x": (4, 4)}, grad_req="write")
    assert planned.graph.num_nodes > 2 * deep
    # Every activation is stored for its gradient; the gradients are computed in place.
    assert planned.memory.lower_bound >= deep * 64
