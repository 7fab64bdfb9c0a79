"""Calls of operators on arrays: arguments, what a call resolves to, and the cache of repeated calls."""
