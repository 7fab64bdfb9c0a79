"""The stand-in's kernels as machine code of the host (``build.py``), in place of the stand-in's interpreter.

The stand-in checks grids, blocks, argument dtypes and the order of streams. This module compares signatures with the
compiler's, passes arrays with their lengths, and may repeat a launch in other orders of threads and blocks. All orders
must give the same bits.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tests.cuda_on_host.build import Compiled
from tests.standin_cupy.cuda.memory import KernelError
from tests.standin_cupy.cuda.raw import RawKernel

CELL = 56
"""Bytes of ``host::Cell``, the access record of an element."""
BLOCK = 128
"""Threads per block of CuPy's elementwise kernels."""


class Region(ctypes.Structure):
    """``host::Region``: one array."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("size", ctypes.c_longlong), ("name", ctypes.c_char_p), ("cells", ctypes.c_void_p),
        ("shared", ctypes.c_bool), ("launch", ctypes.c_uint),
    )  # fmt: skip


class Argument(ctypes.Structure):
    """``host::Argument``: the bytes of a number, or an array."""

    _fields_ = (("value", ctypes.c_void_p), ("region", ctypes.POINTER(Region)))


_compiled = functools.lru_cache(maxsize=None)(Compiled)


class Host:
    """A runner of kernels on the host.

    Args:
        seeds: orders of threads and blocks; a launch runs in each of them and must give the same bits.
        rewrite: function applied to a source before compilation, for tests that insert a mistake.

    Attributes:
        executed: number of launches by (source, kernel).
    """

    def __init__(self, seeds: Sequence[int] = (0,), rewrite: Callable[[str], str] = str) -> None:
        self.seeds = seeds
        self.rewrite = rewrite
        self.executed: collections.Counter[tuple[str, str]] = collections.Counter()

    def launch(
        self, code: str, name: str, grid: Any, block: Any, parameters: Sequence[Any], args: Sequence[Any]
    ) -> None:
        """Run one launch in every order; ``args`` are the stand-in's arrays, and numbers of the parameters' types."""
        compiled = _compiled(self.rewrite(code), name)
        wanted = [f"{'const ' * (p.const and p.pointer)}{p.type}{'*' * p.pointer}" for p in parameters]
        if compiled.parameters != wanted:
            raise KernelError(f"{name}: the compiler sees parameters {compiled.parameters}, the stand-in {wanted}")
        self.executed[code, name] += 1
        arrays = [(p, x.host.reshape(-1)) for p, x in zip(parameters, args, strict=True) if p.pointer]
        written = [x for p, x in arrays if not p.const]
        before = [x.copy() for x in written] if len(self.seeds) > 1 else []
        first: list[bytes] | None = None
        for seed in self.seeds:
            if first is not None:
                for x, kept in zip(written, before, strict=True):
                    x[...] = kept
            self.run(compiled, name, grid, block, parameters, args, seed)
            if len(self.seeds) > 1:
                actual = [x.tobytes() for x in written]
                if first is not None and actual != first:
                    raise KernelError(f"{name}: another order of threads and blocks (seed {seed}) gives other results")
                first = actual

    @staticmethod
    def run(
        compiled: Compiled, name: str, grid: Any, block: Any, parameters: Sequence[Any], args: Any, seed: int = 0,
        only: Sequence[int] = (),
    ) -> list[Any]:  # fmt: skip
        """Run all blocks, or only the blocks ``only``.

        Return the access records of each written array, :data:`CELL` bytes per element.
        """
        regions: dict[tuple[int, int, str], tuple[Region, Any]] = {}
        inputs = (Argument * len(args))()
        keep: list[Any] = []
        written = {_key(x.host) for p, x in zip(parameters, args, strict=True) if p.pointer and not p.const}
        for slot, parameter, x in zip(inputs, parameters, args, strict=True):
            if not parameter.pointer:
                number = np.array(x, parameter.type)  # its bytes, as CuPy copies them into the parameters of a launch
                keep.append(number)
                slot.value = number.ctypes.data
                continue
            key = _key(x.host)
            if key not in regions:
                cells = zeros(x.size * CELL) if key in written else None
                what = f"{parameter.name} of {name}".encode()
                region = Region(
                    x.host.ctypes.data, x.size, what, None if cells is None else cells.ctypes.data, False, 0
                )
                regions[key] = region, cells
            slot.region = ctypes.pointer(regions[key][0])
        sides = [(ctypes.c_uint * 3)(*(*side, 1, 1)[:3]) for side in (grid, block)]
        numbers = (ctypes.c_uint64 * len(only))(*only)
        wrong = compiled.launch(*sides, inputs, ctypes.c_uint(seed), numbers, ctypes.c_uint(len(only)))
        if wrong is not None:
            raise KernelError(f"{name} with grid {tuple(grid)} and block {tuple(block)}: {wrong.decode()}")
        return [cells for _, cells in regions.values() if cells is not None]

    def elementwise(self, kernel: Any, sources: Sequence[Any], out: Any) -> None:
        """Run an ElementwiseKernel by the loop that CuPy generates, with CuPy's grid and block."""
        if not out.size:
            return
        kind = str(out.dtype)
        code = expanded(kernel, {"float16": "float16", "float32": "float", "float64": "double", "int8": "signed char",
                                 "uint8": "unsigned char", "int32": "int", "int64": "long long"}[kind])  # fmt: skip
        parameters = [_Parameter(f"_raw_{name}", kind, True, True) for name in kernel.names]
        parameters += [_Parameter("_raw_y", kind, True, False), _Parameter("_size", "int64", False, False)]
        blocks = min(2**31 - 1, -(-out.size // BLOCK))
        self.launch(code, kernel.name, (blocks,), (min(BLOCK, out.size),), parameters, (*sources, out, out.size))


_Parameter = collections.namedtuple("_Parameter", "name type pointer const")


def zeros(nbytes: int) -> Any:
    """Return zeroed bytes whose pages take memory only when touched."""
    if nbytes < 1 << 28:
        return np.zeros(nbytes, np.uint8)
    flags = (
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    )  # Linux; Python 3.13 has the name
    return np.frombuffer(mmap.mmap(-1, nbytes, flags), np.uint8)


def _key(array: Any) -> tuple[int, int, str]:
    return array.ctypes.data, array.size, str(array.dtype)


def expanded(kernel: Any, kind: str) -> str:
    """Return the source that CuPy generates from an ElementwiseKernel of contiguous arrays of one type.

    Here pointers and a number replace CuPy's ``CArray`` and ``CIndexer``.
    """
    heads = [f"const {kind}* _raw_{name}" for name in kernel.names] + [f"{kind}* _raw_{kernel.out}"]
    reads = "\n".join(f"        const {kind}& {name} = _raw_{name}[i];" for name in kernel.names)
    return f"""extern "C" __global__ void {kernel.name}({", ".join(heads)}, long long _size) {{
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < _size;
         i += (long long)blockDim.x * gridDim.x) {{
{reads}
        {kind}& {kernel.out} = _raw_{kernel.out}[i];
        {kernel.operation};
    }}
}}
"""


@contextlib.contextmanager
def on_host(seeds: Sequence[int] = (0,), rewrite: Callable[[str], str] = str) -> Iterator[Host]:
    """Run the stand-in's kernels as machine code of the host; arguments as in :class:`Host`."""
    host = Host(seeds, rewrite)
    before, RawKernel.host = RawKernel.host, host
    try:
        yield host
    finally:
        RawKernel.host = before
