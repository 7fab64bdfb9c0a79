"""``mx.runtime``: features of this installation, under the names of MXNet's compile-time features.

Features are detected from packages and devices; :class:`Features` caches the first result for the process. Any thread
may call these functions.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from weftplan.device import num_gpus
from weftplan.errors import MXNetError

__all__ = ["Feature", "Features", "feature_list"]


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature by name, and whether it is available."""

    name: str
    enabled: bool

    def __repr__(self) -> str:
        return f"{'✔' if self.enabled else '✖'} {self.name}"


_NAMES = """CUDA CUDNN NCCL CUDA_RTC TENSORRT CPU_SSE CPU_SSE2 CPU_SSE3 CPU_SSE4_1 CPU_SSE4_2 CPU_SSE4A CPU_AVX CPU_AVX2
    OPENMP SSE F16C JEMALLOC BLAS_OPEN BLAS_ATLAS BLAS_MKL BLAS_APPLE LAPACK MKLDNN OPENCV CAFFE PROFILER DIST_KVSTORE
    CXX14 INT64_TENSOR_SIZE SIGNAL_HANDLER DEBUG TVM_OP"""


def feature_list() -> list[Feature]:
    """Return every feature that MXNet 1.9.1 names. Features of its C++ parts (SSE, MKLDNN, …) are not available."""
    cupy = importlib.util.find_spec("cupy") is not None
    features = {
        "CUDA": cupy and num_gpus() > 0,
        "INT64_TENSOR_SIZE": True,
        "LAPACK": True,  # NumPy has it
        "OPENCV": any(importlib.util.find_spec(name) is not None for name in ("cv2", "PIL")),
        "PROFILER": True,
    }
    return [Feature(name, features.get(name, False)) for name in _NAMES.split()]


class Features(dict[str, Feature]):
    """Features by name; a singleton of the process."""

    instance: Features | None = None

    def __new__(cls, *ignored: object, **settings: object) -> Features:
        if cls.instance is None:
            cls.instance = super().__new__(cls)
            cls.instance.update({feature.name: feature for feature in feature_list()})
        return cls.instance

    def __init__(self, *ignored: object, **settings: object) -> None:
        """Do nothing: :meth:`__new__` has filled the singleton."""

    def __repr__(self) -> str:
        return str(list(self.values()))

    def __reduce__(self) -> tuple[type[Features], tuple[()]]:
        return (Features, ())

    def is_enabled(self, feature_name: str) -> bool:
        """Return whether a feature (any case) is available; raise MXNetError, a RuntimeError, for an unknown name."""
        feature = self.get(feature_name.upper())
        if feature is None:
            raise MXNetError(f"feature {feature_name!r} is unknown; known are {', '.join(self)}")
        return feature.enabled
