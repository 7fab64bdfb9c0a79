"""Elementwise operators and their gradients."""
