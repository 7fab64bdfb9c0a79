"""``debug_str``: the bound graph as MXNet's text, ending in the planned megabytes.

It reads a planned graph, keeps nothing, and may be called from any thread.
"""

from __future__ import annotations

from weftplan.planner import PlannedGraph
from weftplan.symbol.json_io import debug_lines


def debug_str(planned: PlannedGraph) -> str:
    """Outputs, nodes in depth-first order, passes, then ``Total <MB> MB allocated`` and MXNet's constant second line.

    Each pass that ran is listed with its changes and its switch. The megabytes are those of the plan, rounded down.
    """
    graph = planned.graph

    def named(eid: int) -> str:
        maker = graph.entry_node[eid]
        return f"{graph.names[maker]}({eid - graph.row[maker]})"

    def read(nid: int) -> list[str]:
        """Return the texts of a node's inputs."""
        versions = [
            f" version={graph.version(nid, slot)}" if graph.is_variable[graph.entry_node[eid]] else ""
            for slot, eid in enumerate(graph.inputs[nid])
        ]
        return [named(eid) + version for eid, version in zip(graph.inputs[nid], versions, strict=True)]

    heads = dict.fromkeys([*planned.outputs, *planned.gradients.values()])
    lines = ["Symbol Outputs:", *(f"\toutput[{i}]={named(eid)}" for i, eid in enumerate(heads))]
    for nid, node in enumerate(graph.nodes):
        lines += debug_lines(node, read(nid), [graph.names[dep] for dep in graph.controls[nid]])
        chosen = planned.kernels.get(nid)
        if chosen is not None and chosen.several:
            lines.append(f"Kernel: {chosen.text}")
    lines += [f"Pass: {one.text}" for one in planned.memory.passes]
    lines.append(f"Total {planned.memory.peak >> 20} MB allocated")
    lines.append("Total 11 TempSpace resource requested")
    return "\n".join(lines) + "\n"
