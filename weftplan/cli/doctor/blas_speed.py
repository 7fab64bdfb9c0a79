"""Warnings of ``weftplan doctor`` about BLAS libraries that run below the processor's speed.

OpenBLAS chooses its kernels by processor when it is loaded, and environment variables can select those of an older
processor. Every matrix product of NumPy then takes at least twice as long, without any message.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from threadpoolctl import threadpool_info

PINS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that restrict OpenBLAS to older kernels."""
WIDE = frozenset({"skylakex", "cooperlake", "sapphirerapids"})
"""OpenBLAS's kernels for AVX-512 (AMD's processors run the first two)."""
MIDDLE = frozenset({"haswell", "zen"})
"""OpenBLAS's kernels for AVX2."""
AVX512 = (("AVX512F", "AVX512VL", "AVX512BW", "AVX512DQ"), ("AVX512_SKX",), ("X86_V4",))
"""Feature names, by NumPy version, of a processor that supports the wide kernels."""


def processor_features() -> Mapping[str, bool]:
    """Return the processor's features, as detected by NumPy (empty: unknown)."""
    try:
        module = importlib.import_module("numpy._core._multiarray_umath")
    except ImportError:  # a private module of NumPy
        return {}
    features: Mapping[str, bool] = getattr(module, "__cpu_features__", {})
    return features


def warnings(
    pools: Sequence[Mapping[str, Any]] | None = None,
    features: Mapping[str, bool] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """Return sentences about BLAS libraries that use kernels of an older processor, and variables that cause it.

    Args:
        pools: libraries as threadpoolctl names them; default: those of this process.
        features: the processor's features; default: as detected by NumPy.
        environment: default: the environment of this process.
    """
    pools = threadpool_info() if pools is None else pools
    features = processor_features() if features is None else features
    environment = os.environ if environment is None else environment
    messages = []
    set_pins = [f"{name}={environment[name]}" for name in PINS if environment.get(name)]
    wide = any(all(features.get(name, False) for name in names) for names in AVX512)
    middle = features.get("AVX2", False) and features.get("FMA3", False)
    slow = False
    for pool in pools:
        runs = str(pool.get("architecture") or "").lower()
        if pool.get("internal_api") != "openblas" or not runs:
            continue
        offered = "AVX-512" if wide and runs not in WIDE else "AVX2" if middle and runs not in WIDE | MIDDLE else None
        if offered is not None:
            slow = True
            messages.append(
                f"OpenBLAS {pool.get('version')} runs its kernels for {pool['architecture']}, and the processor offers "
                f"{offered}: matrix products take about twice as long as they need"
            )
    if set_pins:
        effect = "which makes it so" if slow else "which holds OpenBLAS back on newer processors"
        messages.append(f"{' and '.join(set_pins)} {'are' if len(set_pins) > 1 else 'is'} set, {effect}: unset it")
    return messages
