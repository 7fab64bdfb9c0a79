"""Offset packing: place buffers with known lifetimes and sizes in one slab, close to the minimum memory."""

from __future__ import annotations

from weftplan.planner.packing.api import pack
from weftplan.planner.packing.check import check_packing
from weftplan.planner.packing.problem import Packing, PackingError
from weftplan.planner.packing.reuse import Precedence, reuse_edges

__all__ = ["Packing", "PackingError", "Precedence", "check_packing", "pack", "reuse_edges"]
