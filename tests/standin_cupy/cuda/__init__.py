"""An interpreter for a small part of CUDA C on NumPy arrays: ``cupy.RawKernel`` without a GPU.

``syntax.py`` reads source text, ``types.py`` has C's types and conversions, ``memory.py`` memory whose bounds and races
are watched, ``lanes.py`` runs all threads of a launch in lockstep, ``raw.py`` is ``cupy.RawKernel``.
"""
