"""Optimizer steps as operators: for one weight, several weights, and weights with a float32 copy."""
