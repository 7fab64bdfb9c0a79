"""Kernels in CUDA C: other implementations of operators for GPUs, compiled by CuPy when they are first launched.

A kernel does in one launch what is a chain of CuPy's functions otherwise, adds floats in one fixed order, and never
makes the host wait. Importing ``offered`` offers them (:mod:`weftplan.ops.core.implementations`); nothing of CuPy is
imported.
"""
