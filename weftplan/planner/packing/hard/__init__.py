"""Packing of hard instances: greedy packings, then a search that weights sections by their refutations.

Ordinary networks do not need it.
"""
