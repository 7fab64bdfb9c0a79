"""Walking a graph from its heads: iterative, so a chain of 10^6 nodes is ordinary input."""

from __future__ import annotations

from collections.abc import Iterable

from weftplan.errors import FormatError
from weftplan.symbol.node import Entry, Node


def topological_order(entries: Iterable[Entry]) -> list[Node]:
    """Every node that ``entries`` need, each after what it needs: MXNet's depth-first post-order.

    Heads come in the order given; for each node first its inputs in order, then its control dependencies.

    Raises:
        FormatError: the graph has a cycle.

    >>> a = Node(None, "a")
    >>> [node.name for node in topological_order([Entry(Node(None, "b")), Entry(a), Entry(a)])]
    ['b', 'a']
    """
    order: list[Node] = []
    done: dict[Node, bool] = {}  # False while the node is on the path from a head, True once it is in `order`
    stack: list[Node] = []
    for head in entries:
        stack.append(head[0])
        while stack:
            node = stack[-1]
            state = done.get(node)
            if state is None:
                done[node] = False
                # Reversed, so that the first input is on top of the stack and numbered first.
                for dependency in reversed(node.control_deps):
                    _need(dependency, done, stack)
                for entry in reversed(node.inputs):
                    _need(entry[0], done, stack)
            else:
                stack.pop()
                if not state:
                    done[node] = True
                    order.append(node)
    return order


def _need(node: Node, done: dict[Node, bool], stack: list[Node]) -> None:
    state = done.get(node)
    if state is None:
        stack.append(node)
    elif not state:
        raise FormatError(f"the graph has a cycle through node {node.name!r}: a node cannot need its own result")


def copy_graph(entries: Iterable[Entry], replace: dict[Node, Entry] | None = None) -> list[Entry]:
    """Fresh nodes for everything that ``entries`` need; the entries of the copy.

    ``replace`` maps variables to entries (of other graphs, not copied) that take their place.
    """
    heads = list(entries)
    substitute = {} if replace is None else replace
    twins: dict[Node, Node] = {}

    def moved(entry: Entry) -> Entry:
        other = substitute.get(entry.node)
        return Entry(twins[entry.node], entry.index, entry.version) if other is None else other

    for node in topological_order(heads):
        if node in substitute:
            continue
        twins[node] = twin = Node(
            node.op,
            node.name,
            attrs=dict(node.attrs),
            params=node.params,
            inputs=[moved(entry) for entry in node.inputs],
            control_deps=[twins[dep] for dep in node.control_deps if dep in twins],
            created_at=node.created_at,
            mirror_of=None if node.mirror_of is None else twins.get(node.mirror_of),
        )
        twin.version = node.version
    return [moved(entry) for entry in heads]
