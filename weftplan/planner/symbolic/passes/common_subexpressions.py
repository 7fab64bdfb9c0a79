"""Common-subexpression elimination: merge nodes that compute the same values from the same inputs.

Two operator nodes are merged if their operator, input entries, control dependencies and attributes (all of them,
including parameters and device group) are equal and the operator is pure: it is not random, mutates no input, and is no
loss (two equal losses count twice in the gradient). Names do not matter; the first node in depth-first order is kept.
"""

from __future__ import annotations

from weftplan.device.amounts import counted
from weftplan.ops.core import registry
from weftplan.planner.symbolic.network import Edit, Network
from weftplan.planner.symbolic.passes.graph_pass import FORWARD, GraphPass, PassSettings


def merge_equal_nodes(network: Network, settings: PassSettings) -> tuple[Network, str]:
    """Merge equal nodes. If two graph outputs become one entry, a ``_copy`` node keeps them distinct."""
    graph = network.graph
    makers, row = graph.entry_node, graph.row
    replacement: dict[int, int] = {}  # merged node -> the node that replaces it
    table: dict[tuple[object, ...], int] = {}
    for nid, node in enumerate(graph.nodes):
        op = node.op
        if op is None or not graph.inputs[nid] or op.random or op.aux or op.loss:
            continue
        reads = graph.inputs[nid]
        if replacement:
            reads = [
                e if makers[e] not in replacement else e - row[makers[e]] + row[replacement[makers[e]]] for e in reads
            ]
        key: tuple[object, ...] = (op.name, *reads)
        equal = table.setdefault(key, nid)
        # Few nodes have the operator and inputs of another node; only for these are attributes and controls compared.
        if equal != nid:
            waits = frozenset(replacement.get(dep, dep) for dep in graph.controls[nid])
            controls = frozenset(replacement.get(dep, dep) for dep in graph.controls[equal])
            if graph.nodes[equal].attrs != node.attrs or waits != controls:
                key = (*key, frozenset(node.attrs.items()), waits)
                equal = table.setdefault(key, nid)
        if equal != nid:
            replacement[nid] = equal
    if not replacement:
        return network, ""
    edit = Edit(network)
    for nid, equal in replacement.items():
        edit.fuse((nid,), {row[nid] + k: row[equal] + k for k in range(row[nid + 1] - row[nid])})
    owner: dict[int, int] = {}
    copy = registry.get("_copy")
    for k, entry in enumerate(edit.heads):
        moved = edit.at(entry)
        # An entry that was listed twice is one array, also without this pass; two merged entries must be two arrays.
        if owner.setdefault(moved, entry) != entry:
            maker = edit.makers[moved]
            params = registry.parse_params(copy, {})
            edit.heads[k] = edit.add(copy, f"{graph.names[maker]}_{k}_copy", inputs=[moved], main=maker, params=params)
    return edit.finish(), f"merged {counted(len(replacement), 'node')} into others that compute the same"


PASS: GraphPass = GraphPass(
    name="equal expressions merged",
    switch="MXNET_ELIMINATE_COMMON_EXPR",
    enabled=lambda settings: settings.options.eliminate_common_expr,
    run=merge_equal_nodes,
    changes=frozenset((FORWARD,)),
)
