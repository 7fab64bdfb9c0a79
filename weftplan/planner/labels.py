"""Names and sources of the entries and nodes of a plan: what reports and plan files say beyond numbers.

A plan refers to its graph through one object of this class, which makes texts only when asked: naming 10^6 entries
would take longer than planning them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from weftplan.ops.schema import DType, Shape
from weftplan.planner.graph import Graph
from weftplan.planner.inplace import Assignment


class Labels:
    """What a plan knows about its graph. A plan from a file has a subclass, which knows it from there."""

    steps: Sequence[int]
    """Node of each step."""
    shapes: Sequence[Shape]
    dtypes: Sequence[DType]
    makers: Sequence[int]
    """Node that makes each entry."""
    node_names: Sequence[str]

    def __init__(
        self, graph: Graph, steps: list[int], *, shapes: list[Shape], dtypes: list[DType], found: Assignment
    ) -> None:
        self.steps, self.shapes, self.dtypes = steps, shapes, dtypes
        self.makers, self.node_names = graph.entry_node, graph.names
        self._graph = graph
        self._found = found

    def name(self, eid: int) -> str:
        """Name of an entry."""
        return self._graph.entry_name(eid)

    def node_op(self, nid: int) -> str:
        """Operator of a node; ``variable`` for a variable."""
        return self._graph.works[nid].label

    def source(self, eid: int) -> int:
        """Entry whose memory an in-place or added-to entry takes over; -1 for others."""
        index = self._found.inplace[eid]
        if index >= 0:
            return self._graph.inputs[self.makers[eid]][index]
        return self._totals.get(eid, -1)

    @cached_property
    def _totals(self) -> dict[int, int]:
        """Added term -> the partial sum that it is added to."""
        inputs = self._graph.inputs
        return {inputs[nid][1]: inputs[nid][0] for nid in self._found.skipped}
