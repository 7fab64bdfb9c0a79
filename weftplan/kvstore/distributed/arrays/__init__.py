"""The arrays of one exchange: contiguous ranges and copies of pieces."""
