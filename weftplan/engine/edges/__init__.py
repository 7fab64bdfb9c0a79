"""What happens at the edges: forks, Ctrl-C, and threads that stand in for workers while they wait.

Read last: the engine is complete without, but for the points at which these parts are called.
"""
