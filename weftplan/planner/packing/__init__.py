"""Offset packing: place buffers with known lifetimes and sizes in one slab, close to the minimum memory."""

from __future__ import annotations

from weftplan.planner.packing.api import pack, pack_problem
from weftplan.planner.packing.constrained_problem import PackingProblem
from weftplan.planner.packing.packing_check import check_packing, check_problem
from weftplan.planner.packing.problem import Packing, PackingError
from weftplan.planner.packing.reuse import Precedence, reuse_edges

__all__ = [
    "Packing",
    "PackingError",
    "PackingProblem",
    "Precedence",
    "check_packing",
    "check_problem",
    "pack",
    "pack_problem",
    "reuse_edges",
]
