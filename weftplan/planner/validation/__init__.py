"""An independent checker of plans, which shares no code with the strategies: see :func:`validate`."""

from __future__ import annotations

from weftplan.planner.validation.replay import validate

__all__ = ["validate"]
