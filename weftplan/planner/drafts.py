"""Planning of one graph under any options, including the execution order, recomputation and spilling.

This module chooses the execution order, and runs recomputation and spilling if a budget or a policy asks for them.
Plans without a budget are cached, because planning under a budget starts from them. :func:`plan_program` is the entry
point for front ends that have a program but no symbol. :func:`plan_within` fits all memory into a budget. In contrast,
``PlanOptions.budget`` limits only the planned peak: recomputation cannot change the arguments, gradients and states
that share the device.
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
from weftplan.planner.choose_order import choose_order
from weftplan.planner.liveness import check_overwrites
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import Graph, Program
from weftplan.planner.program_checks import check_kinds, check_seconds
from weftplan.planner.spill import budget as spill
from weftplan.planner.storage_assignment import Kind
from weftplan.planner.strategies import Draft, plan_graph
from weftplan.support.tensor_types import DType, Req, Shape

_NOT_WRITTEN = {Kind.INPLACE: Req.INPLACE, Kind.ADDTO: Req.ADD, Kind.UNUSED: Req.NULL}
_REQUESTS = [_NOT_WRITTEN.get(kind, Req.WRITE) for kind in Kind]
"""Write mode of an output, indexed by :class:`Kind`."""


WORTH_WAITS = 0.995
"""Maximum peak, relative to that of the given order, of an order that adds waits."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedSteps:
    """A graph in execution order with its memory plan, as :func:`weftplan.planner.validate` checks it."""

    graph: Graph
    order: list[int]
    """Nodes in execution order, skipped ones included; variables are not in it."""
    num_forward_nodes: int
    """Number of leading steps of :attr:`order` that are the forward part; they depend on no later step."""
    shapes: list[Shape]
    """Shape of each entry."""
    dtypes: list[DType]
    """Dtype of each entry."""
    devices: list[Context]
    """Device of each node."""
    requests: list[Req]
    """Write mode of each entry; WRITE for variables, which no kernel computes."""
    skipped: frozenset[int]
    """Node ids that must not run: sums whose terms are added in place by their makers."""
    outputs: list[int]
    """Entry ids of the forward outputs."""
    gradients: dict[str, int]
    """Name -> entry id of a result that is written to an array of the caller."""
    memory: MemoryPlan
    nbytes: Sequence[int] = ()
    """Bytes of each entry; if empty, they follow from shape and dtype."""
    held: Mapping[int, int] = field(default_factory=dict)
    """Held entries, as :attr:`Program.held <weftplan.planner.program.Program.held>`."""

    def entry_device(self, eid: int) -> Context:
        """Return the device of the node that makes an entry."""
        return self.devices[self.graph.entry_node[eid]]


def plan_program(
    program: Program, options: PlanOptions | None = None, *, seconds: Sequence[float] = ()
) -> PlannedSteps:
    """Plan a program of any front end.

    Graph outputs that are gradients become :attr:`PlannedSteps.gradients`, under their names in the graph; the others
    become :attr:`PlannedSteps.outputs`.

    Args:
        program: the graph in execution order.
        options: the options; by default the defaults of :class:`PlanOptions`.
        seconds: seconds of each node, which a budget needs; by default all operators take equally long.

    Raises:
        PlanError: there is not one finite, non-negative number of seconds per node, or a step reads a result that
            another step has overwritten.
        BudgetError: no plan fits the budget; the message names the smallest budget found that works.
    """
    check_kinds("plan_program", Sequence, seconds=seconds)
    usual = list(seconds) or [0.0 if is_variable else 1.0 for is_variable in program.graph.is_variable]
    check_seconds(usual, nodes=program.graph.num_nodes)
    check_overwrites(program)

    def cost(rewritten: Program) -> list[float]:
        return [usual[origin] if origin >= 0 else 0.0 for origin in rewritten.graph.origin]

    draft = Drafts(program).plan(PlanOptions() if options is None else options, cost=cost)
    graph, written = draft.program.graph, draft.program.gradients
    gradients = {graph.entry_name(e): e for e in graph.outputs if e in written}
    return planned_steps(draft, [e for e in graph.outputs if e not in written], gradients=gradients)


def planned_steps(draft: Draft, outputs: list[int], *, gradients: dict[str, int]) -> PlannedSteps:
    """Return a draft as planned steps, with the entries of the caller's ``outputs`` and ``gradients``."""
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
    """A planner of one graph that caches plans; ``program`` is in the front end's order."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._plain: dict[PlanOptions, Draft] = {}

    def plan(self, options: PlanOptions, *, cost: recompute.Cost, max_time: float | None = None) -> Draft:
        """Plan the graph under ``options``, with recomputation and spilling.

        Args:
            options: the options.
            cost: returns the seconds of each node.
            max_time: replaces the recomputation policy by the smallest plan that spends at most this share of a step
                on recomputation.
        """
        draft = self.plain(options)
        saves_memory = options.recompute != "off" or options.budget is not None
        if not saves_memory and not any(map(attrgetter("asked_twice"), self._program.graph.works)):
            return draft
        start = replace(draft, notes=())
        if spill.can_spill(options, draft):
            fitted = spill.apply(start, options, cost=cost)
        else:
            fitted = recompute.apply(start, options, cost=cost, max_time=max_time)
        return replace(fitted, notes=(*draft.notes, *fitted.notes))

    def plain(self, options: PlanOptions) -> Draft:
        """Plan the graph without recomputation and budget; cached, because planning under a budget starts from it."""
        unrestricted = options.replace(recompute="off", budget=None)
        draft = self._plain.get(unrestricted)
        if draft is None:
            program = self._program
            draft = plan_graph(program, unrestricted)
            peak = draft.memory.peak
            if unrestricted.reorder and unrestricted.compat == "none" and peak > 0:
                chosen = choose_order(program, unrestricted)
                moved = (
                    plan_graph(program.in_order(chosen.nodes), unrestricted) if chosen.nodes != program.order else draft
                )
                if _is_better(moved.memory, draft.memory):
                    proof = ", and no order has a lower bound" if chosen.proved else ""
                    note = f"another order of execution lowers the peak from {peak} to {moved.memory.peak} bytes{proof}"
                    draft = replace(moved, notes=(note,))
            self._plain[unrestricted] = draft
        return draft


def _is_better(moved: MemoryPlan, original: MemoryPlan) -> bool:
    """Return whether a plan in another order is better than the plan in the front end's order.

    It has a lower peak. A gain of less than 0.5 % must not add waits, which would cost more time than it is worth.
    """
    more_waits = (moved.num_added_waits or 0) > (original.num_added_waits or 0)
    return moved.peak < (WORTH_WAITS * original.peak if more_waits else original.peak)


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
        make: plans the graph under its options.
        options: the options; this function overrides ``recompute`` and ``budget``.
        budget: bytes for all devices together: planned peak without offloaded bytes, arguments, gradients, states.
        besides: returns further bytes that the budget must cover.

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
