"""A graph as flat integer arrays: one row per node, one id per entry.

Nodes are numbered by depth-first post-order from the heads (MXNet's order: for each node first its inputs, then its
control dependencies), so every node comes after what it needs. Entry ``k`` of node ``n`` has the id
``row_ptr[n] + k``; hidden outputs have ids too, a variable has one entry.

Nothing here recurses: chains of 10^6 nodes are ordinary input.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weftplan.errors import PlanError
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import depth_first_order, split_variables

IntArray = NDArray[np.int64]


class IndexedGraph:
    """The nodes reachable from ``entries``, numbered; a snapshot that later changes of the nodes do not touch.

    The same facts exist twice: as lists (``inputs``, ``controls``), which Python loops read fastest, and as NumPy
    arrays in compressed-row form (``input_ptr``/``input_entries``) for whole-graph arithmetic.

    Raises:
        PlanError: the graph has a cycle, an entry names an output that its node lacks, or a variable has inputs.
    """

    __slots__ = (
        "controls",
        "entry_node",
        "input_entries",
        "input_ptr",
        "inputs",
        "is_variable",
        "nid",
        "nodes",
        "outputs",
        "row",
        "row_ptr",
    )

    nodes: list[Node]
    nid: dict[Node, int]
    inputs: list[list[int]]
    """Entry ids that each node reads, in input order."""
    controls: list[list[int]]
    """Node ids that each node must follow (one shared empty list where there are none)."""
    row: list[int]
    """``row_ptr`` as a list."""
    row_ptr: IntArray
    input_ptr: IntArray
    input_entries: IntArray
    entry_node: IntArray
    """Node id that makes each entry."""
    is_variable: NDArray[np.bool_]
    outputs: IntArray
    """Entry ids of the heads, in the order given (duplicates kept)."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        heads = list(entries)
        nodes, nid = depth_first_order((entry.node for entry in heads), PlanError)
        counts = np.array([1 if (op := node.op) is None else op.num_outputs(node.params) for node in nodes], np.int64)
        self.nodes = nodes
        self.nid = nid
        self.row_ptr = _pointers(counts)
        self.row = self.row_ptr.tolist()
        self.is_variable = np.array([node.op is None for node in nodes], dtype=np.bool_)
        self.entry_node = np.repeat(np.arange(len(nodes), dtype=np.int64), counts)
        lengths = np.array([len(node.inputs) for node in nodes], dtype=np.int64)
        self.input_ptr = _pointers(lengths)
        owner = np.array([nid[entry[0]] for node in nodes for entry in node.inputs], dtype=np.int64)
        index = np.array([entry[1] for node in nodes for entry in node.inputs], dtype=np.int64)
        bad = np.flatnonzero((index < 0) | (index >= counts[owner]))
        if len(bad):
            reader = nodes[int(np.searchsorted(self.input_ptr, bad[0], side="right")) - 1]
            entry = reader.inputs[int(bad[0] - self.input_ptr[nid[reader]])]
            raise PlanError(_no_such_output(entry, f"node {reader.name!r}"))
        for entry in heads:
            if not 0 <= entry.index < counts[nid[entry.node]]:
                raise PlanError(_no_such_output(entry, "the list of outputs"))
        fed = np.flatnonzero(self.is_variable & (lengths > 0))
        if len(fed):
            raise PlanError(f"variable {nodes[int(fed[0])].name!r} has inputs: a variable holds data, computes nothing")
        self.input_entries = self.row_ptr[owner] + index
        flat = self.input_entries.tolist()
        self.inputs = [flat[a:b] for a, b in pairwise(self.input_ptr.tolist())]
        none: list[int] = []
        self.controls = [[nid[dep] for dep in node.control_deps] if node.control_deps else none for node in nodes]
        self.outputs = np.array([self.row[nid[entry.node]] + entry.index for entry in heads], dtype=np.int64)

    @property
    def num_nodes(self) -> int:
        """Number of nodes, variables included."""
        return len(self.nodes)

    @property
    def num_entries(self) -> int:
        """Number of entries: one per variable, one per output (hidden ones included) of every operator node."""
        return self.row[-1]

    def entry(self, eid: int) -> Entry:
        """The entry whose id is ``eid``."""
        nid = int(self.entry_node[eid])
        return Entry(self.nodes[nid], eid - self.row[nid])

    def entry_name(self, eid: int) -> str:
        """A variable's name, or ``<node>_<output>`` as ``list_outputs`` writes it."""
        node, index, _ = self.entry(eid)
        return node.name if node.op is None else f"{node.name}_{node.op.output_names(node.params)[index]}"

    def variables(self) -> list[int]:
        """Node ids of the variables, in order."""
        return [int(n) for n in np.flatnonzero(self.is_variable)]

    def mutable_variables(self) -> set[int]:
        """Node ids of the variables that some node writes to (auxiliary states)."""
        return {self.nid[node] for node in split_variables(self.nodes)[1]}

    def __repr__(self) -> str:
        return f"<IndexedGraph: {self.num_nodes} nodes, {self.num_entries} entries, {len(self.outputs)} outputs>"


def _pointers(counts: IntArray) -> IntArray:
    """Row starts of a compressed-row table whose rows have these lengths."""
    starts = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def _no_such_output(entry: Entry, where: str) -> str:
    node = entry.node
    return f"{where} refers to output {entry.index} of {node.name!r}, which has {node.num_outputs} output(s)"
