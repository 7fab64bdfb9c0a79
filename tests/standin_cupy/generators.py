"""Generators of the stand-in: CuPy's signatures, refusals and mistakes, with NumPy's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.standin_cupy import names
from tests.standin_cupy.array import computed, ndarray, run
from tests.standin_cupy.meter import meter

STATE_BYTES = 8 * 256 * 132 * 64
"""Bytes of a bit generator's states on a GPU with 132 multiprocessors."""


class Philox4x3210:
    """A bit generator; creating it allocates its states and launches the kernel that initializes them."""

    def __init__(self, seed: Any = None, *, size: int = -1) -> None:
        self.state = ndarray((1,), np.uint8)
        meter.temporary_bytes += STATE_BYTES
        run("init_generator", [], [self.state])
        self.numpy = np.random.Generator(np.random.Philox(seed))


class Generator:
    """``cupy.random.Generator``."""

    def __init__(self, bit_generator: Philox4x3210) -> None:
        self._bits = bit_generator

    def _check(self, dtype: Any, size: Any, out: ndarray) -> None:
        if out.dtype != np.dtype(dtype):
            raise TypeError(f"Supplied output array has the wrong type. Expected {np.dtype(dtype)}, got {out.dtype}")
        if not out.host.flags.c_contiguous:
            raise ValueError("Supplied output array is not contiguous, writable or aligned.")
        if size is not None and (tuple(size) if isinstance(size, (tuple, list)) else (size,)) != out.shape:
            raise ValueError("size must match out.shape when used together")

    def _made(self, name: str, draw: Any, reads: list[ndarray] | None = None) -> ndarray:
        return computed(f"random.{name}", np.asarray(draw), [self._bits.state, *(reads or [])])

    def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> ndarray:
        """Draw uniform numbers; without a size, draw *one* number and broadcast it to ``out``."""
        if out is not None:
            self._check(dtype, size, out)
        kind = np.float64 if np.dtype(dtype).char == "d" else np.float32
        result = self._made("random", self._bits.numpy.random(() if size is None else size, dtype=kind))
        if out is None:
            return result.astype(dtype, copy=False)
        run("elementwise_copy", [result], [out])
        out.host[...] = result.host
        return out

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> ndarray:
        """Draw normal numbers of float32 or float64."""
        if out is not None:
            self._check(dtype, size, out)
        kind = np.dtype(dtype)
        if kind.char not in "fd":
            raise TypeError(f"Unsupported dtype {kind}")
        if out is None:
            return self._made("standard_normal", self._bits.numpy.standard_normal(size or (), dtype=kind))
        run("random.standard_normal", [self._bits.state], [out])
        out.host[...] = self._bits.numpy.standard_normal(out.shape, dtype=kind)
        return out

    def standard_exponential(
        self, size: Any = None, dtype: Any = np.float64, method: str = "inv", out: Any = None
    ) -> ndarray:
        """Draw exponential numbers."""
        return self._made("standard_exponential", self._bits.numpy.standard_exponential(size, dtype))

    def standard_gamma(self, shape: Any, size: Any = None, dtype: Any = np.float64, out: Any = None) -> ndarray:
        """Draw gamma numbers; ``shape`` is an array or a Python number."""
        return self._by("standard_gamma", shape, lambda s: self._bits.numpy.standard_gamma(s, size, dtype))

    def poisson(self, lam: Any = 1.0, size: Any = None) -> ndarray:
        """Draw Poisson numbers; ``lam`` is an array or a Python number."""
        return self._by("poisson", lam, lambda value: self._bits.numpy.poisson(value, size))

    def integers(
        self, low: Any, high: Any = None, size: Any = None, dtype: Any = np.int64, endpoint: bool = False
    ) -> ndarray:
        """Draw integers from ``low`` to ``high``."""
        return self._made("integers", self._bits.numpy.integers(low, high, size, dtype=dtype, endpoint=endpoint))

    def _by(self, name: str, parameter: Any, draw: Any) -> ndarray:
        if isinstance(parameter, ndarray):
            return self._made(name, draw(parameter.host), [parameter])
        if type(parameter) not in (int, float):
            raise ValueError(f"{name}: expected a cupy.ndarray or a scalar, got {type(parameter)}")
        return self._made(name, draw(parameter))

    def __getattr__(self, name: str) -> Any:
        if f"random.Generator.{name}" not in names.TABLE:
            raise AttributeError(f"cupy.random.Generator has no attribute {name!r}")
        raise NotImplementedError(f"the stand-in for CuPy has no random.Generator.{name} yet")


SPECIAL: dict[str, Any] = {"random.Philox4x3210": Philox4x3210, "random.Generator": Generator}
