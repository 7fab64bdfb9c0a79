"""Random draws: their keys, their distributions, and how they are pushed."""
