"""Helpers below every layer: atomic files, the user cache, lazy imports, core sharing, BLAS threads."""
