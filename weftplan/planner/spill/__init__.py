"""Spilling: forward results that wait on the host, in page-locked memory, until the backward part needs them.

One of the three choices of ``PlanOptions.budget`` for each result, beside keeping it and computing it again; for
devices that copy while they compute, never for hosts. :func:`apply` is the step of the pipeline.
"""

from __future__ import annotations

from weftplan.planner.spill.budget import apply, wanted
from weftplan.planner.spill.link import PCIE, Idle, Link, Timetable, timetable
from weftplan.planner.spill.rewrite import COPY_BACK, COPY_OUT, Spill, host_of, spilled
from weftplan.planner.spill.search import Search, State

__all__ = [
    "COPY_BACK",
    "COPY_OUT",
    "PCIE",
    "Idle",
    "Link",
    "Search",
    "Spill",
    "State",
    "Timetable",
    "apply",
    "host_of",
    "spilled",
    "timetable",
    "wanted",
]
