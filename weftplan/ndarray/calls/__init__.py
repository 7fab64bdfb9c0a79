"""Operator calls on arrays: argument parsing, call resolution, and the call cache."""
