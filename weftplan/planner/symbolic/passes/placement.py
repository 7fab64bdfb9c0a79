"""Devices of nodes, and copies where an edge crosses devices.

Needs the whole graph (forward and gradient); gives a context per node. In this order: a variable is where its array is,
or where its group says, or on the default device; an operator node is where its group says; a gradient node is where
its forward node is; any other node is where its first placed input is; what is left is where its first placed consumer
is, else on the default device.

One ``_CrossDeviceCopy`` node named ``<source>_<index>_copy`` is made per entry and destination; a head that has to
arrive on another device (a gradient, on that of its array) gets a copy of its own, and after it a ``_copy`` if it is
added to its array: a copy between devices overwrites.
"""

from __future__ import annotations

from weftplan.device.context import Context
from weftplan.errors import BindError
from weftplan.ops.core import registry
from weftplan.ops.core.schema import Req
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.network import Edit, Network
from weftplan.planner.symbolic.passes.graph_pass import BACKWARD, FORWARD, PLACED, GraphPass, Settings
from weftplan.symbol.attribute import INHERITED


def place(network: Network, settings: Settings) -> tuple[Network, str]:
    """Place every node and insert copies.

    Raises:
        BindError: a group has no device, or a state that an operator writes is on another device.
    """
    graph, edit = network.graph, Edit(network)
    where = edit.devices = _assign(graph, settings)
    copy_op, local_op = registry.get("_CrossDeviceCopy"), registry.get("_copy")
    copy_params, local_params = registry.parse_params(copy_op, {}), registry.parse_params(local_op, {})
    copies: dict[tuple[int, Context], int] = {}

    def carried(entry: int, to: Context, *, private: bool = False) -> int:
        maker = graph.entry_node[entry]
        if where[maker] == to:
            return entry
        copy = None if private else copies.get((entry, to))
        if copy is None:
            name = f"{graph.names[maker]}_{entry - graph.row[maker]}_copy"
            copy = edit.add(copy_op, name, inputs=[entry], params=copy_params)
            edit.devices[edit.makers[copy]] = to
            if not private:
                copies[entry, to] = copy
        return copy

    for nid, inputs in enumerate(graph.inputs):
        if graph.nodes[nid].op is not None:
            _check_states(graph, nid, where)
            edit.inputs[nid] = [carried(e, where[nid]) for e in inputs]
    gradient_of = dict(enumerate(network.wanted, network.num_outputs))
    for k, entry in enumerate(graph.outputs):
        name = gradient_of.get(k, "")  # a gradient lies with the array of its argument
        owner = network.arguments[name] if name else graph.entry_node[entry]
        head = carried(entry, where[owner], private=True)
        maker = edit.makers[head]
        if name and network.requests[name] == Req.ADD and edit.nodes[maker].op is copy_op:
            adder = edit.add(local_op, f"{edit.nodes[maker].name}_added", inputs=[head], params=local_params)
            edit.devices[edit.makers[adder]] = edit.devices[maker]
            head = adder
        edit.heads[k] = head
    return edit.done(), ""


def _assign(graph: IndexedGraph, settings: Settings) -> list[Context]:
    """The device of each node."""
    makers, group2ctx = graph.entry_node, settings.group2ctx
    where: list[Context | None] = [None] * graph.num_nodes
    for i, node in enumerate(graph.nodes):
        group = next((node.attrs[key] for key in INHERITED if key in node.attrs), None)
        if node.op is None and node.name in settings.variable_contexts:
            where[i] = settings.variable_contexts[node.name]
        elif group is not None and group2ctx:
            if group not in group2ctx:
                raise BindError(
                    f"{node.name!r} is in ctx_group {group!r}, but group2ctx has only {sorted(group2ctx)}; add it there"
                )
            where[i] = group2ctx[group]
        elif node.op is None:
            # Head gradients go to the device of their readers: every other variable has an array somewhere.
            where[i] = None if node.name.startswith("_head_grad_") else settings.context
        elif graph.controls[i]:
            where[i] = where[graph.controls[i][0]]
        if where[i] is None and node.op is not None:
            where[i] = next((w for e in graph.inputs[i] if (w := where[makers[e]]) is not None), None)
    for i in range(graph.num_nodes - 1, -1, -1):
        here = where[i]
        if here is not None:
            for e in graph.inputs[i]:
                if where[makers[e]] is None:
                    where[makers[e]] = here
    return [settings.context if w is None else w for w in where]


def _check_states(graph: IndexedGraph, nid: int, where: list[Context]) -> None:
    node = graph.nodes[nid]
    assert node.op is not None
    for i in node.op.mutated(node.params):
        state = graph.entry_node[graph.inputs[nid][i]]
        here, there = where[nid], where[state]
        if there != here:
            raise BindError(
                f"operator {node.op.name} ({node.name!r}) on {here} writes to {graph.names[state]!r}, which is on "
                f"{there}: put the state on {here} (its ctx_group or its array)"
            )


PASS = GraphPass(
    name="nodes placed",
    switch="group2ctx",
    enabled=Settings.spreads,
    run=place,
    changes=frozenset((FORWARD, BACKWARD)),
    gives=frozenset((PLACED,)),
    shown=False,
)
