"""Compiled convolutions with 3x3 windows, by Winograd's algorithm."""
