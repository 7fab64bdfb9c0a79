"""Common-subexpression elimination: nodes that compute the same from the same become one.

Two operator nodes are merged when operator, input entries, control dependencies and attributes (all of them, so also
the device group) are equal, and running once or twice makes no difference: the operator is not random, mutates no
input, and is no loss (two equal losses count twice in the gradient). Names do not matter; the first node in depth-first
order stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from weftplan.ops.core import registry
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import followed, rewired


def eliminate(entries: Sequence[Entry], order: Sequence[Node]) -> tuple[list[Entry], int]:
    """(entries of a graph without repeated work, number of nodes removed); unchanged entries when there is none.

    ``order`` is the depth-first order of ``entries``.

    Nodes are never changed in place: users of a removed node are copied. Two outputs that become one entry stay
    distinct through a ``_copy`` node.
    """
    twin: dict[Node, Node] = {}
    table: dict[tuple[object, ...], Node] = {}
    removed = 0
    for node in order:
        op = node.op
        if op is None:
            continue
        kept = node
        if twin:
            kept = rewired(node, [followed(entry, twin) for entry in node.inputs], twin)
            if kept is not node:
                twin[node] = kept
        if not node.inputs or op.random or op.aux or op.loss:
            continue
        key: tuple[object, ...] = (op.name, *[(e[0], e[1]) for e in kept.inputs])
        other = table.setdefault(key, kept)
        # Few nodes read what another one of their kind reads: only they are asked for the rest.
        if other is not kept and (other.attrs != kept.attrs or set(other.control_deps) != set(kept.control_deps)):
            key = (*key, frozenset(kept.attrs.items()), frozenset(kept.control_deps))
            other = table.setdefault(key, kept)
        if other is not kept:
            twin[node] = other
            removed += 1
    if not removed:
        return list(entries), 0
    result: list[Entry] = []
    owner: dict[tuple[Node, int], tuple[Node, int]] = {}
    for k, entry in enumerate(entries):
        moved = followed(entry, twin)
        source = (entry.node, entry.index)
        # The same entry listed twice was one array before and may stay one; two entries that became one may not.
        if owner.setdefault((moved.node, moved.index), source) != source:
            op = registry.get("_copy")
            moved = Entry(Node(op, f"{moved.node.name}_{k}_copy", params=registry.parse_params(op, {}), inputs=[moved]))
        result.append(moved)
    return result, removed
