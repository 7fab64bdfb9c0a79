"""The front end of the planner for symbols: what its core is told of operators, and nodes of what the core decides.

Only this package knows both symbols and plans; the core imports nothing of it.
"""
