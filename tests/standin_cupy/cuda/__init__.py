"""An interpreter for a small part of CUDA C on NumPy arrays: ``cupy.RawKernel`` without a GPU.

``syntax.py`` parses source text; ``types.py`` has C's types and conversions. ``memory.py`` checks bounds and races.
``lanes.py`` runs all threads of a launch in lockstep, and ``raw.py`` is ``cupy.RawKernel``.
"""
