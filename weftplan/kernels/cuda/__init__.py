"""Kernels in CUDA C: implementations of operators for GPUs, which CuPy compiles at their first launch.

Most kernels replace a chain of CuPy functions by one launch. They add floats in a fixed order and never make the host
wait. Importing a module registers its kernels (:mod:`weftplan.ops.core.implementations`); it needs no CuPy and no GPU.
"""
