"""Spilling: forward results that wait on the host, in a file or on another device until the backward part needs them.

On devices that have a home, a budget has this choice for each result beside keeping it and computing it again.
:func:`apply` is the step of the pipeline.
"""

from __future__ import annotations

from weftplan.planner.spill.budget import apply, wanted
from weftplan.planner.spill.link import PCIE, Idle, Link, Timetable, timetable
from weftplan.planner.spill.place import Place, host_of, places
from weftplan.planner.spill.rewrite import COPY_BACK, COPY_OUT, Spill, spilled
from weftplan.planner.spill.search import Search, State

__all__ = [
    "COPY_BACK",
    "COPY_OUT",
    "PCIE",
    "Idle",
    "Link",
    "Place",
    "Search",
    "Spill",
    "State",
    "Timetable",
    "apply",
    "host_of",
    "places",
    "spilled",
    "timetable",
    "wanted",
]
