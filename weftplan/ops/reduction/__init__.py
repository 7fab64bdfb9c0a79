"""Operators that reduce along axes, order elements or accumulate them."""
