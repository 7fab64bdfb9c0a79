"""Fuse elementwise nodes that follow one another, so that no array between them is written.

A node is fused with the one after it when nothing else reads what it makes, when nothing is computed between the two
but nodes of the same chain, and when both are on one host and are recomputed both or neither. So a chain is computed
where its last node was, at a moment when all it reads was there anyway: fusing never needs more memory. It has the name
of its last node, whose output it makes. Small arrays stay in the cache between two nodes anyway, and a graph of them is
bound in less time as it is, so the pass runs when sizes are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from weftplan.device.amounts import counted
from weftplan.ops.core.schema import TensorSpec
from weftplan.ops.fusion import elementwise
from weftplan.ops.fusion.elementwise import ELEMENTWISE, Chain, Link
from weftplan.planner.symbolic.network import Edit, Network, alike
from weftplan.planner.symbolic.passes.graph_pass import FUSION, SIZES, GraphPass, Settings
from weftplan.symbol.node import Entry, Node

MEMBERS = "__members__"
"""The attribute of a chain that names its nodes, in the order in which they run."""
MOST_LINKS = 16
"""Longer chains gain no more: their inputs would leave the registers."""
LEAST = 1 << 14
"""Elements of an array: smaller ones are not worth fusing."""


def fuse_elementwise(network: Network, settings: Settings) -> tuple[Network, str]:
    """Fuse chains of nodes on large arrays of a host."""
    chains = _chains(network)
    if not chains:
        return network, ""
    edit = Edit(network)
    known: dict[object, dict[str, object]] = {}  # equal chains have one dictionary of parameters
    for chain in chains:
        _fuse(edit, chain, known)
    count = sum(map(len, chains)) - len(chains)
    return edit.done(), f"joined {counted(count, 'elementwise node')} with those behind them"


def _is_large(network: Network, nid: int) -> bool:
    graph, shapes, dtypes = network.graph, network.shapes, network.dtypes
    node, row = graph.nodes[nid], graph.row
    if not elementwise.is_elementwise(node.op):
        return False
    if not network.devices[nid].is_host or prod(shapes[row[nid]]) < LEAST:
        return False
    ins = [TensorSpec(shapes[e], dtypes[e]) for e in graph.inputs[nid]]
    outs = [TensorSpec(shapes[e], dtypes[e]) for e in range(row[nid], row[nid + 1])]
    assert node.op is not None
    return elementwise.may_be_link(node.op, node.params, ins, outs)


def _chains(network: Network) -> list[list[int]]:
    """The chains, each in the order in which it runs."""
    graph, devices = network.graph, network.devices
    nodes, makers = graph.nodes, graph.entry_node
    steps = [nid for nid, variable in enumerate(graph.is_variable) if not variable]
    fit = {nid for nid in steps if _is_large(network, nid)}
    if len(fit) < 2:
        return []
    uses = Counter([makers[e] for nid in steps for e in graph.inputs[nid] if makers[e] in fit])
    uses.update(makers[e] for e in graph.outputs if makers[e] in fit)
    begins: dict[int, int] = {}  # last node of a chain -> place of its first
    for place, nid in enumerate(steps):
        if nid not in fit:
            continue
        begin = place
        before = {makers[e] for e in graph.inputs[nid]}
        while begin:
            other = steps[begin - 1]
            if other not in before or other not in fit or uses[other] != 1:
                break
            if devices[other] != devices[nid] or not alike(nodes[other], nodes[nid]):
                break
            if place - begins[other] >= MOST_LINKS:
                break
            begin = begins[other]
        begins[nid] = begin
    found = []
    place = len(steps) - 1
    while place >= 0:
        begin = begins.get(steps[place], place)
        if begin < place:
            found.append(steps[begin : place + 1])
        place = begin - 1
    return found


def _fuse(edit: Edit, chain: Sequence[int], known: dict[object, dict[str, object]]) -> None:
    graph = edit.network.graph
    makers, row, nodes = graph.entry_node, graph.row, graph.nodes
    inside = {nid: k for k, nid in enumerate(chain)}
    inputs = [e for nid in chain for e in graph.inputs[nid] if makers[e] not in inside]
    links, taken = [], 0
    for nid in chain:
        operands = []
        for e in graph.inputs[nid]:
            if makers[e] in inside:
                operands.append(len(inputs) + inside[makers[e]])
            else:
                operands.append(taken)
                taken += 1
        op = nodes[nid].op
        assert op is not None
        links.append(Link(op, nodes[nid].params, tuple(operands)))
    key = len(inputs), tuple((id(link.op), id(link.params), link.operands) for link in links)
    params = known.get(key)
    if params is None:
        params = known[key] = {"chain": Chain(len(inputs), tuple(links))}
    last = chain[-1]
    made = edit.add(
        ELEMENTWISE,
        nodes[last].name,
        inputs=inputs,
        main=last,
        params=params,
        attrs={**nodes[last].attrs, MEMBERS: ",".join(nodes[nid].name for nid in chain)},
        controls=[dep for nid in chain for dep in graph.controls[nid] if dep not in inside],
        like=[row[last]],
    )
    edit.fuse(chain, {row[last]: made})


def members(node: Node) -> list[str]:
    """Return the names of the nodes of a chain whose results it does not make."""
    return node.attrs[MEMBERS].split(",")[:-1]


def unfuse(node: Node, inputs: Sequence[Entry]) -> list[Entry]:
    """Return the result of the last of the nodes that have become this one."""
    chain: Chain = node.params["chain"]
    attrs = {key: text for key, text in node.attrs.items() if key.startswith("__") and key != MEMBERS}
    values = list(inputs)
    for link, name in zip(chain.links, node.attrs[MEMBERS].split(","), strict=True):
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
    return values[-1:]


PASS = GraphPass(
    name="chains joined",
    switch=FUSION,
    enabled=lambda settings: settings.fuses,
    run=fuse_elementwise,
    needs=frozenset((SIZES,)),
    fused=(ELEMENTWISE,),
    unfuse=unfuse,
    members=members,
)
