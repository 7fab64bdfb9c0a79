"""Fuse trees of elementwise nodes on GPUs, including biases, the last step of batch norms, and relus.

Each group becomes one node, whose kernel ``kernels/cuda/pointwise.py`` generates. The kernel reads every input once and
writes only the results that other nodes read. Results are bitwise equal, because the operations on an element and their
order do not change. A node joins the group of a node whose result it reads if

1. both compute elements of one shape and one float dtype on one GPU, from formulas that can be recorded, both belong to
   the forward part or both to the backward part, and `alike` holds;
2. every other reader of the group's results runs after the last member, so that the group can run at its position;
3. the inputs that stay alive until then have at most the bytes of the results that are no longer stored.

The bias of a layer and the last step of a batch norm (from statistics to values) are split off if a group reads them.
The pass runs last, when all shapes are known, and only if kernels are generated.
"""

from __future__ import annotations

from dataclasses import dataclass

from weftplan.device.amounts import counted
from weftplan.ops.core.implementations import MAX_OPERATIONS
from weftplan.ops.fusion.pointwise import POINTWISE
from weftplan.planner.symbolic.network import Edit, Network, alike
from weftplan.planner.symbolic.passes.elementwise_node import (
    PLAIN,
    ElementwiseNodes,
    FusedNode,
    members,
    unfuse,
)
from weftplan.planner.symbolic.passes.graph_pass import FUSION, GRADIENTS, SIZES, GraphPass, PassSettings

_MAX_MEMBERS = 48


@dataclass
class _Tree:
    """A group of nodes to fuse."""

    nodes: list[int]
    """Members in ascending order; the group runs at the position of the last."""

    def __post_init__(self) -> None:
        self.final, self.members = self.nodes[-1], frozenset(self.nodes)


def fuse_pointwise(network: Network, settings: PassSettings) -> tuple[Network, str]:
    """Fuse all trees that meet the conditions in this module's docstring."""
    around = ElementwiseNodes(network, settings)
    trees = [tree for tree in _trees(around) if _is_worth_it(around, tree)]
    if not trees:
        return network, ""
    edit, count = Edit(network), sum(len(tree.nodes) for tree in trees)
    for tree in trees:
        FusedNode(around, tree.nodes).replace(edit)
    return edit.finish(), f"fused {counted(count, 'elementwise node')} into {len(trees):,}"


def _trees(around: ElementwiseNodes) -> list[_Tree]:
    """Return all groups, grown greedily in node order."""
    graph, kinds = around.graph, around.kinds
    tree_of: dict[int, _Tree] = {}
    for nid, kind in enumerate(kinds):
        if not kind:
            continue
        tree = tree_of[nid] = _Tree([nid])
        if kind != PLAIN:  # a bias or a batch norm can only begin a group
            continue
        for entry in dict.fromkeys(graph.inputs[nid]):
            earlier = tree_of.get(graph.entry_node[entry])
            # A group computes only the first output of a layer or a batch norm.
            if earlier is None or earlier is tree:
                continue
            maker = graph.entry_node[entry]
            if kinds[maker] != PLAIN and entry != around.main(maker):
                continue
            joined = _Tree(sorted((*earlier.nodes, *tree.nodes)))
            if _may_join(around, earlier, tree, joined):
                tree = joined
                tree_of.update(dict.fromkeys(joined.nodes, joined))
    return list({id(tree): tree for tree in tree_of.values()}.values())


def _may_join(around: ElementwiseNodes, earlier: _Tree, tree: _Tree, joined: _Tree) -> bool:
    """Return whether ``earlier`` may join ``tree`` and run at its position; ``joined`` is their union."""
    graph, network = around.graph, around.network
    a, b = earlier.final, tree.final
    if sum(around.costs.get(nid, 0) for nid in joined.nodes) > MAX_OPERATIONS // 2:
        return False
    if len(joined.nodes) > _MAX_MEMBERS or not alike(graph.nodes[a], graph.nodes[b]):
        return False
    if network.devices[a] != network.devices[b] or (a < around.num_forward) != (b < around.num_forward):
        return False
    earlier_main, later_main = around.main(a), around.main(b)
    if (
        network.shapes[earlier_main] != network.shapes[later_main]
        or network.dtypes[earlier_main] != network.dtypes[later_main]
    ):
        return False
    # The first part of a layer or a batch norm keeps its position, so only plain members move.
    moved = {nid for nid in joined.nodes if around.kinds[nid] == PLAIN}
    for nid in joined.nodes:
        later = [reader for entry in around.computed(nid) for reader in around.readers.get(entry, ())]
        if nid in moved:
            later += around.waiting.get(nid, ())
        if any(reader <= b and reader not in moved for reader in later):
            return False
    return _keeps_memory(around, earlier, joined)


def _keeps_memory(around: ElementwiseNodes, earlier: _Tree, joined: _Tree) -> bool:
    """Return whether fusion keeps at most as many bytes alive between ``earlier`` and the end of ``joined``.

    Without fusion the results of ``earlier`` are alive there; with fusion, its inputs that would otherwise be dead.
    """
    graph, final = around.graph, joined.final
    inside = sum(nid > earlier.final for nid in joined.members)
    if around.work_until[final + 1] - around.work_until[earlier.final + 1] == inside:  # no other node runs in between
        return True
    saved = sum(
        around.nbytes(entry)
        for nid in earlier.nodes
        for entry in around.computed(nid)
        if entry in around.heads or any(reader not in earlier.members for reader in around.readers.get(entry, ()))
    )
    held: set[int] = set()
    for nid in earlier.nodes:
        for entry in around.long_lived(nid):
            maker = graph.entry_node[entry]
            if maker in earlier.members and around.kinds[maker] == PLAIN:
                continue
            if graph.is_variable[maker] or entry in around.heads:
                continue
            if all(reader < final for reader in around.readers.get(entry, ())):
                held.add(entry)
    return sum(map(around.nbytes, held)) <= saved


def _is_worth_it(around: ElementwiseNodes, tree: _Tree) -> bool:
    """Return whether a group saves a kernel launch or a pass over its data."""
    plain = [nid for nid in tree.nodes if around.kinds[nid] == PLAIN]
    return bool(plain) and (len(tree.nodes) > 1 or around.costs[plain[0]] > 1)


PASS: GraphPass = GraphPass(
    name="elementwise nodes fused",
    switch=FUSION,
    enabled=PassSettings.fuses_on_gpus,
    run=fuse_pointwise,
    needs=frozenset((GRADIENTS, SIZES)),
    fused=(POINTWISE,),
    unfuse=unfuse,
    members=members,
)
