"""``debug_str``: the bound graph as MXNet's text, ending in the planned megabytes.

It reads a planned graph, keeps nothing, and may be called from any thread.
"""

from __future__ import annotations

from weftplan.planner import PlannedGraph


def debug_str(planned: PlannedGraph) -> str:
    """Outputs, nodes in depth-first order, passes, then ``Total <MB> MB allocated`` and MXNet's constant second line.

    Each pass that ran is listed with its changes and its switch. The megabytes are those of the plan, rounded down.
    """
    graph = planned.graph

    def named(eid: int) -> str:
        maker = graph.entry_node[eid]
        return f"{graph.names[maker]}({eid - graph.row[maker]})"

    lines = ["Symbol Outputs:"]
    heads = list(dict.fromkeys([*planned.outputs, *planned.gradients.values()]))
    for i, eid in enumerate(heads):
        lines.append(f"\toutput[{i}]={named(eid)}")
    for nid, node_object in enumerate(graph.nodes):
        if node_object.op is None:
            lines.append(f"Variable:{node_object.name}")
            continue
        lines.append("-" * 20)
        lines.append(f"Op:{node_object.op.name}, Name={node_object.name}")
        lines.append("Inputs:")
        for i, eid in enumerate(graph.inputs[nid]):
            version = f" version={graph.version(nid, i)}" if graph.is_variable[graph.entry_node[eid]] else ""
            lines.append(f"\targ[{i}]={named(eid)}{version}")
        if node_object.attrs:
            lines.append("Attrs:")
            lines += [f"\t{key}={value}" for key, value in sorted(node_object.attrs.items())]
        if graph.controls[nid]:
            lines.append("Control deps:")
            lines += [f"\tcdep[{i}]={graph.names[dep]}" for i, dep in enumerate(graph.controls[nid])]
        chosen = planned.kernels.get(nid)
        if chosen is not None and chosen.several:
            lines.append(f"Kernel: {chosen.text}")
    lines += [f"Pass: {one.text}" for one in planned.memory.passes]
    lines.append(f"Total {planned.memory.peak >> 20} MB allocated")
    lines.append("Total 11 TempSpace resource requested")
    return "\n".join(lines) + "\n"
