"""Scratch memory of nodes: how many bytes each needs while it runs.

A node's scratch is what its front end says, a multiple of 64, and behind it one rounded-up block for each output that
must be *added* to its destination: kernels only overwrite, so such an output is computed in scratch first. Nothing is
kept; any thread may call this.
"""

from __future__ import annotations

from collections.abc import Collection

from weftplan.ops.schema import aligned
from weftplan.planner.graph import Graph


def with_added_outputs(
    needs: dict[int, int], graph: Graph, nbytes: list[int], added: Collection[int]
) -> dict[int, int]:
    """``needs`` and room for every entry of ``added`` in the scratch of the node that makes it."""
    if not added:
        return needs
    total = dict(needs)
    for eid in added:
        nid = int(graph.entry_node[eid])
        total[nid] = total.get(nid, 0) + aligned(nbytes[eid])
    return total
