"""Graph in, memory plan out: pure functions on symbols, no arrays, no threads."""

from __future__ import annotations

from weftplan.planner.graph import IndexedGraph
from weftplan.planner.options import PlanOptions
from weftplan.planner.packing import Packing, pack
from weftplan.planner.pipeline import plan, plan_symbol
from weftplan.planner.plan import Kind, MemoryPlan, PlannedGraph
from weftplan.planner.validate import validate
from weftplan.symbol.hooks import set_planner

__all__ = [
    "IndexedGraph",
    "Kind",
    "MemoryPlan",
    "Packing",
    "PlanOptions",
    "PlannedGraph",
    "pack",
    "plan",
    "plan_symbol",
    "validate",
]

set_planner(plan)
