"""Batched matrix products by cuBLAS, without the copies of ``cupy.matmul``.

CuPy copies a transposed operand of a batched product, and makes arrays of pointers to multiply one matrix by many. No
plan counts these, and no CUDA graph can hold them. cuBLAS itself needs neither. Any thread may call; the product goes
to CuPy's current stream.
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
"""The factors of product and result, which cuBLAS reads in host memory."""
_TF32 = 3
"""``CUBLAS_TF32_TENSOR_OP_MATH``."""


def pointer(array: Any) -> int:
    """Return the address of the bytes of an array of CuPy."""
    return int(array.data.ptr)


def gemm(xp: ArrayModule, a: RawArray, b: RawArray, out: RawArray, *, add: bool = False) -> None:
    """Write ``a`` times ``b`` into ``out``, or add it, in one launch.

    Args:
        a: (batch, m, k), or (m, k), which is then the same for all.
        b: (batch, k, n), or (k, n).
        out: (batch, m, n), or (m, n) if both are matrices; its rows are contiguous.

    The rows or the columns of each matrix are contiguous. Arrays are not empty and share one dtype of :data:`DTYPES`.
    """
    name = out.dtype.name
    m, n = out.shape[-2:]
    batch = out.shape[0] if out.ndim > 2 else 1
    turn_a, lda, step_a = _layout(a)
    turn_b, ldb, step_b = _layout(b)
    turned, ldc, step_c = _layout(out)
    assert not turned, f"rows of the result, {out.shape} with strides {out.strides}, are not contiguous"
    one, old = (_NUMBERS[name, value].ctypes.data for value in (1, int(add)))
    cublas, handle = xp.cuda.cublas, xp.cuda.get_cublas_handle()
    tensor_cores = name == "float32" and tuning().tensor_cores
    if tensor_cores:
        before = cublas.getMathMode(handle)
        cublas.setMathMode(handle, _TF32)
    # cuBLAS counts columns first, so it multiplies the transposes, the other way round.
    getattr(cublas, _CALLS[name])(
        handle, turn_b, turn_a, n, m, a.shape[-1], one, pointer(b), ldb, step_b, pointer(a), lda, step_a, old,
        pointer(out), ldc, step_c, batch,
    )  # fmt: skip
    if tensor_cores:
        cublas.setMathMode(handle, before)


def _layout(x: RawArray) -> tuple[int, int, int]:
    """Return (1 if columns are contiguous, else 0; stride of rows, or columns; stride of matrices), in elements."""
    item = x.itemsize
    row, column = (stride // item for stride in x.strides[-2:])
    rows, columns = x.shape[-2:]
    step = x.strides[0] // item if x.ndim > 2 else 0
    if column == 1 or columns == 1:
        return 0, max(row, columns) if rows > 1 else columns, step
    assert row == 1 or rows == 1, f"neither rows nor columns of {x.shape} with strides {x.strides} are contiguous"
    return 1, max(column, rows), step
