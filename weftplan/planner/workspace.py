"""Scratch memory of nodes: how many bytes each one needs while it runs.

A node's scratch is what its operator declares, rounded up to 64, and behind it one rounded-up block for each output
that must be *added* to its destination: kernels only overwrite, so such an output is computed in scratch first.
"""

from __future__ import annotations

from collections.abc import Collection

from weftplan.errors import PlanError
from weftplan.ops.schema import DType, Shape, TensorSpec, aligned
from weftplan.planner.graph import IndexedGraph


def operator_workspaces(graph: IndexedGraph, shapes: list[Shape], dtypes: list[DType]) -> dict[int, int]:
    """Bytes that operators declare, by node id; nodes without scratch are absent.

    Raises:
        PlanError: an operator declares a negative number or none at all.
    """
    needs: dict[int, int] = {}
    # Repeated layers ask once: the parser gives equal parameters one dictionary.
    known: dict[tuple[object, ...], int] = {}
    row = graph.row
    for nid, node in enumerate(graph.nodes):
        op = node.op
        if op is None or op.workspace is None:
            continue
        entries = (*graph.inputs[nid], *range(row[nid], row[nid + 1]))
        key = (id(op), id(node.params), *[shapes[e] for e in entries], *[dtypes[e] for e in entries])
        found = known.get(key)
        if found is not None:
            if found:
                needs[nid] = found
            continue
        ins = [TensorSpec(shapes[e], dtypes[e]) for e in graph.inputs[nid]]
        outs = [TensorSpec(shapes[e], dtypes[e]) for e in range(row[nid], row[nid + 1])]
        nbytes = op.workspace(node.params, ins, outs)
        if isinstance(nbytes, bool) or int(nbytes) != nbytes or nbytes < 0:
            raise PlanError(f"operator {op.name} ({node.name!r}) declares {nbytes!r} bytes of workspace: expected >= 0")
        known[key] = aligned(int(nbytes))
        if nbytes:
            needs[nid] = known[key]
    return needs


def with_added_outputs(
    needs: dict[int, int], graph: IndexedGraph, nbytes: list[int], added: Collection[int]
) -> dict[int, int]:
    """``needs`` and room for every entry of ``added`` in the scratch of the node that makes it."""
    if not added:
        return needs
    total = dict(needs)
    for eid in added:
        nid = int(graph.entry_node[eid])
        total[nid] = total.get(nid, 0) + aligned(nbytes[eid])
    return total
