"""Batched matrix products by cuBLAS, without the copies of ``cupy.matmul``.

CuPy copies a transposed operand of a batched product, and allocates arrays of pointers to multiply one matrix by many.
Plans do not count this memory, and CUDA graphs cannot contain the allocations. cuBLAS itself needs neither. Any thread
may call; the product is enqueued on CuPy's current stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weftplan.ops.core.cuda_tuning import tuning
from weftplan.support.array_types import ArrayModule, RawArray

_CALLS = {"float32": "sgemmStridedBatched", "float64": "dgemmStridedBatched"}
DTYPES = tuple(_CALLS)
"""Dtypes that :func:`gemm` multiplies."""
_NUMBERS = {(name, value): np.full(1, value, name) for name in DTYPES for value in (0, 1)}
"""The constants 0 and 1 in host memory, for cuBLAS's factors of the product and of the old result."""
_TF32 = 3
"""``CUBLAS_TF32_TENSOR_OP_MATH``."""


def pointer(array: Any) -> int:
    """Return the device address of a CuPy array."""
    return int(array.data.ptr)


def gemm(xp: ArrayModule, a: RawArray, b: RawArray, out: RawArray, *, add: bool = False) -> None:
    """Write ``a @ b`` to ``out``, or with ``add`` add it to ``out``, in one launch.

    Args:
        a: of shape (batch, m, k), or (m, k) for the same matrix in all products.
        b: of shape (batch, k, n), or (k, n) for the same matrix in all products.
        out: of shape (batch, m, n), or (m, n) if both operands are matrices; its rows are contiguous.

    The rows or the columns of each matrix are contiguous. Arrays are not empty and share one dtype of :data:`DTYPES`.
    """
    name = out.dtype.name
    m, n = out.shape[-2:]
    batch = out.shape[0] if out.ndim > 2 else 1
    turn_a, lda, step_a = _layout(a)
    turn_b, ldb, step_b = _layout(b)
    turned, ldc, step_c = _layout(out)
    assert not turned, f"rows of the result, {out.shape} with strides {out.strides}, are not contiguous"
    alpha, beta = (_NUMBERS[name, value].ctypes.data for value in (1, int(add)))
    cublas, handle = xp.cuda.cublas, xp.cuda.get_cublas_handle()
    tensor_cores = name == "float32" and tuning().tensor_cores
    if tensor_cores:
        mode = cublas.getMathMode(handle)
        cublas.setMathMode(handle, _TF32)
    # cuBLAS's matrices are column-major, so it multiplies the transposes in reversed order.
    getattr(cublas, _CALLS[name])(
        handle, turn_b, turn_a, n, m, a.shape[-1], alpha, pointer(b), ldb, step_b, pointer(a), lda, step_a, beta,
        pointer(out), ldc, step_c, batch,
    )  # fmt: skip
    if tensor_cores:
        cublas.setMathMode(handle, mode)


def _layout(x: RawArray) -> tuple[int, int, int]:
    """Return (whether columns are contiguous instead of rows, stride of rows or columns, stride of matrices).

    The strides are in elements; that of a single matrix is 0.
    """
    item = x.itemsize
    row, column = (stride // item for stride in x.strides[-2:])
    rows, columns = x.shape[-2:]
    step = x.strides[0] // item if x.ndim > 2 else 0
    if column == 1 or columns == 1:
        return 0, max(row, columns) if rows > 1 else columns, step
    assert row == 1 or rows == 1, f"neither rows nor columns of {x.shape} with strides {x.strides} are contiguous"
    return 1, max(column, rows), step
