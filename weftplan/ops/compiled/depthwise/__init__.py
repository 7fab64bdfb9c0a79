"""Compiled depthwise convolutions, and the fused block of one between two batch norms."""
