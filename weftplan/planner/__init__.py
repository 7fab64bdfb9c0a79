"""Graph in, memory plan out: pure functions on symbols, no arrays, no threads."""

from __future__ import annotations

from weftplan.planner.graph import IndexedGraph
from weftplan.planner.options import PlanOptions
from weftplan.planner.pipeline import plan_symbol
from weftplan.planner.plan import Kind, MemoryPlan, PlannedGraph
from weftplan.planner.validate import validate

__all__ = ["IndexedGraph", "Kind", "MemoryPlan", "PlanOptions", "PlannedGraph", "plan_symbol", "validate"]
