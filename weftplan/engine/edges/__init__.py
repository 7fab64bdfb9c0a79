"""What happens at the edges: forks, Ctrl-C, and threads that stand in for workers while they wait.

Read this folder last: the engine is complete without it, but for the points at which it calls these parts.
"""
