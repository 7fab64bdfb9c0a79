"""The arrays of one exchange: contiguous ranges, copies of pieces, lazy values and cached decisions."""
