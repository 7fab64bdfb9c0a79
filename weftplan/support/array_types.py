"""Types of raw arrays and of the arguments that describe them, for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

RawArray: TypeAlias = npt.NDArray[Any]
"""A NumPy array on a CPU, or a CuPy array on a GPU, which has NumPy's interface but no type annotations. While a
formula is recorded, its kernel gets placeholders instead of arrays."""

DType: TypeAlias = np.dtype[Any]
"""A data type of NumPy."""

DTypeLike: TypeAlias = npt.DTypeLike
"""A data type or anything NumPy reads as one, such as ``"float32"``."""

ShapeLike: TypeAlias = SupportsIndex | tuple[SupportsIndex, ...] | list[SupportsIndex]
"""A shape, or the length of an array with one axis."""

Dims: TypeAlias = int | np.integer[Any] | Sequence[int]
"""A shape as users write it: a sequence of dimensions, or a number, which is one dimension."""

Scalar: TypeAlias = float | np.number[Any] | np.bool_
"""A number or a boolean, of Python or of NumPy."""

Floating: TypeAlias = np.floating[Any]
"""A float of NumPy, such as ``np.float32(1)``."""

FloatType: TypeAlias = type[np.floating[Any]]
"""A class of NumPy's floats, such as ``np.float32``."""

ArrayModule: TypeAlias = ModuleType
"""The module of a kernel's arrays: numpy or cupy, or a recorder of formulas, which has the functions of such a module.
Its attributes have no types."""

Generator: TypeAlias = np.random.Generator
"""A generator of random numbers: NumPy's, or an object on a GPU that follows its interface for the package's draws."""
