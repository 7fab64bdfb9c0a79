"""The texts of a plan in reports and files: names and sources of its entries, rows of buffers, passes.

A plan refers to its graph through one object of `Labels`, which makes texts only when asked: naming 10^6 entries
would take longer than planning them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import NamedTuple

from weftplan.planner.graph import Graph
from weftplan.support.tensor_types import DType, Shape

CALLER = "(caller)"
"""Last reader of an output of the graph."""
USES = ("activations", "gradients", "scratch", "recomputed", "spilled")
"""Uses of planned memory: results of the forward part, of the backward part, scratch of one operator, forward
results computed again, results that wait on the host or came back from it."""
NOBODY = "(nobody)"
"""Last reader of an entry that is made but never read."""


class Labels:
    """Facts of a plan's graph, for readers. A plan from a file has a subclass, which reads them from there."""

    steps: Sequence[int]
    """Node of each step."""
    shapes: Sequence[Shape]
    dtypes: Sequence[DType]
    makers: Sequence[int]
    """Node that makes each entry."""
    node_names: Sequence[str]

    def __init__(
        self,
        graph: Graph,
        steps: Sequence[int],
        *,
        shapes: Sequence[Shape],
        dtypes: Sequence[DType],
        inplace: Sequence[int],
        skipped: Collection[int],
    ) -> None:
        """``inplace`` and ``skipped`` as in :class:`~weftplan.planner.inplace.Assignment`."""
        self._graph, self.steps, self.shapes, self.dtypes = graph, steps, shapes, dtypes
        self.makers, self.node_names = graph.entry_node, graph.names
        self._inplace, self._skipped = inplace, skipped

    def name(self, eid: int) -> str:
        """Name of an entry."""
        return self._graph.entry_name(eid)

    def node_op(self, nid: int) -> str:
        """Operator of a node; ``variable`` for a variable."""
        return self._graph.works[nid].label

    def source(self, eid: int) -> int:
        """Entry whose memory an in-place or added-to entry takes over; -1 for others."""
        index = self._inplace[eid]
        if index >= 0:
            return self._graph.inputs[self.makers[eid]][index]
        return self._totals.get(eid, -1)

    @cached_property
    def _totals(self) -> dict[int, int]:
        """Added term -> the partial sum that it is added to."""
        inputs = self._graph.inputs
        return {inputs[nid][1]: inputs[nid][0] for nid in self._skipped}


class Pass(NamedTuple):
    """A pass that ran over the network before its memory was planned."""

    name: str
    """Its effect, such as ``equal expressions merged``."""
    changed: str
    """Its changes, in words; empty if it found nothing to change."""
    switch: str
    """The variable that switches it off when it is 0, or the function whose call it was."""

    @property
    def text(self) -> str:
        """One line with its changes and its switch."""
        return f"{self.name}: {self.changed or 'nothing to change'} ({self.switch})"


@dataclass(frozen=True, slots=True)
class Bar:
    """One buffer: an entry with planned memory, or a node's scratch. A rectangle of time and address."""

    name: str
    kind: str
    """Name of its :class:`~weftplan.planner.inplace.Kind` in small letters, or ``workspace``."""
    device: str
    first: int
    """Alive during steps [first, last)."""
    last: int
    address: int
    """Bytes from the start of the device's planned memory, its slabs one after the other."""
    nbytes: int
    shape: Shape
    dtype: str
    """``uint8`` for scratch."""
    op: str
    """Operator that makes it."""
    maker: str
    """Name of the node that makes it."""
    last_reader: str
    """Name of the node that reads it last, :data:`weftplan.planner.labels.CALLER` or
    :data:`weftplan.planner.labels.NOBODY`."""
    storage: int
    use: str
    """Its use: one of :data:`weftplan.planner.labels.USES`."""

    def as_dict(self) -> dict[str, object]:
        """The fields by name, for JSON."""
        return asdict(self)
