"""The planner's front end for symbols: translate symbols to the core's graphs, and planned graphs back to nodes.

Only this package knows both symbols and plans; the core does not import it.
"""
