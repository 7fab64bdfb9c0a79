"""Operators that draw random numbers, and the densities of their distributions."""
