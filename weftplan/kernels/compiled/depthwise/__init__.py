"""Compiled depthwise convolutions, and their fused block with two batch norms."""
