"""``cupy.ElementwiseKernel`` of the stand-in: one launch.

The operation must be one assignment of plain arithmetic. It runs as Python on NumPy arrays, whose syntax is the same,
or as machine code (``tests/cuda_on_host``).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.standin_cupy.array import ndarray, run
from tests.standin_cupy.cuda.raw import RawKernel
from tests.standin_cupy.meter import meter
from tests.standin_cupy.streams import capturable


class ElementwiseKernel:
    """A kernel with parameters of one type ``T``, one output, and arrays of one shape."""

    def __init__(self, in_params: str, out_params: str, operation: str, name: str = "kernel") -> None:
        self.names = [word.split()[1] for word in in_params.split(",")]
        if any(word.split()[0] != "T" for word in (*in_params.split(","), out_params)):
            raise NotImplementedError(f"the stand-in knows parameters of one type T, got {in_params} -> {out_params}")
        match = re.fullmatch(rf"{out_params.split()[1]} = ([\w\s+*()-]+);?", operation)
        if match is None:
            raise NotImplementedError(f"the stand-in knows one assignment to the output, got {operation!r}")
        self.nin, self.nargs = len(self.names), len(self.names) + 1
        self.name, self._code = name, compile(match[1], name, "eval")
        self.out, self.operation = out_params.split()[1], operation

    @capturable
    def __call__(self, *args: Any) -> ndarray:
        if len(args) != self.nargs:
            raise TypeError(f"Wrong number of arguments for {self.name!r}: it has {self.nargs}, got {len(args)}")
        for inputs in args:
            if not isinstance(inputs, ndarray):
                raise TypeError(f"Unsupported type {type(inputs)}")
        *sources, out = args
        if len({inputs.dtype for inputs in args}) > 1:
            raise TypeError(f"Type is mismatched: {self.name} has one type T, got {[str(a.dtype) for a in args]}")
        if len({inputs.shape for inputs in args}) > 1:
            raise ValueError("Out shape is mismatched")
        run(self.name, sources, [out])
        if not meter.dry and RawKernel.host is not None:
            RawKernel.host.elementwise(self, sources, out)
        elif not meter.dry:
            with np.errstate(all="ignore"):
                values = {name: inputs.host for name, inputs in zip(self.names, sources, strict=True)}
                out.host[...] = eval(self._code, {"float": lambda x: x.astype(np.float32)}, values)
        return out
