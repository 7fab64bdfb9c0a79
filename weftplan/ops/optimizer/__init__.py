"""Optimizer steps as operators: one weight, several weights, and weights with a float32 copy."""
