"""Kernels in CUDA C: other implementations of operators for GPUs, compiled by CuPy when they are first launched.

Importing this package offers them (:mod:`weftplan.ops.implementations`); nothing of CuPy is imported. A kernel does in
one launch what is a chain of CuPy's functions otherwise, adds floats in one fixed order, and never makes the host wait.
"""

import weftplan.ops.cuda.indexing
import weftplan.ops.cuda.roi_pooling
import weftplan.ops.cuda.sampling  # noqa: F401
