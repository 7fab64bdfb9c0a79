"""Spilling: forward results that wait on the host, in a file or on another device until the backward part needs them.

:func:`apply` is the step of the pipeline.
"""

from __future__ import annotations

from weftplan.planner.spill.budget import apply, wanted

__all__ = ["apply", "wanted"]
