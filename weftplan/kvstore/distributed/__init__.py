"""Stores of several processes, over MPI. ``README.md`` tells the protocol; ``sync.py`` has the stores.

Importing the package imports no MPI: that happens when a store is made.
"""
