"""Packing of hard instances: greedy portfolios, gluing, peeling, and a search with conflict learning by weights.

Ordinary networks never come here: sweeps pack them at their lower bound. The rest of the planner calls one function,
``methods.improver``.
"""
