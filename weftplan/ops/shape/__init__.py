"""Operators that rename, slice, concatenate, reorder or broadcast the axes of tensors."""
