"""Packing of hard instances: greedy portfolios, gluing, peeling, and a search with conflict learning by weights.

Ordinary networks never come here: sweeps pack them at their lower bound. The rest of the planner sees one function.
"""

from __future__ import annotations

from weftplan.planner.packing.hard.methods import improver

__all__ = ["improver"]
