"""Stores of several processes, over MPI; ``README.md`` describes the protocol.

Importing this package does not import MPI; creating a store does.
"""
