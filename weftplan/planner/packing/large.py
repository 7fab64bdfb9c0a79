"""Greedy packing of many buffers."""

from __future__ import annotations

from weftplan.planner.packing.greedy import portfolio

__all__ = ["THRESHOLD", "portfolio"]

THRESHOLD = 3000
