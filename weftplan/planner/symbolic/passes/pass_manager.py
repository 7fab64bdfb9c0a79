"""The pass manager: the ordered list of graph passes that run between a symbol and its plan.

Each pass is a :class:`~weftplan.planner.symbolic.passes.graph_pass.GraphPass` in its own file, which contains the
pattern, the rewrite and, for a fusion, its reversal. :func:`run_passes` runs the enabled passes, checks their
preconditions and, in debug mode, checks the graph after each pass. ``weftplan plan --kernels`` and the HTML page of a
plan show its reports. :func:`unfused` reverses fusions for readers and files.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from weftplan.errors import PlanError
from weftplan.planner.memory_plan import PassReport
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.network import Network
from weftplan.planner.symbolic.passes import (
    batch_weight_gradients,
    common_subexpressions,
    fuse_depthwise,
    fuse_pointwise,
    fuse_relu,
    gradients,
    placement,
    sizes,
)
from weftplan.planner.symbolic.passes.graph_pass import GraphPass, PassSettings, changed_by_pass
from weftplan.support.post_order import post_order
from weftplan.symbol.node import Entry, Node

PASSES: list[GraphPass] = [
    common_subexpressions.PASS,
    sizes.PASS,
    gradients.PASS,
    fuse_relu.PASS,
    placement.PASS,
    batch_weight_gradients.PASS,
    fuse_depthwise.PASS,
    fuse_depthwise.REMATERIALIZE,
    fuse_pointwise.PASS,
]
"""All passes in execution order."""


def run_passes(
    network: Network, settings: PassSettings, *, checked: bool = False, seconds: dict[str, float] | None = None
) -> Network:
    """Run the enabled passes and return the new network.

    Args:
        network: the graph of a symbol.
        settings: the caller's arguments.
        checked: whether to check the graph after each pass, and that the pass changed only parts that its record lists.
        seconds: a dictionary that receives the processor time of this thread for each pass, by name.

    Raises:
        PlanError: a precondition of a pass is not met, a check fails, or the pass itself raises it.
    """
    if checked:
        network.check()
    facts: frozenset[str] = frozenset()
    reports = list(network.reports)
    for graph_pass in PASSES:
        if not graph_pass.enabled(settings):
            continue
        missing = graph_pass.needs - facts
        if missing:
            raise PlanError(
                f"pass {graph_pass.name!r} needs {', '.join(sorted(missing))}: put it behind the pass that gives it"
            )
        previous, begin = network, time.thread_time()
        network, changed = graph_pass.run(network, settings)
        facts |= graph_pass.gives
        if graph_pass.shown:
            reports.append(PassReport(graph_pass.name, changed, graph_pass.switch))
        if seconds is not None:
            seconds[graph_pass.name] = time.thread_time() - begin
        if checked:
            _check(graph_pass, previous, network)
    return replace(network, reports=tuple(reports))


def _check(graph_pass: GraphPass, old_network: Network, new_network: Network) -> None:
    """Check the network after a pass.

    Raises:
        PlanError: the network is inconsistent, or the pass changed a part that its record does not list.
    """
    try:
        new_network.check()
    except PlanError as error:
        raise PlanError(f"after pass {graph_pass.name!r}: {error}") from None
    undeclared = changed_by_pass(old_network, new_network) - graph_pass.changes - graph_pass.gives
    if undeclared:
        raise PlanError(
            f"pass {graph_pass.name!r} has changed {', '.join(sorted(undeclared))}: its record must list that"
        )


def notes_of(passes: Iterable[PassReport]) -> list[str]:
    """Return the changes of passes as notes of a plan."""
    return [f"{report.changed} ({report.switch})" for report in passes if report.changed]


def _pass_of(node: Node) -> GraphPass | None:
    """Return the fusion that made a node; None if the node is not fused."""
    return next((graph_pass for graph_pass in PASSES if any(node.op is op for op in graph_pass.fused)), None)


def hidden_members(nodes: Iterable[Node]) -> list[str]:
    """Return the names of members of fused nodes whose outputs are not made."""
    return [name for node in nodes if (graph_pass := _pass_of(node)) is not None for name in graph_pass.members(node)]


def unfused(graph: IndexedGraph, heads: Sequence[int]) -> list[Entry]:
    """Return the entries ``heads`` of a forward part on new symbol nodes, with all fused nodes unfused."""
    makers, row = graph.entry_node, graph.row
    outputs_of: dict[int, Sequence[Entry]] = {}

    def at(entry: int, version: int = 0) -> Entry:
        outputs = outputs_of[makers[entry]]
        return outputs[entry - row[makers[entry]]]._replace(version=version)

    needs = [[makers[e] for e in inputs] + deps for inputs, deps in zip(graph.inputs, graph.controls, strict=True)]
    for nid in post_order([makers[e] for e in heads], needs):
        node = graph.nodes[nid]
        inputs = [at(e, graph.version(nid, slot)) for slot, e in enumerate(graph.inputs[nid])]
        fusion = _pass_of(node)
        if fusion is not None and fusion.unfuse is not None:
            outputs_of[nid] = fusion.unfuse(node, inputs)
            continue
        controls = [outputs_of[dep][0].node for dep in graph.controls[nid]]
        copy = node.like(inputs, controls, attrs=dict(node.attrs), mirror_of=None)
        outputs_of[nid] = [Entry(copy, k) for k in range(row[nid + 1] - row[nid])]
    return [at(e) for e in heads]
