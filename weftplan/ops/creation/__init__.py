"""Operators without tensor inputs: constants, ranges and grids."""
