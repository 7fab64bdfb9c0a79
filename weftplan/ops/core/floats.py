"""Floating-point dtypes, including bfloat16 from the package ml_dtypes.

NumPy gives every dtype of another package the kind ``V``, so the package never tests ``kind == "f"``. ml_dtypes is
imported when bfloat16 is first named.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from weftplan.support.array_types import DType, DTypeLike

_INSTALL = "bfloat16 needs the package ml_dtypes: pip install ml_dtypes"


def dtype_of(value: DTypeLike) -> DType:
    """Return ``np.dtype(value)``, or ml_dtypes' bfloat16 for ``"bfloat16"``.

    Raises:
        TypeError: the value is no dtype, or it is ``"bfloat16"`` and ml_dtypes is not installed.

    >>> dtype_of("float16")
    dtype('float16')
    """
    if isinstance(value, str) and value.strip() == "bfloat16":
        try:
            value = importlib.import_module("ml_dtypes").bfloat16
        except ImportError:
            raise TypeError(_INSTALL) from None
    if isinstance(value, str) and value.lstrip("<>=|").startswith("a"):
        raise TypeError(f"data type {value!r} not understood")  # "a" is NumPy's deprecated name of bytes
    dtype: DType = np.dtype(value)
    return dtype


def is_float(dtype: DType) -> bool:
    """Return whether ``dtype`` is a floating-point dtype, bfloat16 included.

    >>> is_float(np.dtype("float16")), is_float(np.dtype("int8")), is_float(np.dtype("V2"))
    (True, False, False)
    """
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.name == "bfloat16")


def is_half(dtype: DType) -> bool:
    """Return whether ``dtype`` is a float of two bytes, whose sums need a wider accumulator."""
    return dtype.itemsize == 2 and is_float(dtype)


def is_number(dtype: DType) -> bool:
    """Return whether arrays may have ``dtype``: a boolean, integer or floating-point dtype.

    >>> is_number(np.dtype(bool)), is_number(np.dtype("complex64"))
    (True, False)
    """
    return dtype.kind in "biuf" or is_float(dtype)


def limits(dtype: DType) -> Any:
    """Return ``finfo`` of a float dtype: ``min``, ``max``, ``eps``, ``nmant``."""
    return np.finfo(dtype) if dtype.kind == "f" else importlib.import_module("ml_dtypes").finfo(dtype)


def holds_positions(dtype: DType, size: int) -> bool:
    """Return whether ``dtype`` represents every position below ``size`` exactly."""
    if dtype.kind == "b":
        return size <= 2
    highest = 2 ** (limits(dtype).nmant + 1) if is_float(dtype) else int(np.iinfo(dtype).max)
    return size - 1 <= highest
