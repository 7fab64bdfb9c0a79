"""Import this before NumPy: it removes environment variables that make BLAS slower than the processor allows.

OPENBLAS_CORETYPE makes OpenBLAS run as on an older processor (``Haswell`` on a processor with AVX-512 halves the speed
of NumPy's products), and OPENBLAS_L2_SIZE shrinks its blocks. Both slow NumPy down but no other framework. This module
removes them from the environment of the bench and of its children.
"""

import os
import sys

PINS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")

if "numpy" in sys.modules and any(name in os.environ for name in PINS):
    raise SystemExit("import blas_setting before NumPy: BLAS has read its variables already")
taken = {name: os.environ.pop(name) for name in PINS if name in os.environ}


def describe():
    """Return one line: NumPy's BLAS, the processor that it assumes, and the variables that were removed."""
    import numpy  # noqa: F401 - loads the library that is asked below
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    runs = ", ".join(f"{p['internal_api']} {p['version']} as {p.get('architecture', 'unknown')}" for p in pools)
    undone = f" ({', '.join(f'{name}={value}' for name, value in taken.items())} not obeyed)" if taken else ""
    return f"BLAS: {runs or 'none found'}{undone}"
