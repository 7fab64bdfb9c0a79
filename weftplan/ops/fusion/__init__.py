"""Fused operators: their NumPy kernels and their rules."""
