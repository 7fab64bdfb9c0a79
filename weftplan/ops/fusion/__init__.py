"""Operators that stand for several nodes of a graph: their NumPy kernels and their rules."""
