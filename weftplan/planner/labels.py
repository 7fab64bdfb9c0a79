"""Names and sources of the entries and nodes of a plan: what reports and plan files say beyond numbers.

A plan refers to its graph through one object of this class, which makes texts only when asked: naming 10^6 entries
would take longer than planning them.
"""

from __future__ import annotations

from functools import cached_property

from weftplan.ops.schema import DType, Shape
from weftplan.planner.graph import Graph
from weftplan.planner.inplace import Assignment


class Labels:
    """What a plan knows about its graph. A plan from a file has a subclass, which knows it from there.

    Attributes:
        steps: node id of each step.
    """

    def __init__(
        self, graph: Graph, steps: list[int], *, shapes: list[Shape], dtypes: list[DType], found: Assignment
    ) -> None:
        self.steps = steps
        self._graph = graph
        self._shapes = shapes
        self._dtypes = dtypes
        self._found = found

    def name(self, eid: int) -> str:
        """Name of an entry."""
        return self._graph.entry_name(eid)

    def shape(self, eid: int) -> Shape:
        """Shape of an entry."""
        return self._shapes[eid]

    def dtype(self, eid: int) -> DType:
        """Dtype of an entry."""
        return self._dtypes[eid]

    def node_name(self, nid: int) -> str:
        """Name of a node."""
        return self._graph.names[nid]

    def node_op(self, nid: int) -> str:
        """Operator of a node; ``variable`` for a variable."""
        return self._graph.works[nid].label

    def maker(self, eid: int) -> int:
        """Node that makes an entry."""
        return int(self._graph.entry_node[eid])

    def source(self, eid: int) -> int:
        """Entry whose memory an in-place or added-to entry takes over; -1 for others."""
        index = self._found.inplace[eid]
        if index >= 0:
            return self._graph.inputs[self.maker(eid)][index]
        return self._totals.get(eid, -1)

    @cached_property
    def _totals(self) -> dict[int, int]:
        """Added term -> the partial sum that it is added to."""
        inputs = self._graph.inputs
        return {inputs[nid][1]: inputs[nid][0] for nid in self._found.skipped}
