"""The planned graph of a symbol: steps as operators on nodes, and which entry is whose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weftplan.ops.implementations import Choice
from weftplan.ops.schema import DType, Req, Shape
from weftplan.planner.planned_steps import PlannedSteps
from weftplan.planner.symbolic.indexed_graph import IndexedGraph


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedGraph(PlannedSteps):
    """A graph ready to execute: order, shapes, devices, requests and memory."""

    graph: IndexedGraph
    """Heads: the forward outputs, then one gradient entry per argument in :attr:`gradients`."""
    grad_req: dict[str, Req]
    """Argument name -> NULL, WRITE or ADD; :attr:`gradients` has those that are not NULL."""
    head_grads: list[int]
    """Per output the node id of variable ``_head_grad_<i>``, or -1 when no gradient reads it."""
    arguments: dict[str, int]
    """Argument name -> node id of the variable, in ``list_arguments`` order; -1 when the graph does not use it."""
    aux: dict[str, int]
    """Auxiliary state name -> node id of the variable, in ``list_auxiliary_states`` order."""
    notes: tuple[str, ...] = ()
    """What the planner decided and a user may want to know, in words."""
    kernels: Mapping[int, Choice] = field(default_factory=dict)
    """Node id -> which implementation computes it; nodes that have but one and need no scratch may be absent."""

    @property
    def trains(self) -> bool:
        """True when gradients are computed."""
        return bool(self.gradients)

    def variables(self) -> dict[str, tuple[Shape, DType]]:
        """Shape and dtype of each argument and auxiliary state."""
        rows = {name: self.graph.row[nid] for name, nid in (self.arguments | self.aux).items()}
        return {name: (self.shapes[e], self.dtypes[e]) for name, e in rows.items()}
