"""Workspaces of cuBLAS: of a fixed size, so that a product has the same bits in every run, and so that plans know them.

CuPy gives each thread a handle for each device, and points it at the current stream before each call. If a handle works
on several streams, cuBLAS promises the same bits only if :data:`VARIABLE` was set before the handle was created.
(``cublasSetWorkspace`` would not last: setting a stream undoes it.)
"""

from __future__ import annotations

import os
import re

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED = ":4096:8"
"""Eight workspaces of 4 MiB: cuBLAS's default on recent GPUs, with a fixed size."""
_REPRODUCIBLE = (_FIXED, ":16:8")
"""Values with which cuBLAS's documentation promises the same bits."""


def fix_workspaces() -> None:
    """Set :data:`VARIABLE` unless the user has; to be called before the first handle is made."""
    os.environ.setdefault(VARIABLE, _FIXED)


def workspace_bytes() -> int:
    """Return the workspace bytes of a handle."""
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get(VARIABLE, _FIXED))
    return sum(int(kibibytes) * int(count) << 10 for kibibytes, count in sizes)


def is_reproducible() -> bool:
    """Return whether products have the same bits in every run, whatever streams they run on."""
    return os.environ.get(VARIABLE, _FIXED) in _REPRODUCIBLE
