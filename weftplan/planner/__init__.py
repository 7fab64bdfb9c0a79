"""The static memory planner: pure functions from a graph to a memory plan, without arrays or threads.

The README next to this file defines the vocabulary and the invariants and suggests a reading order. All modules are
thread-safe: any thread may call any function, and only ``options.py`` and ``stopping.py`` keep state. Importing the
package adds the method ``plan`` to symbols.
"""

from __future__ import annotations

from weftplan.planner.drafts import plan_program, plan_within
from weftplan.planner.memory_plan import Bar, MemoryPlan
from weftplan.planner.options import PlanOptions
from weftplan.planner.packing import Packing, PackingProblem, pack, pack_problem
from weftplan.planner.storage_assignment import Kind
from weftplan.planner.symbolic.estimate import plan
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.pipeline import PlannedGraph, SizedGraph, plan_symbol, size_symbol
from weftplan.planner.validation import validate
from weftplan.support import slots

__all__ = [
    "Bar",
    "IndexedGraph",
    "Kind",
    "MemoryPlan",
    "Packing",
    "PackingProblem",
    "PlanOptions",
    "PlannedGraph",
    "SizedGraph",
    "pack",
    "pack_problem",
    "plan",
    "plan_program",
    "plan_symbol",
    "plan_within",
    "size_symbol",
    "validate",
]

slots.PLAN_SYMBOL.fill(plan)


def __dir__() -> list[str]:
    return sorted(__all__)
