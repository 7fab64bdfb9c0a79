"""Devices of nodes, and copies where an edge crosses devices.

Needs the whole graph (forward and gradient); gives a context per node. In this order: a variable is where its array is,
or where its group says, or on the default device; an operator node is where its group says; a gradient node is where
its forward node is; any other node is where its first placed input is; what is left is where its first placed consumer
is, else on the default device.

One ``_CrossDeviceCopy`` node named ``<source>_<index>_copy`` is made per entry and destination; a head that has to
arrive on another device (a gradient, where its array is) gets a copy of its own, and behind it a ``_copy`` where it is
added to its array: a copy between devices overwrites.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from weftplan.device.context import Context
from weftplan.errors import BindError, PlanError
from weftplan.ops.core import registry
from weftplan.symbol.gradient import INHERITED
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import depth_first_order, rewired


def place(
    entries: Sequence[Entry],
    default: Context,
    *,
    group2ctx: Mapping[str, Context],
    variable_contexts: Mapping[str, Context],
    wanted: Mapping[int, Context],
    added: Collection[int] = (),
) -> tuple[list[Entry], dict[Node, Context]]:
    """Place every node and insert copies.

    Args:
        entries: heads of the graph.
        default: device of whatever nothing else places.
        group2ctx: device of each ``ctx_group``; empty: groups are ignored.
        variable_contexts: where the arrays of variables are, by name; wins over groups.
        wanted: position in ``entries`` -> device on which that head must arrive.
        added: positions of heads that are added to their arrays, not written.

    Returns:
        The heads of the placed graph, and the device of each of its nodes.

    Raises:
        BindError: a group has no device, or a state that an operator writes is on another device.
    """
    order, nid = depth_first_order((entry.node for entry in entries), PlanError)
    where = _assign(order, nid, default, group2ctx, variable_contexts)
    copies: dict[tuple[Node, int, Context], Node] = {}
    twin: dict[Node, Node] = {}
    placed: dict[Node, Context] = {}
    copy_op = registry.get("_CrossDeviceCopy")
    copy_params = registry.parse_params(copy_op, {})
    local_op = registry.get("_copy")
    local_params = registry.parse_params(local_op, {})

    def carried(entry: Entry, to: Context, *, private: bool = False) -> Entry:
        source = twin[entry.node]
        if placed[source] == to:
            return Entry(source, entry.index, entry.version)
        key = (source, entry.index, to)
        copy = None if private else copies.get(key)
        if copy is None:
            copy = Node(
                copy_op,
                f"{source.name}_{entry.index}_copy",
                params=copy_params,
                inputs=[Entry(source, entry.index, entry.version)],
            )
            placed[copy] = to
            if not private:
                copies[key] = copy
        return Entry(copy)

    for node, here in zip(order, where, strict=True):
        new = node
        if node.op is not None:
            _check_states(node, here, where, nid)
            inputs = [carried(entry, here) for entry in node.inputs]
            new = rewired(node, inputs, twin)
        twin[node] = new
        placed[new] = here
    heads = []
    for i, entry in enumerate(entries):
        to = wanted.get(i)
        head = carried(entry, placed[twin[entry.node]] if to is None else to, private=True)
        if i in added and head.node.op is copy_op:
            adder = Node(local_op, f"{head.node.name}_added", params=local_params, inputs=[head])
            placed[adder] = placed[head.node]
            head = Entry(adder)
        heads.append(head)
    return heads, placed


def _assign(
    order: Sequence[Node],
    nid: Mapping[Node, int],
    default: Context,
    group2ctx: Mapping[str, Context],
    variable_contexts: Mapping[str, Context],
) -> list[Context]:
    where: list[Context | None] = [None] * len(order)
    for i, node in enumerate(order):
        group = next((node.attrs[key] for key in INHERITED if key in node.attrs), None)
        if node.op is None and node.name in variable_contexts:
            where[i] = variable_contexts[node.name]
        elif group is not None and group2ctx:
            if group not in group2ctx:
                raise BindError(
                    f"{node.name!r} is in ctx_group {group!r}, but group2ctx has only {sorted(group2ctx)}; add it there"
                )
            where[i] = group2ctx[group]
        elif node.op is None:
            # Head gradients go where they are consumed: every other variable has an array somewhere.
            where[i] = None if node.name.startswith("_head_grad_") else default
        elif node.control_deps:
            where[i] = where[nid[node.control_deps[0]]]
        if where[i] is None and node.op is not None:
            where[i] = next((w for e in node.inputs if (w := where[nid[e.node]]) is not None), None)
    for i in range(len(order) - 1, -1, -1):
        here = where[i]
        if here is not None:
            for entry in order[i].inputs:
                if where[nid[entry.node]] is None:
                    where[nid[entry.node]] = here
    return [default if w is None else w for w in where]


def _check_states(node: Node, here: Context, where: Sequence[Context], nid: Mapping[Node, int]) -> None:
    assert node.op is not None
    for i in node.op.mutated(node.params):
        state = node.inputs[i].node
        there = where[nid[state]]
        if there != here:
            raise BindError(
                f"operator {node.op.name} ({node.name!r}) on {here} writes to {state.name!r}, which is on {there}: "
                f"put the state on {here} (its ctx_group or its array)"
            )
