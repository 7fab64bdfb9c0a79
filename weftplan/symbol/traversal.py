"""Graph traversal from the heads: the canonical order of nodes, and graph copies.

The walks do not recurse, because chains of 10^6 nodes are ordinary input. This module keeps no state and changes no
node, so any thread may call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weftplan.errors import FormatError, MXNetError
from weftplan.symbol.node import Entry, Node

Order = tuple[list[Node], dict[Node, int]]
"""Nodes in topological order, and the position of each."""


def topological_order(entries: Iterable[Entry]) -> list[Node]:
    """Return the order of :func:`depth_first_order`, without the positions.

    Raises:
        FormatError: the graph has a cycle.

    >>> a = Node(None, "a")
    >>> [node.name for node in topological_order([Entry(Node(None, "b")), Entry(a), Entry(a)])]
    ['b', 'a']
    """
    return depth_first_order(entry[0] for entry in entries)[0]


def depth_first_order(
    heads: Iterable[Node], error: type[MXNetError] = FormatError, begun: Order | None = None
) -> Order:
    """Return all nodes reachable from ``heads`` with their positions, in MXNet's depth-first post-order.

    Heads are visited in their order; a node's inputs in order, then its control dependencies. ``begun`` is the order of
    preceding heads, if the caller has it; it is not changed.

    Raises:
        FormatError: the nodes form a cycle; the message names the nodes on it. ``error`` is raised in its place.
    """
    order: list[Node] = [] if begun is None else begun[0].copy()
    # -1 while a node is on the path from a head, else its position in `order`
    state: dict[Node, int] = {} if begun is None else begun[1].copy()
    stack: list[Node] = []
    seen = state.get
    for head in heads:
        if head in state:
            continue
        stack.append(head)
        while stack:
            node = stack[-1]
            visited = seen(node)
            if visited is None:
                if not node.inputs and not node.control_deps:
                    stack.pop()
                    state[node] = len(order)
                    order.append(node)
                    continue
                state[node] = -1
                # Reversed, so that the first input is on top of the stack and numbered first.
                for dep in reversed(node.control_deps):
                    mark = seen(dep)
                    if mark is None:
                        stack.append(dep)
                    elif mark < 0:
                        raise error(_cycle(stack, state, dep))
                for entry in reversed(node.inputs):
                    dep = entry[0]
                    mark = seen(dep)
                    if mark is None:
                        stack.append(dep)
                    elif mark < 0:
                        raise error(_cycle(stack, state, dep))
            else:
                stack.pop()
                if visited < 0:
                    state[node] = len(order)
                    order.append(node)
    return order, state


def split_variables(order: Iterable[Node]) -> tuple[list[Node], list[Node]]:
    """Return (arguments, auxiliary states) in ``order``: a state is a variable that some operator writes to."""
    written: set[Node] = set()
    variables: list[Node] = []
    for node in order:
        if node.op is None:
            variables.append(node)
        elif node.op.aux:
            written.update(node.inputs[i].node for i in node.op.mutated(node.params))
    return [node for node in variables if node not in written], [node for node in variables if node in written]


def copy_graph(entries: Iterable[Entry], replace: dict[Node, Entry] | None = None) -> list[Entry]:
    """Copy all nodes reachable from ``entries``; return the entries of the copy.

    ``replace`` maps variables to entries of other graphs, which replace them and are not copied.
    """
    heads = list(entries)
    substitute = {} if replace is None else replace
    twins: dict[Node, Node] = {}

    def moved(entry: Entry) -> Entry:
        replacement = substitute.get(entry.node)
        return Entry(twins[entry.node], entry.index, entry.version) if replacement is None else replacement

    for node in topological_order(heads):
        if node in substitute:
            continue
        controls = [twins[dep] for dep in node.control_deps if dep in twins]
        origin = None if node.mirror_of is None else twins.get(node.mirror_of)
        twins[node] = node.like(list(map(moved, node.inputs)), controls, attrs=dict(node.attrs), mirror_of=origin)
    return [moved(entry) for entry in heads]


def _cycle(stack: Sequence[Node], state: dict[Node, int], start: Node) -> str:
    """Format the message for an edge back to ``start``, which is still on the path."""
    path = [node for node in stack if state.get(node) == -1]
    names: list[str] = []
    for node in path[path.index(start) :]:
        if not names or names[-1] != node.name:
            names.append(node.name)
    shown = " <- ".join(map(repr, names[:8])) + (" <- ..." if len(names) > 8 else "")
    return f"the graph has a cycle: {shown} <- {start.name!r}; a node cannot need its own result"
