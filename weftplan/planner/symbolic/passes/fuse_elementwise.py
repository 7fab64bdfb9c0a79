"""Elementwise nodes that follow one another become one, so that no array between them is written.

A node joins the one behind it when nobody else reads what it makes, when nothing is computed between the two but what
joins as well, and when both are on one device and are recomputed both or neither. So a chain is computed where its last
node was, at a moment when all it reads was there anyway: joining never needs more memory. It has the name of its last
node, whose output it makes. :func:`chained` runs when sizes are known; :func:`members` and :func:`apart` undo it for
readers. Nothing is kept, and no node of others is changed; any thread may call them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence

from weftplan.ops.fusion.elementwise import ELEMENTWISE, Chain, Link
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import all_followed, redirect

MEMBERS = "__members__"
"""The attribute of a chain that names its nodes, in the order in which they run."""
MOST_LINKS = 16
"""Longer chains gain no more: their inputs would leave the registers."""
Eligible = Callable[[Node], bool]
Together = Callable[[Node, Node], bool]


def chained(
    entries: Sequence[Entry],
    order: Sequence[Node],
    eligible: Eligible,
    together: Together,
    given: Container[Node],
) -> tuple[list[Entry], dict[Node, Node]]:
    """(entries of a graph in which chains are one node, the new node of every node that has one).

    Args:
        order: the depth-first order of ``entries``.
        given: nodes that must not change.
        eligible: whether a node is elementwise and worth joining.
        together: whether two such nodes may be one.
    """
    chains = _chains(entries, order, eligible, together)
    if not chains:
        return list(entries), {}
    whole = {chain[-1]: chain for chain in chains}
    inner = {node for chain in chains for node in chain[:-1]}
    moved: dict[Node, Node] = {}
    known: dict[object, dict[str, object]] = {}  # equal chains have one dictionary of parameters
    for node in order:
        if node.op is None or node in inner:
            continue
        chain = whole.get(node)
        if chain is not None:
            made = _joined(chain, moved, known)
            moved.update(dict.fromkeys(chain, made))
            continue
        if not moved.keys().isdisjoint([entry[0] for entry in node.inputs] + node.control_deps):
            redirect(node, all_followed(node.inputs, moved), moved, given)
    return all_followed(entries, moved), moved


def _chains(
    entries: Sequence[Entry], order: Sequence[Node], eligible: Eligible, together: Together
) -> list[list[Node]]:
    steps = [node for node in order if node.op is not None]
    fit = {node for node in steps if eligible(node)}
    if len(fit) < 2:
        return []
    uses = Counter([entry[0] for node in steps for entry in node.inputs if entry[0] in fit])
    uses.update(entry[0] for entry in entries if entry[0] in fit)
    begins: dict[Node, int] = {}  # last node of a chain -> place of its first
    for place, node in enumerate(steps):
        if node not in fit:
            continue
        begin = place
        before = {entry[0] for entry in node.inputs}
        while begin:
            other = steps[begin - 1]
            if other not in before or other not in fit or uses[other] != 1 or not together(other, node):
                break
            if place - begins[other] >= MOST_LINKS:
                break
            begin = begins[other]
        begins[node] = begin
    found = []
    place = len(steps) - 1
    while place >= 0:
        begin = begins.get(steps[place], place)
        if begin < place:
            found.append(steps[begin : place + 1])
        place = begin - 1
    return found


def _joined(chain: Sequence[Node], moved: Mapping[Node, Node], known: dict[object, dict[str, object]]) -> Node:
    inside = {node: k for k, node in enumerate(chain)}
    inputs = [entry for node in chain for entry in node.inputs if entry[0] not in inside]
    links, taken = [], 0
    for node in chain:
        operands = []
        for entry in node.inputs:
            if entry[0] in inside:
                operands.append(len(inputs) + inside[entry[0]])
            else:
                operands.append(taken)
                taken += 1
        assert node.op is not None
        links.append(Link(node.op, node.params, tuple(operands)))
    key = len(inputs), tuple((id(link.op), id(link.params), link.operands) for link in links)
    params = known.get(key)
    if params is None:
        params = known[key] = {"chain": Chain(len(inputs), tuple(links))}
    last = chain[-1]
    controls = dict.fromkeys(moved.get(dep, dep) for node in chain for dep in node.control_deps if dep not in inside)
    return Node(
        ELEMENTWISE,
        last.name,
        attrs={**last.attrs, MEMBERS: ",".join(node.name for node in chain)},
        params=params,
        inputs=all_followed(inputs, moved),
        control_deps=list(controls),
        created_at=last.created_at,
    )


def members(node: Node) -> list[str]:
    """Names of the nodes of a chain, in the order in which they run; none for another node."""
    return node.attrs[MEMBERS].split(",") if node.op is ELEMENTWISE else []


def apart(node: Node, inputs: Sequence[Entry]) -> Node:
    """The last of the nodes that have become this one, reading ``inputs``."""
    chain: Chain = node.params["chain"]
    attrs = {key: text for key, text in node.attrs.items() if key.startswith("__") and key != MEMBERS}
    values = list(inputs)
    for link, name in zip(chain.links, members(node), strict=True):
        own = {one.name: str(link.params[one.name]) for one in link.op.params if one.name in link.params}
        made = Node(
            link.op,
            name,
            attrs={**attrs, **own},
            params=dict(link.params),
            inputs=[values[value] for value in link.operands],
            created_at=node.created_at,
        )
        values.append(Entry(made))
    return made
