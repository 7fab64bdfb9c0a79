"""Fixed cuBLAS workspace sizes, so that matrix products are bitwise reproducible and plans know the workspace bytes.

CuPy has one cuBLAS handle for each thread and device, and sets its stream before each call. For a handle that is used
on several streams, cuBLAS guarantees bitwise reproducible results only if :data:`VARIABLE` was set before the handle
was created. ``cublasSetWorkspace`` is no alternative, because setting a stream resets it.
"""

from __future__ import annotations

import os
import re

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_FIXED = ":4096:8"
"""Eight workspaces of 4096 KiB, the total that cuBLAS uses by default on recent GPUs."""
_REPRODUCIBLE = (_FIXED, ":16:8")
"""Values that give bitwise reproducible results, according to cuBLAS's documentation."""


def fix_workspaces() -> None:
    """Set :data:`VARIABLE` unless the user has set it. Call this before the first cuBLAS handle is created."""
    os.environ.setdefault(VARIABLE, _FIXED)


def workspace_bytes() -> int:
    """Return the workspace bytes of one cuBLAS handle, as :data:`VARIABLE` sets them."""
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get(VARIABLE, _FIXED))
    return sum(int(kibibytes) * int(count) << 10 for kibibytes, count in sizes)


def is_reproducible() -> bool:
    """Return whether matrix products are bitwise reproducible from run to run, on any streams."""
    return os.environ.get(VARIABLE, _FIXED) in _REPRODUCIBLE
