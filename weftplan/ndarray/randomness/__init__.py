"""Random draws: their keys, their distributions, and their operations."""
