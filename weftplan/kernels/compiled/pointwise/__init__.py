"""Compiled convolutions with 1x1 windows, and their weight gradients."""
