"""Probes of ``weftplan doctor`` for CUDA libraries and for peer access between GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

from weftplan.device.context import Context, gpu
from weftplan.device.interconnect import way
from weftplan.device.offload_links import speed


def _cudnn() -> object:
    return importlib.import_module("cudnn").backend_version()


def _probes(cupy: ModuleType) -> dict[str, Callable[[], object]]:
    """Return a probe call for each library; it returns the version if the library has one."""
    return {
        "cuBLAS": lambda: cupy.cuda.Device(0).cublas_handle and "loaded",
        "cuRAND": lambda: cupy.cuda.curand.getVersion(),
        "NVRTC": lambda: ".".join(map(str, cupy.cuda.nvrtc.getVersion())),
        "cuDNN": _cudnn,
    }


_NEEDED = ("cuBLAS", "cuRAND", "NVRTC")
"""Required libraries: compilation, products and random numbers. Without cuDNN, convolutions are cuBLAS products."""


def libraries(cupy: ModuleType, extra: str) -> tuple[dict[str, str], str]:
    """Return the result of each library's probe, and installation advice if a required library is missing, else empty.

    Args:
        extra: the extra of the package that installs them, such as ``cuda12``.
    """
    versions: dict[str, str] = {}
    missing: list[str] = []
    for name, probe in _probes(cupy).items():
        try:
            versions[name] = str(probe())
        except Exception as error:  # CuPy's own classes, and errors of the loader
            versions[name] = f"missing: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            if name in _NEEDED:
                missing.append(name)
            else:
                versions[name] += (
                    f"; convolutions use cuBLAS (pip install 'weftplan[{extra.replace('cuda', 'cudnn')}]')"
                )
    if not missing:
        return versions, ""
    return versions, (
        f"{', '.join(missing)} cannot be used, so kernels will not run: pip install 'weftplan[{extra}]', which brings "
        f"CUDA's libraries with CuPy"
    )


def extra_of(runtime_version: int) -> str:
    """Return the extra for a CUDA version in the runtime's notation.

    >>> extra_of(12090), extra_of(13000)
    ('cuda12', 'cuda13')
    """
    return f"cuda{max(12, runtime_version // 1000)}"


def host_links(count: int) -> list[str]:
    """Return each GPU's measured copy speed to page-locked host memory, or the assumed speed if that fails."""
    links = []
    for index in range(count):
        bandwidth = speed(gpu(index), Context("cpu_pinned", index))
        links.append(bandwidth.text if bandwidth is not None else "not measured: plans assume 12.0 GB/s, 10 µs")
    return links


def peers(count: int) -> list[list[str]]:
    """Return in row i, column j: how gpu(i) copies to gpu(j): "peer access", or why through the host; empty for itself.

    Each pair is queried, enabled and checked with known bytes, as before its first copy.
    """
    return [[way(gpu(i), gpu(j)) for j in range(count)] for i in range(count)]
