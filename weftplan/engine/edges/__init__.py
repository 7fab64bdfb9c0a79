"""Forks, Ctrl-C, inline execution, and waiting threads that stand in for workers.

Read this folder last: the engine is complete without it, except for the points at which it calls these parts.
"""
