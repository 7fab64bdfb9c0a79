"""The front end of the planner for symbols: from symbols and operators to the core's numbers, and back to nodes.

Only this package knows both symbols and plans; the core imports nothing of it.
"""
