"""Whether float32 may be computed on tensor cores; read by products and convolutions on GPUs."""

from __future__ import annotations

from weftplan import config


def allows_tf32() -> bool:
    """Return whether products of float32 may be computed as TF32."""
    return bool(config.get("FLAGS_enable_cublas_tensor_op_math")) and bool(config.get("MXNET_CUDA_ALLOW_TENSOR_CORE"))
