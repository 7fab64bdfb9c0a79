"""A planned graph as the core knows it: steps, what each does with its outputs, and where everything lies.

Front ends add what their callers want to know besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weftplan.device.context import Context
from weftplan.planner.graph import Graph
from weftplan.planner.inplace import Kind
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.strategies import Draft
from weftplan.support.tensor_types import DType, Req, Shape

_NOT_WRITTEN = {Kind.INPLACE: Req.INPLACE, Kind.ADDTO: Req.ADD, Kind.UNUSED: Req.NULL}
_REQUESTS = [_NOT_WRITTEN.get(kind, Req.WRITE) for kind in Kind]
"""By kind of an entry what its kernel has to do with the output."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedSteps:
    """Steps in the order of execution, with their memory: what :func:`weftplan.planner.validate` judges."""

    graph: Graph
    order: list[int]
    """Nodes in execution order, skipped ones included; variables are not in it."""
    num_forward_nodes: int
    """The first ``num_forward_nodes`` steps of :attr:`order` are the forward part and need nothing of the rest."""
    shapes: list[Shape]
    """Per entry."""
    dtypes: list[DType]
    """Per entry."""
    devices: list[Context]
    """Per node."""
    requests: list[Req]
    """Per entry, what its kernel has to do with the output; WRITE for variables, which nobody computes."""
    skipped: frozenset[int]
    """Node ids that must not run: sums whose terms are added in place by whoever makes them."""
    outputs: list[int]
    """Entry ids of the forward outputs."""
    gradients: dict[str, int]
    """Name -> entry id of a result that is written to an array of the caller's."""
    memory: MemoryPlan
    nbytes: Sequence[int] = ()
    """Bytes of each entry; empty: those of its shape and dtype."""
    held: Mapping[int, int] = field(default_factory=dict)
    """As in :class:`~weftplan.planner.program.Program`."""

    def entry_device(self, eid: int) -> Context:
        """Device of an entry: that of the node that makes it."""
        return self.devices[self.graph.entry_node[eid]]


def planned_steps(draft: Draft, outputs: list[int], *, gradients: Mapping[str, tuple[int, Req]]) -> PlannedSteps:
    """A draft as steps, of which the caller reads ``outputs``.

    ``gradients`` are results that are written to arrays of the caller's, by name: their entry, and WRITE or ADD.
    """
    program, found = draft.program, draft.assignment
    requests = [_REQUESTS[kind] for kind in found.kind]
    for eid, request in gradients.values():
        requests[eid] = request
    return PlannedSteps(
        graph=program.graph,
        order=program.order,
        num_forward_nodes=program.num_forward,
        shapes=program.shapes,
        dtypes=program.dtypes,
        nbytes=program.nbytes,
        held=program.held,
        devices=[program.contexts[index] for index in program.device],
        requests=requests,
        skipped=frozenset(found.skipped),
        outputs=outputs,
        gradients={name: eid for name, (eid, _) in gradients.items()},
        memory=draft.memory,
    )
