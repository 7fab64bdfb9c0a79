"""Compiled pooling."""
