"""A graph with its plan, as one step of the pipeline hands it to the next."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weftplan.planner.inplace import Assignment
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import Program
from weftplan.planner.strategies import plan_memory


@dataclass(frozen=True, slots=True)
class Draft:
    """A graph in execution order, its plan, and what was decided.

    Attributes:
        program: the graph with sizes.
        num_forward: how many steps of its order are the forward part; the others are the backward part.
        memory: the plan.
        assignment: which entries share a storage.
        notes: what was decided, in words.
    """

    program: Program
    num_forward: int
    memory: MemoryPlan
    assignment: Assignment
    notes: tuple[str, ...] = ()

    def slowed(self, more_time: float) -> Draft:
        """The same, whose plan says by what share of a step it takes longer."""
        return replace(self, memory=replace(self.memory, more_time=more_time))


def plan_graph(program: Program, num_forward: int, options: PlanOptions) -> Draft:
    """The graph with the plan that ``options`` give it."""
    return Draft(program, num_forward, *plan_memory(program, options))
