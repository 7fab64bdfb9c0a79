"""Packing of hard instances: greedy portfolios, gluing, peeling, and a search with conflict learning by weights.

Ordinary networks never come here. The rest of the planner calls one function, ``methods.improver``.
"""
