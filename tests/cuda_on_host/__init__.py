"""CUDA C kernels as machine code of the host, in place of the stand-in's interpreter.

``build.py`` compiles, ``kernels.py`` launches, and ``include/`` defines CUDA's names and threads. README.md lists the
detected faults.
"""
