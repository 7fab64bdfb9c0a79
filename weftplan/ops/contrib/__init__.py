"""Operators that few networks use, imported like all others when one of their names is asked for."""
