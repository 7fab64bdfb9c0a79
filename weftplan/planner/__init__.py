"""The static memory planner: pure functions from a graph to a memory plan, without arrays or threads.

The README next to this file defines the vocabulary and the invariants and suggests a reading order. All modules are
thread-safe: any thread may call any function, and only ``options.py`` and ``stop_request.py`` keep state. The names
that concern symbols are imported on first use, with symbols and operators; planning a program needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weftplan.planner.drafts import plan_program, plan_within
from weftplan.planner.memory_plan import Bar, MemoryPlan
from weftplan.planner.options import PlanOptions
from weftplan.planner.packing import Packing, PackingProblem, pack, pack_problem
from weftplan.planner.storage_assignment import Kind
from weftplan.planner.validation import validate
from weftplan.support.lazy_import import late_import

if TYPE_CHECKING:
    from weftplan.planner.symbolic.estimate import plan
    from weftplan.planner.symbolic.indexed_graph import IndexedGraph
    from weftplan.planner.symbolic.pipeline import PlannedGraph, SizedGraph, plan_symbol, size_symbol

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

_OWNERS = dict.fromkeys(("PlannedGraph", "SizedGraph", "plan_symbol", "size_symbol"), "pipeline")
_OWNERS |= {"IndexedGraph": "indexed_graph", "plan": "estimate"}
"""Modules of ``planner.symbolic`` that define the names for symbols."""


def __getattr__(name: str) -> object:
    """Import the planner's front end for symbols; return its object of that name."""
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(late_import(f"{__name__}.symbolic.{_OWNERS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
