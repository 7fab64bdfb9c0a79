"""MXNet-style threaded dependency engine, static memory planner and kvstore on NumPy and CuPy."""
