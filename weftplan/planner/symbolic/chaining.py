"""Which nodes of a sized graph become one: elementwise ones on a host whose arrays are worth it, and depthwise
convolutions with the batch norms around them, where a kernel takes them as one.

Small elementwise arrays stay in the cache between two nodes anyway, and a graph of them is bound in less time as it is.
Nothing is kept; any thread may call this.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from weftplan.errors import PlanError
from weftplan.ops.core.implementations import choose
from weftplan.ops.core.schema import DType, Shape, TensorSpec
from weftplan.ops.fusion import elementwise as chains
from weftplan.ops.fusion.depthwise_block import BLOCK
from weftplan.planner.symbolic.differentiate import Differentiated
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.passes.fuse_depthwise import Block, with_blocks
from weftplan.planner.symbolic.passes.fuse_elementwise import chained
from weftplan.planner.symbolic.passes.fuse_relu import alike
from weftplan.planner.symbolic.passes.report import depthwise_blocks, joined_chains
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import depth_first_order

LEAST = 1 << 14
"""Elements of an array: smaller ones are not worth joining."""


def with_chains(
    found: Differentiated, *, shapes: list[Shape], dtypes: list[DType]
) -> tuple[Differentiated, list[Shape], list[DType]]:
    """The same with such nodes joined, and shapes and dtypes of its entries; what is given where there are none."""
    graph, devices = found.graph, found.devices
    nid, row = graph.nid, graph.row

    def is_large(node: Node) -> bool:
        if not chains.is_elementwise(node.op):
            return False
        number = nid[node]
        if not devices[number].is_host or prod(shapes[row[number]]) < LEAST:
            return False
        ins = [TensorSpec(shapes[e], dtypes[e]) for e in graph.inputs[number]]
        outs = [TensorSpec(shapes[e], dtypes[e]) for e in range(row[number], row[number + 1])]
        assert node.op is not None
        return chains.may_be_link(node.op, node.params, ins, outs)

    entries, moved = chained(
        graph.entries,
        graph.nodes,
        is_large,
        lambda a, b: devices[nid[a]] == devices[nid[b]] and alike(a, b),
        found.given,
    )
    if not moved:
        found.passes.append(joined_chains(0))
        return found, shapes, dtypes
    made = {new: [row[nid[old]]] for old, new in moved.items() if new.op is chains.ELEMENTWISE}  # of the last node
    copies = {new: old for old, new in moved.items() if new not in made}
    found.passes.append(joined_chains(sum(new in made for new in moved.values()) - len(made)))
    return _with(found, entries, copies, made, shapes=shapes, dtypes=dtypes)


def with_depthwise_blocks(
    found: Differentiated, *, shapes: list[Shape], dtypes: list[DType], mode: str
) -> tuple[Differentiated, list[Shape], list[DType]]:
    """The same with such blocks joined that have a kernel of their own under ``mode`` (:attr:`PlanOptions.kernels`),
    and shapes and dtypes of its entries."""
    graph, devices = found.graph, found.devices
    nid, row = graph.nid, graph.row

    def specs(node: Node) -> tuple[list[TensorSpec], list[TensorSpec]]:
        number = nid[node]
        return (
            [TensorSpec(shapes[e], dtypes[e]) for e in graph.inputs[number]],
            [TensorSpec(shapes[e], dtypes[e]) for e in range(row[number], row[number + 1])],
        )

    def fits(block: Block) -> bool:
        nodes = (*block.forward, *block.backward)
        where = {devices[nid[node]] for node in nodes}
        if len(where) > 1 or not where.pop().is_host:
            return False
        before, layer, behind = map(specs, block.forward)
        ins = [*before[0], layer[0][1], *behind[0][1:]]
        outs = [behind[1][0], layer[1][0], *before[1][1:], *behind[1][1:]]
        return choose(BLOCK, block.params, ins, outs, mode).implementation.name != "numpy"

    blocks = with_blocks(graph.entries, graph.nodes, fits, found.given)
    found.passes.append(depthwise_blocks(blocks.count))
    if not blocks.count:
        return found, shapes, dtypes
    made = {node: [row[nid[old]] + index for old, index in keys] for node, keys in blocks.made.items()}
    return _with(found, blocks.entries, blocks.copies, made, shapes=shapes, dtypes=dtypes)


def _with(
    found: Differentiated, entries: list[Entry], copies: dict[Node, Node], made: dict[Node, list[int]], *,
    shapes: list[Shape], dtypes: list[DType],
) -> tuple[Differentiated, list[Shape], list[DType]]:  # fmt: skip
    """What is known of the graph of ``entries`` in the place of another one.

    Args:
        copies: the given node of each that was made again.
        made: of each node that stands for several, the given entries like its outputs.
    """
    base = found.graph
    order = depth_first_order((entry[0] for entry in entries), PlanError)
    numbers = [base.nid.get(copies.get(node, node), -1) for node in order[0]]
    graph = IndexedGraph(entries, order, like=(base, numbers))
    kept: list[int] = []
    for place, number in enumerate(numbers):
        if number < 0:
            like = made[graph.nodes[place]]
            kept += like
            numbers[place] = base.entry_node[like[0]]
        else:
            kept += range(base.row[number], base.row[number + 1])
    remade = replace(
        found,
        graph=graph,
        devices=[found.devices[number] for number in numbers],
        joined=found.joined + len(base.nodes) - len(graph.nodes),
    )
    return remade, [shapes[e] for e in kept], [dtypes[e] for e in kept]
