"""Types of raw arrays and of the arguments that describe them, for every layer."""

from __future__ import annotations

from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

RawArray: TypeAlias = npt.NDArray[Any]
"""An array as memory: NumPy's on a CPU, or CuPy's on a GPU, which follows NumPy's interface and has no types."""

DType: TypeAlias = "np.dtype[Any]"
"""A data type of NumPy."""

DTypeLike: TypeAlias = npt.DTypeLike
"""A data type or anything NumPy reads as one, such as ``"float32"``."""

ShapeLike: TypeAlias = "SupportsIndex | tuple[SupportsIndex, ...] | list[SupportsIndex]"
"""A shape, or the length of an array with one axis."""
