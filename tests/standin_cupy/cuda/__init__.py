"""A small part of CUDA C, read and run on NumPy arrays: what ``cupy.RawKernel`` needs where there is no GPU.

``syntax.py`` reads source text, ``types.py`` has C's types and conversions, ``memory.py`` memory whose bounds and races
are watched, ``lanes.py`` runs all threads of a launch side by side, ``raw.py`` is ``cupy.RawKernel``.
"""
