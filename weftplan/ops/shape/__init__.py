"""Operators that rename, cut, join, reorder or broadcast the axes of tensors."""
