"""Stores of several processes, over MPI. ``README.md`` tells the protocol; ``sync.py`` has the stores."""
