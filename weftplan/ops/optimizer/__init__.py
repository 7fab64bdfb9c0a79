"""Optimizer steps as operators, for one weight or several, also with float32 copies of low-precision weights."""
