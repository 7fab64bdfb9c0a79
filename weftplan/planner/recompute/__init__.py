"""Recomputation of forward results in the backward part, which saves keeping them.

:func:`apply` is the pass that the pipeline runs.
"""

from __future__ import annotations

from weftplan.planner.recompute.ladder import curve, undominated
from weftplan.planner.recompute.recompute_choice import Cost, apply, gain, nothing_fits
from weftplan.planner.recompute.segments import block_sets
from weftplan.planner.recompute.tape import Price, Tape
from weftplan.planner.rewiring import repeat

__all__ = [
    "Cost",
    "Price",
    "Tape",
    "apply",
    "block_sets",
    "curve",
    "gain",
    "nothing_fits",
    "repeat",
    "undominated",
]
