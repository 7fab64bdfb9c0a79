"""Kernels in CUDA C as machine code of the host, which run in place of the stand-in's interpreter.

``build.py`` compiles, ``kernels.py`` launches, ``include/`` has CUDA's names and the threads; README.md lists the
detected faults.
"""
