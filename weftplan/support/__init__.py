"""Helpers below every layer: atomic files, the user cache, lazy imports, shared cores, BLAS threads."""
