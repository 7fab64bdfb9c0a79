"""Plans of a symbol that was bound before: a second bind for the same shapes and settings plans nothing.

What a plan depends on is the graph, what the caller says of it, the settings and who may compute an operator. All of it
is compared by value, so a plan is used again only where planning would give the same one. Symbols with operators of the
user's own (``Custom``), whose inference may answer differently each time, are planned anew.

The plans hang on the symbol and go with it. Planned graphs never change, so several executors may share one; threads
that bind one symbol at the same time may plan it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from weftplan import config
from weftplan.executor.plan_files import PlanFile
from weftplan.ops.core import implementations
from weftplan.planner import PlannedGraph, PlanOptions
from weftplan.symbol import Symbol
from weftplan.symbol.node import Node
from weftplan.symbol.traversal import Order, depth_first_order

MOST = 4
"""Plans kept for one symbol: the shapes among which a training with validation, or a few buckets, go to and fro."""


class _Kept:
    """A graph as it was when it was planned, and its plans."""

    __slots__ = ("_graph", "plans")

    def __init__(self, graph: list[Any]) -> None:
        self._graph = graph
        self.plans: list[tuple[Hashable, PlannedGraph]] = []
        """With what else they depend on, the one used last at the end. Never changed, but replaced as a whole. They are
        so few that to compare takes less time than to make a hash of all that a plan depends on."""

    def is_of(self, nodes: list[Node], entries: list[Any]) -> bool:
        """Whether the graph is still as it was."""
        return self._graph == _description(nodes, entries)


def _description(nodes: list[Node], entries: list[Any]) -> list[Any]:
    """Everything that a plan reads of nodes; equal descriptions are of the same nodes in the same state.

    Parsed parameters are never changed in place, so their identity stands for them (the dictionary is held, too). One
    list, not one for each node: Python's collector looks at every object that stays.
    """
    found: list[Any] = []
    for node in nodes:
        inputs, deps = node.inputs, node.control_deps
        found += (
            node, node.op, node.name, id(node.params), dict(node.attrs), len(inputs), *inputs, len(deps), *deps,
            node.version, node.params,
        )  # fmt: skip
    found += entries
    return found


def _flat(table: Mapping[str, Hashable]) -> tuple[Hashable, ...]:
    """A table as keys and values, without an object for each item."""
    return tuple(table), tuple(table.values())


def planned_once(
    symbol: Symbol,
    options: PlanOptions,
    facts: Mapping[str, Mapping[str, Hashable]],
    more: Hashable,
    plan: Callable[[Order], PlannedGraph],
    *,
    order: Order | None = None,
) -> PlannedGraph:
    """``plan`` of the depth-first order, or what it gave before for the same graph, facts and environment: in this
    process, or in an earlier one (:mod:`weftplan.executor.plan_files`).

    Args:
        options: how to plan.
        facts: what the caller says of variables (shapes, dtypes, …), by kind and name.
        more: everything else that the plan depends on.
        order: the depth-first order of the symbol, when the caller has it.
    """
    if order is None:
        order = depth_first_order(entry[0] for entry in symbol.entries)
    nodes = order[0]
    for node in nodes:
        if node.op is not None and node.op.single:
            return plan(order)
    kept = symbol.kept
    if kept is None or not kept.is_of(nodes, symbol.entries):
        kept = symbol.kept = _Kept(_description(nodes, symbol.entries))
    question = (more, *[(kind, *_flat(by_name)) for kind, by_name in facts.items()], config.in_force())
    provided = tuple([_flat(implementations.provided(where)) for where in ("host", "gpu")])
    key = options, question, provided
    plans: list[tuple[Hashable, PlannedGraph]] = kept.plans
    found = next((planned for asked, planned in plans if asked == key), None)
    if found is None:
        file = PlanFile(symbol, order, options, question, provided)
        found = file.load()
        if found is None:
            found = plan(order)
            file.keep(found)
    others = [pair for pair in kept.plans if pair[1] is not found]  # other threads may have added some
    kept.plans = [*others[-MOST + 1 :], (key, found)]
    return found
