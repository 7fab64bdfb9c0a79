"""Device placement: assign a device to every node and insert copies on edges between devices.

The pass runs on the whole graph, with gradients. The first rule that applies decides: a variable is on the device of
its array, of its group, or the default device; an operator node is on the device of its group; a gradient node is on
the device of its forward node; any other node is on the device of its first placed input; a node that is still unplaced
is on the device of a placed reader, else on the default device.

The pass adds one ``_CrossDeviceCopy`` node ``<source>_<index>_copy`` per entry and destination. An output needed on
another device (a gradient, on the device of its array) gets a copy of its own. If it is added to its array, a ``_copy``
follows, because a copy between devices can only overwrite.
"""

from __future__ import annotations

from weftplan.device.context import Context
from weftplan.errors import BindError
from weftplan.ops.core import registry
from weftplan.ops.core.schema import Req
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.network import Edit, Network
from weftplan.planner.symbolic.passes.graph_pass import BACKWARD, FORWARD, PLACED, GraphPass, PassSettings
from weftplan.symbol.attribute import INHERITED


def place(network: Network, settings: PassSettings) -> tuple[Network, str]:
    """Place every node and insert copies.

    Raises:
        BindError: a group has no device, or a state that an operator writes is on another device.
    """
    graph, edit = network.graph, Edit(network)
    contexts = edit.devices = _assign(graph, settings)
    copy_op, local_op = registry.get("_CrossDeviceCopy"), registry.get("_copy")
    copy_params, local_params = registry.parse_params(copy_op, {}), registry.parse_params(local_op, {})
    copies: dict[tuple[int, Context], int] = {}

    def carried(entry: int, to: Context, *, private: bool = False) -> int:
        maker = graph.entry_node[entry]
        if contexts[maker] == to:
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
            _check_states(graph, nid, contexts)
            edit.inputs[nid] = [carried(e, contexts[nid]) for e in inputs]
    gradient_of = dict(enumerate(network.wanted, network.num_outputs))
    for k, entry in enumerate(graph.outputs):
        name = gradient_of.get(k, "")  # a gradient belongs on the device of its argument's array
        owner = network.arguments[name] if name else graph.entry_node[entry]
        head = carried(entry, contexts[owner], private=True)
        maker = edit.makers[head]
        if name and network.requests[name] == Req.ADD and edit.nodes[maker].op is copy_op:
            adder = edit.add(local_op, f"{edit.nodes[maker].name}_added", inputs=[head], params=local_params)
            edit.devices[edit.makers[adder]] = edit.devices[maker]
            head = adder
        edit.heads[k] = head
    return edit.finish(), ""


def _assign(graph: IndexedGraph, settings: PassSettings) -> list[Context]:
    """Return the device of each node.

    Raises:
        BindError: a group has no device.
    """
    makers, group2ctx = graph.entry_node, settings.group2ctx
    contexts: list[Context | None] = [None] * graph.num_nodes
    for i, node in enumerate(graph.nodes):
        group = next((node.attrs[key] for key in INHERITED if key in node.attrs), None)
        if node.op is None and node.name in settings.variable_contexts:
            contexts[i] = settings.variable_contexts[node.name]
        elif group is not None and group2ctx:
            if group not in group2ctx:
                raise BindError(
                    f"{node.name!r} is in ctx_group {group!r}, but group2ctx has only {sorted(group2ctx)}; add it there"
                )
            contexts[i] = group2ctx[group]
        elif node.op is None:
            # A head gradient goes to the device of its readers; every other variable has an array on a device.
            contexts[i] = None if node.name.startswith("_head_grad_") else settings.context
        elif graph.controls[i]:
            contexts[i] = contexts[graph.controls[i][0]]
        if contexts[i] is None and node.op is not None:
            contexts[i] = next((w for e in graph.inputs[i] if (w := contexts[makers[e]]) is not None), None)
    for i in range(graph.num_nodes - 1, -1, -1):
        context = contexts[i]
        if context is not None:
            for e in graph.inputs[i]:
                if contexts[makers[e]] is None:
                    contexts[makers[e]] = context
    return [settings.context if w is None else w for w in contexts]


def _check_states(graph: IndexedGraph, nid: int, contexts: list[Context]) -> None:
    """Check that the states that a node writes are on its device.

    Raises:
        BindError: a state is on another device.
    """
    node = graph.nodes[nid]
    assert node.op is not None
    for i in node.op.mutated(node.params):
        state = graph.entry_node[graph.inputs[nid][i]]
        node_context, state_context = contexts[nid], contexts[state]
        if state_context != node_context:
            raise BindError(
                f"operator {node.op.name} ({node.name!r}) on {node_context} writes to {graph.names[state]!r}, which is "
                f"on {state_context}: put the state on {node_context} (its ctx_group or its array)"
            )


PASS: GraphPass = GraphPass(
    name="nodes placed",
    switch="group2ctx",
    enabled=PassSettings.spreads,
    run=place,
    changes=frozenset((FORWARD, BACKWARD)),
    gives=frozenset((PLACED,)),
    shown=False,
)
