"""Depthwise convolutions of a sized graph fused with the batch norms around them, if a kernel computes them as one.

Nothing is kept; any thread may call this.
"""

from __future__ import annotations

from dataclasses import replace

from weftplan.errors import PlanError
from weftplan.ops.core.implementations import choose
from weftplan.ops.core.schema import DType, Shape, TensorSpec
from weftplan.ops.fusion.depthwise_block import BLOCK
from weftplan.planner.symbolic.differentiate import Differentiated
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.passes.fuse_depthwise import Block, with_blocks
from weftplan.planner.symbolic.passes.report import depthwise_blocks
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import depth_first_order


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
