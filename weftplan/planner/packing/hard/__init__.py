"""Packing of hard instances: greedy packings, and a search with conflict learning by weights.

Ordinary networks never come here.
"""
