"""Common-subexpression elimination: nodes that compute the same from the same become one.

Two operator nodes are merged when operator, input entries, control dependencies and attributes (all of them, so also
the device group) are equal, and running once or twice makes no difference: the operator is not random, mutates no
input, and is no loss (two equal losses count twice in the gradient). Names do not matter; the first node in depth-first
order stays.
"""

from __future__ import annotations

from weftplan.device.amounts import counted
from weftplan.ops.core import registry
from weftplan.planner.symbolic.network import Edit, Network
from weftplan.planner.symbolic.passes.graph_pass import FORWARD, GraphPass, Settings


def merge_equal_nodes(network: Network, settings: Settings) -> tuple[Network, str]:
    """Merge nodes that compute the same. Two outputs that become one entry stay distinct through a ``_copy`` node."""
    graph = network.graph
    makers, row = graph.entry_node, graph.row
    kept: dict[int, int] = {}  # node -> the node that stays
    table: dict[tuple[object, ...], int] = {}
    for nid, node in enumerate(graph.nodes):
        op = node.op
        if op is None or not graph.inputs[nid] or op.random or op.aux or op.loss:
            continue
        reads = graph.inputs[nid]
        if kept:
            reads = [e if makers[e] not in kept else e - row[makers[e]] + row[kept[makers[e]]] for e in reads]
        key: tuple[object, ...] = (op.name, *reads)
        equal = table.setdefault(key, nid)
        # Few nodes read the same entries as another node of their kind: only they are asked for the rest.
        if equal != nid:
            waits = frozenset(kept.get(dep, dep) for dep in graph.controls[nid])
            others = frozenset(kept.get(dep, dep) for dep in graph.controls[equal])
            if graph.nodes[equal].attrs != node.attrs or waits != others:
                key = (*key, frozenset(node.attrs.items()), waits)
                equal = table.setdefault(key, nid)
        if equal != nid:
            kept[nid] = equal
    if not kept:
        return network, ""
    edit = Edit(network)
    for nid, equal in kept.items():
        edit.fuse((nid,), {row[nid] + k: row[equal] + k for k in range(row[nid + 1] - row[nid])})
    owner: dict[int, int] = {}
    copy = registry.get("_copy")
    for k, entry in enumerate(edit.heads):
        moved = edit.at(entry)
        # The same entry listed twice was one array before and may stay one; two entries that became one may not.
        if owner.setdefault(moved, entry) != entry:
            maker = edit.makers[moved]
            params = registry.parse_params(copy, {})
            edit.heads[k] = edit.add(copy, f"{graph.names[maker]}_{k}_copy", inputs=[moved], main=maker, params=params)
    return edit.done(), f"merged {counted(len(kept), 'node')} into others that compute the same"


PASS: GraphPass = GraphPass(
    name="equal expressions merged",
    switch="MXNET_ELIMINATE_COMMON_EXPR",
    enabled=lambda settings: settings.options.eliminate_common_expr,
    run=merge_equal_nodes,
    changes=frozenset((FORWARD,)),
)
