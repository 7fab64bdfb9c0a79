"""Operators on shapes: reshape, cast, slice, concatenate, split, broadcast, repeat, diagonals, index conversion."""
