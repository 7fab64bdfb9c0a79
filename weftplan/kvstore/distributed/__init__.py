"""Stores of several processes, over MPI. ``README.md`` has the protocol, ``sync.py`` the stores.

Importing the package imports no MPI: that happens when a store is made.
"""
