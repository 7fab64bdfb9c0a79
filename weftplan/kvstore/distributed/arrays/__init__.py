"""Tools for the arrays of one exchange: views of adjacent arrays, and batched copies and sums of pieces."""
