"""Plan and rewrite: the plans of one graph under any options, with the order of execution and the graph that they need.

This file decides whether another order is used, and calls recomputation and spilling where a budget or a policy asks
for them. Plans without a budget are kept, since a budget asks for them again.
"""

from __future__ import annotations

from dataclasses import replace

from weftplan.planner import recompute, spill
from weftplan.planner.options import PlanOptions
from weftplan.planner.order import choose_order
from weftplan.planner.program import Program
from weftplan.planner.strategies import Draft, plan_graph


class Drafts:
    """Plans of one graph, which ``program`` has in the order in which it is written."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._plain: dict[PlanOptions, Draft] = {}

    def plan(self, options: PlanOptions, *, cost: recompute.Cost, most_time: float | None = None) -> Draft:
        """The graph with the plan that ``options`` ask for; ``cost`` says what it costs to compute nodes again.

        ``most_time``: in place of a rule's choice, the smallest plan whose repetition takes this part of a step.
        """
        draft = self.plain(options)
        if not recompute.wanted(options, self._program):
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
        found = self._plain.get(asked)
        if found is None:
            found = self._plain[asked] = self._ordered(asked)
        return found

    def _ordered(self, options: PlanOptions) -> Draft:
        program = self._program
        draft = plan_graph(program, options)
        peak = draft.memory.peak
        if not options.reorder or not peak:
            return draft
        better = program.in_order(choose_order(program, options))
        if better is program:
            return draft
        moved = plan_graph(better, options)
        if moved.memory.peak >= peak:
            return draft
        note = f"another order of execution lowers the peak from {peak} to {moved.memory.peak} bytes"
        return replace(moved, notes=(note,))
