"""``cupy.RawKernel`` of the stand-in: source text, interpreted (``lanes.py``) or run as machine code.

Each call is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from tests.standin_cupy.array import ndarray, run
from tests.standin_cupy.cuda.lanes import launch
from tests.standin_cupy.cuda.memory import Cells, KernelError
from tests.standin_cupy.cuda.syntax import CompileException, Parameter, functions
from tests.standin_cupy.machine import machine
from tests.standin_cupy.meter import meter
from tests.standin_cupy.streams import capturable

THREADS = 1024
SIDES = (2**31 - 1, 65535, 65535)
_NUMBERS = {int: "int64", float: "float64"}


class RawKernel:
    """One kernel of a source text, compiled on its first call.

    Attributes:
        host: runner that replaces the interpreter (``tests/cuda_on_host``); None for the interpreter.
    """

    host: ClassVar[Any] = None

    def __init__(self, code: str, name: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        self.code = code
        self.name = name
        self.options = options
        self._functions: dict[str, Any] | None = None

    def compile(self, log_stream: Any = None) -> None:
        """Parse the source; raise CompileException if it is invalid."""
        if self._functions is None:
            machine.library("NVRTC")
            actual = functions(self.code)
            if self.name not in actual or not actual[self.name].kernel:
                raise CompileException(f"no kernel is called {self.name}")
            self._functions = actual
            meter.compiled[self.name] += 1

    @capturable
    def __call__(self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0) -> None:
        self.compile()
        assert self._functions is not None
        kernel = self._functions[self.name]
        if not all(type(n) is int for n in (*grid, *block)):
            raise TypeError(f"{self.name}: grid {grid} and block {block} must be Python integers")
        if not all(0 < n <= most for n, most in zip(grid, SIDES, strict=False)) or not 0 < np.prod(block) <= THREADS:
            raise ValueError(f"CUDA_ERROR_INVALID_VALUE: {self.name} with grid {tuple(grid)} and block {tuple(block)}")
        if len(args) != len(kernel.parameters):
            raise TypeError(f"{self.name} has {len(kernel.parameters)} parameters, got {len(args)}")
        arrays = [
            (parameter, self._array(parameter, inputs))
            for parameter, inputs in zip(kernel.parameters, args, strict=True)
            if parameter.pointer
        ]
        run(self.name, [a for p, a in arrays if p.const], [a for p, a in arrays if not p.const])
        numbers = [p if p.pointer else self._number(p, a) for p, a in zip(kernel.parameters, args, strict=True)]
        if meter.dry:
            return
        cells = iter(self._cells(arrays))
        if self.host is not None:
            inputs = [a if p.pointer else n for p, a, n in zip(kernel.parameters, args, numbers, strict=True)]
            self.host.launch(self.code, self.name, grid, block, kernel.parameters, inputs)
            return
        launch(self._functions, kernel, grid, block, [next(cells) if isinstance(n, Parameter) else n for n in numbers])

    def _cells(self, arrays: list[tuple[Parameter, ndarray]]) -> list[Cells]:
        """Return the memory of each array; parameters with the same array share Cells, so that races are detected."""
        result: dict[tuple[int, int, str], Cells] = {}
        results = []
        for parameter, array in arrays:
            key = (array.data.ptr, array.size, str(array.dtype))
            cells = result.setdefault(key, Cells(array.host.reshape(-1), f"{parameter.name} of {self.name}"))
            cells.tracked = cells.tracked or not parameter.const
            results.append(cells)
        written = [a for p, a in arrays if not p.const and a.size]
        for parameter, array in arrays:
            for second in written:
                same = second.data.ptr == array.data.ptr and second.nbytes == array.nbytes
                if not same and array.size and np.shares_memory(second.host, array.host):
                    raise KernelError(f"{self.name}: {parameter.name} shares a part of what is written")
        return results

    def _array(self, parameter: Parameter, given: Any) -> ndarray:
        if not isinstance(given, ndarray):
            raise TypeError(f"{self.name}: {parameter.name} is a pointer, got {type(given)}")
        if str(given.dtype) != parameter.type:
            raise TypeError(f"{self.name}: {parameter.name} points to {parameter.type}, got {given.dtype}")
        if not given.host.flags.c_contiguous:
            raise ValueError(f"{self.name}: {parameter.name} is not contiguous: strides {given.strides}")
        return given

    def _number(self, parameter: Parameter, given: Any) -> Any:
        kind = _NUMBERS.get(type(given)) or (str(given.dtype) if isinstance(given, np.generic) else None)
        if kind != parameter.type:
            raise TypeError(f"{self.name}: {parameter.name} is {parameter.type}, got {given!r} ({type(given)})")
        return np.asarray(given, kind)
