"""Generation, compilation and launch of kernels in CUDA C.

A source is a template: ``T`` stands for the dtype of the data and ``A`` for the dtype of its accumulators. It is
compiled on first launch, once for each choice of dtypes, and CuPy caches the result on disk. Products and sums are not
contracted to fused multiply-adds, so a formula rounds as it does on a CPU. No function waits for the device or
allocates device memory.

Any thread may launch. Two threads that launch a kernel for the first time may both compile it, which is harmless.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from weftplan.errors import DeviceError
from weftplan.ops.core.cuda_gemm import pointer
from weftplan.ops.core.floats import is_float
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.schema import DType, Params, TensorSpec
from weftplan.support.array_types import ArrayModule, RawArray

THREADS = 256
"""Threads of a block in kernels with a thread per element or vector of elements."""
WIDE = 1024
"""Maximum threads of a block that computes a sum."""

TERMS = 16
"""Numbers that each thread adds, if there are enough, before the threads of a block add their sums by halves."""

_NAMES = {"float16": "__half", "float32": "float", "float64": "double", "int32": "int", "int64": "long long",
          "uint8": "unsigned char", "int8": "signed char", "bool": "bool"}  # fmt: skip

ALIGNMENT = 16
"""Maximum bytes that an instruction loads or stores, at an address that is a multiple of them."""

TOTAL = """
__device__ A total(A* s, A value) {  // over a block, by halves: one fixed order
    int t = threadIdx.x;
    __syncthreads();
    s[t] = value;
    __syncthreads();
    for (int k = blockDim.x / 2; k > 0; k /= 2) {
        if (t < k) s[t] = s[t] + s[t + k];
        __syncthreads();
    }
    return s[0];
}
"""
"""A device function ``total(s, value)`` for sources, which returns the sum of ``value`` over a block of threads. The
number of threads is a power of two; ``s`` is shared memory with an element for each thread."""


OPTIONS = ("--fmad=false",)
"""Options of the compiler. CuPy adds ``-ftz=true``, which flushes float32 values below 1.2e-38 to zero."""

LARGEST = TOTAL.replace("total(", "largest(").replace("s[t] + s[t + k]", "fmax(s[t], s[t + k])")
"""A device function like ``total`` that returns the maximum of ``value`` over a block of threads; it ignores NaN."""


_WALK = {
    "PLACES": """unsigned int c = blockIdx.x / (unsigned int)pieces;
    unsigned int piece = blockIdx.x - c * (unsigned int)pieces;
    unsigned int length = ((unsigned int)count + (unsigned int)pieces - 1) / (unsigned int)pieces;
    unsigned int lower = piece * length + threadIdx.x;
    unsigned int upper = min(piece * length + length, (unsigned int)count);
    unsigned int wide = (unsigned int)inner;
    unsigned int pitch = (unsigned int)channels * wide;
    unsigned int first = lower % wide;
    unsigned int begin = lower / wide * pitch + c * wide + first;
    unsigned int step = blockDim.x % wide;
    unsigned int stride = blockDim.x / wide * pitch + step;
    unsigned int at = begin;
    unsigned int column = first;""",
    "WALK": """at = begin;
    column = first;
    for (unsigned int i = lower; i < upper; i += blockDim.x) {""",
    "STEP": """at += stride;
        column += step;
        if (column >= wide) {
            column -= wide;
            at += pitch - wide;
        }
    }""",
}
"""The code that :func:`walking` puts into sources. Arrays have fewer than 2^31 elements, so that unsigned indices may
pass the end without overflow."""


def walking(code: str) -> str:
    """Return ``code`` with loops over the channels of an array of shape (outer, ``channels``, ``inner``).

    ``PLACES`` becomes declarations: block ``blockIdx.x`` processes one of ``pieces`` pieces of channel ``c``, which has
    ``count`` elements, and each of its threads every ``blockDim.x``-th element of the piece. ``WALK`` and ``STEP``
    become the begin and the end of a loop, in which ``at`` is the index of an element. Each thread divides only once.
    """
    return re.sub(r"\b(?:PLACES|WALK|STEP)\b", lambda match: _WALK[match[0]], code)


def text_of(code: str, **types: DType) -> str:
    """Return a source with its letters replaced by the C names of ``types``; ``A`` follows from ``T``."""
    letters = {letter: _NAMES[np.dtype(dtype).name] for letter, dtype in types.items()}
    if "T" in types:
        letters.setdefault("A", _NAMES[accumulator(np.dtype(types["T"])).name])
    text = re.sub(r"\b[A-Z]\b", lambda match: letters.get(match[0], match[0]), code)
    return ("#include <cuda_fp16.h>\n" if "__half" in text else "") + text


Launcher = Callable[[tuple[int], tuple[int], tuple[object, ...]], None]
"""A compiled kernel: ``kernel((blocks,), (threads,), args)`` enqueues it."""


@lru_cache(maxsize=1024)
def _compiled(maker: Callable[..., Launcher], code: str, name: str, types: tuple[tuple[str, DType], ...]) -> Launcher:
    return maker(text_of(code, **dict(types)), name, options=OPTIONS)


def kernel(xp: ArrayModule, code: str, name: str, **types: DType) -> Launcher:
    """Return the compiled kernel ``name`` of a source with the dtypes ``types``; see :func:`text_of`."""
    return _compiled(xp.RawKernel, code, name, tuple(sorted(types.items())))


def launch(
    xp: ArrayModule, code: str, name: str, blocks: int, threads: int, args: Sequence[object], **types: DType
) -> None:
    """Enqueue a kernel with ``blocks`` blocks of ``threads`` threads on the current stream; do nothing for 0 blocks.

    Raises:
        DeviceError: the source does not compile on this machine, or the compiler is missing.
    """
    if not blocks:
        return
    try:
        kernel(xp, code, name, **types)((blocks,), (threads,), tuple(args))
    except xp.cuda.compiler.CompileException as error:
        kinds = ", ".join(map(str, types.values())) or "any dtype"
        raise DeviceError(
            f"the kernel {name} for {kinds} does not compile with the CUDA libraries of this machine: {error}. "
            f"WEFTPLAN_KERNELS=numpy computes without kernels of the package; please report it"
        ) from error
    except ImportError as error:  # of CUDA's libraries, which CuPy loads when they are first needed
        raise DeviceError(
            f"the kernel {name} cannot be compiled: {error}. Only a driver seems to be installed: pip install "
            f"'weftplan[cuda12]' or 'weftplan[cuda13]' brings CUDA's libraries; `weftplan doctor` tries each"
        ) from error


def each(
    xp: ArrayModule, code: str, name: str, count: int, args: Sequence[object], *, lanes: int = 1, **types: DType
) -> None:
    """Enqueue a kernel with one thread per ``lanes`` of ``count`` elements; ``count`` becomes its last argument."""
    launch(xp, code, name, -(-count // (THREADS * lanes)), THREADS, (*args, count), **types)


def are_aligned(*arrays: RawArray) -> bool:
    """Return whether kernels may load and store vectors of :data:`ALIGNMENT` bytes in all arrays."""
    return all(pointer(array) % ALIGNMENT == 0 for array in arrays)


def width(count: int, highest: int = WIDE, *, terms: int = 1, least: int = 32) -> int:
    """Return the number of threads for adding ``count`` numbers, a power of two from ``least`` to ``highest``.

    Within these limits, it is the smallest power of two with at most ``terms`` numbers per thread.

    >>> width(1), width(100), width(10**6), width(1000, terms=16)
    (32, 128, 1024, 64)
    """
    threads = -(-count // terms)
    return min(highest, max(least, 1 << max(0, threads - 1).bit_length()))


def floats(*positions: int) -> Callable[[Params, Sequence[TensorSpec], Sequence[TensorSpec]], str]:
    """Return a refusal (:mod:`weftplan.ops.core.implementations`) of calls that kernels in CUDA C cannot compute.

    The inputs at ``positions`` must be float16, float32 or float64, and all arrays have fewer than 2^31 elements.
    """

    def refusal(params: Params, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
        for position in positions:
            dtype = inputs[position].dtype
            if not is_float(dtype) or dtype.name not in _NAMES:
                return f"written for float16, float32 and float64, not {dtype}"
        if any(math.prod(spec.shape) >= 1 << 31 for spec in (*inputs, *outputs)):
            return "written for arrays of fewer than 2^31 elements"
        return ""

    return refusal
