"""Plan and rewrite: the plans of one graph under any options, with the order of execution and the graph that they need.

This file decides whether another order is used, and calls recomputation and spilling if a budget or a policy asks for
them. Plans without a budget are cached, since a budget asks for them again. :func:`plan_program` is the door for front
ends that have a program and no symbol. :func:`plan_within` fits everything into a number of bytes:
``PlanOptions.budget`` limits the planned peak alone, because recomputation can change nothing else, while arguments,
gradients and states share the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TypeVar

from weftplan.device.amounts import pasteable
from weftplan.device.context import Context
from weftplan.errors import BudgetError
from weftplan.planner import recompute
from weftplan.planner.inplace import Kind
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.options import PlanOptions
from weftplan.planner.order import choose_order
from weftplan.planner.program import Graph, Program
from weftplan.planner.spill import budget as spill
from weftplan.planner.strategies import Draft, plan_graph
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
    """Per entry, how its kernel writes the output; WRITE for variables, which no kernel computes."""
    skipped: frozenset[int]
    """Node ids that must not run: sums whose terms are added in place by their makers."""
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


def plan_program(
    program: Program, options: PlanOptions | None = None, *, seconds: Sequence[float] = ()
) -> PlannedSteps:
    """Plan a program of any front end.

    Outputs of its graph that are gradients are written to arrays of the caller's, under their names in the graph; the
    caller reads the others.

    Args:
        options: how to plan; by default the defaults of :class:`PlanOptions`.
        seconds: how long each node takes, for a budget; by default all take equally long.

    Raises:
        BudgetError: nothing fits the budget; names the smallest that works.
    """
    usual = list(seconds) or [0.0 if is_variable else 1.0 for is_variable in program.graph.is_variable]

    def cost(rewritten: Program) -> list[float]:
        return [usual[origin] if origin >= 0 else 0.0 for origin in rewritten.graph.origin]

    draft = Drafts(program).plan(PlanOptions() if options is None else options, cost=cost)
    graph, written = draft.program.graph, draft.program.gradients
    gradients = {graph.entry_name(e): e for e in graph.outputs if e in written}
    return planned_steps(draft, [e for e in graph.outputs if e not in written], gradients=gradients)


def planned_steps(draft: Draft, outputs: list[int], *, gradients: dict[str, int]) -> PlannedSteps:
    """Return a draft as steps; the caller reads ``outputs`` and gets ``gradients``, by name, in arrays of its own."""
    program, assignment = draft.program, draft.assignment
    requests = [_REQUESTS[kind] for kind in assignment.kind]
    for eid in gradients.values():
        requests[eid] = Req.ADD if eid in program.added else Req.WRITE
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
        skipped=frozenset(assignment.skipped),
        outputs=outputs,
        gradients=gradients,
        memory=draft.memory,
    )


class Drafts:
    """Plans of one graph; ``program`` has it in the order of its front end."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._plain: dict[PlanOptions, Draft] = {}

    def plan(self, options: PlanOptions, *, cost: recompute.Cost, most_time: float | None = None) -> Draft:
        """The graph with the plan that ``options`` ask for; ``cost`` gives the seconds of nodes.

        ``most_time``: in place of a rule's choice, the smallest plan whose repetition takes this part of a step.
        """
        draft = self.plain(options)
        asked = options.recompute != "off" or options.budget is not None
        if not asked and not any(map(attrgetter("asked_twice"), self._program.graph.works)):
            return draft
        start = replace(draft, notes=())
        if spill.wanted(options, draft):
            fitted = spill.apply(start, options, cost=cost)
        else:
            fitted = recompute.apply(start, options, cost=cost, most_time=most_time)
        return replace(fitted, notes=(*draft.notes, *fitted.notes))

    def plain(self, options: PlanOptions) -> Draft:
        """The plan without recomputation and budget; kept, since a budget asks for it again."""
        asked = options.replace(recompute="off", budget=None)
        draft = self._plain.get(asked)
        if draft is None:
            program = self._program
            draft = plan_graph(program, asked)
            peak = draft.memory.peak
            better = program.in_order(choose_order(program, asked)) if asked.reorder and peak else program
            moved = draft if better is program else plan_graph(better, asked)
            if moved.memory.peak < peak:
                note = f"another order of execution lowers the peak from {peak} to {moved.memory.peak} bytes"
                draft = replace(moved, notes=(note,))
            self._plain[asked] = draft
        return draft


Planned = TypeVar("Planned", bound=PlannedSteps)


def plan_within(
    make: Callable[[PlanOptions], Planned],
    options: PlanOptions,
    *,
    budget: int,
    besides: Callable[[Planned], int] = lambda planned: 0,
) -> Planned:
    """Return the plan of least modelled time whose total, without offloaded bytes, is at most ``budget``.

    Args:
        make: plans the graph under the options that it is called with.
        options: the options; this function overrides ``recompute`` and ``budget``.
        budget: bytes for all devices together: planned peak without offloaded bytes, arguments, gradients, states.
        besides: further bytes that the budget has to cover.

    Raises:
        BudgetError: no plan fits; the message and ``smallest`` give the smallest budget that works.
    """
    plain = make(options.replace(recompute="off", budget=None))
    outside = sum(plain.memory.external_bytes.values()) + besides(plain)
    if plain.memory.peak + outside <= budget:
        return plain
    try:
        tight = make(options.replace(recompute="off", budget=max(budget - outside, 0)))
    except BudgetError as error:
        peak = plain.memory.peak if error.smallest is None else error.smallest
    else:
        if budget >= outside:
            return tight
        peak = tight.memory.peak - tight.memory.offloaded  # 0: no memory is planned, or all of it is offloaded
    raise BudgetError(
        f"the budget is {budget:,} bytes, but {outside:,} bytes of arguments, gradients and states and a planned peak "
        f"of {peak:,} bytes (of {plain.memory.peak:,} without recomputation) are needed; the smallest budget found "
        f"that works is {pasteable(outside + peak)}: raise it to that, or use a smaller batch",
        smallest=outside + peak,
    ) from None
