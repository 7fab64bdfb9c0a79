"""Parallel matrix products whose bits do not depend on the number of cores.

A BLAS with more threads adds in another order, so each BLAS call has one thread, and a large product is cut here into
several calls, along the longer side of the result. The cuts follow from the sizes alone, on every machine and engine;
:mod:`weftplan.support.core_sharing` decides which core computes which part.

The bits do not depend on the operands' addresses either. NumPy recognizes a matrix that is multiplied by its own
transpose, by address and strides, and computes it by another routine (``syrk`` in place of ``gemm``), whose last bits
differ. A plan that lets two operands share memory would then change results, so kernels multiply through this module,
which never passes NumPy such a product.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from weftplan.ops.core.cuda_gemm import DTYPES, gemm
from weftplan.support.array_types import ArrayModule, RawArray
from weftplan.support.core_sharing import split

FEW = 1 << 24
"""Multiplications of one part: a third of a millisecond at 100 GFLOP/s. Cutting products of a small network in two
costs 0 to 4 per cent of them on one core, and in four 3 to 9."""
MOST = 4
"""Parts of one product."""
SHARE = 4
"""Minimum ratio of the bytes of a convolution's arrays to the scratch of all its parts, if it has more than two
parts: an inference plan of inception_v3 for 8 images takes 71 MB uncut, 81 with this rule, 85 with four parts
everywhere."""
STEP = 16
"""Parts begin at multiples of this, so that a BLAS works on whole tiles but for the last."""


def matmul(xp: ArrayModule, a: RawArray, b: RawArray, out: RawArray) -> None:
    """Compute ``out = a @ b`` for matrices in one call; on a GPU, non-contiguous rows are not copied."""
    if xp is not np and out.dtype.name in DTYPES and a.dtype == b.dtype == out.dtype and a.size and b.size:
        gemm(xp, a, b, out)
    else:
        multiply(xp, a, b, out)


def multiply(xp: ArrayModule, a: RawArray, b: RawArray, out: RawArray) -> None:
    """Compute ``out = a @ b`` for matrices or stacks; the bits do not depend on whether ``a`` and ``b`` share memory.

    Where shapes and strides would let ``b`` be the transpose of ``a``, the columns are computed in two calls, wherever
    the two lie: neither call has as many columns as rows then. On AVX2 that costs 3 µs on 8 for 64 by 64 by 64 numbers,
    10 % for 128 columns, 3 to 14 % for 256, the most where sums are short, and 2 to 4 % for 512 and more.
    """
    columns = out.shape[-1]
    if xp is np and columns == out.shape[-2] > 1 and a.strides[-2:] == b.strides[:-3:-1]:
        middle = _halfway(columns)
        np.matmul(a, b[..., :middle], out=out[..., :middle])
        np.matmul(a, b[..., middle:], out=out[..., middle:])
    else:
        xp.matmul(a, b, out=out)


def _halfway(columns: int) -> int:
    """Return the first column of the second of two calls that together compute ``columns`` columns."""
    middle = -(-columns // (2 * STEP)) * STEP
    return middle if middle < columns else columns // 2


def ranges(size: int, count: int) -> list[slice]:
    """Return at most ``count`` ranges of nearly equal lengths that together cover 0 to ``size``.

    >>> ranges(5, 2), ranges(1, 2)
    ([slice(0, 2, None), slice(2, 5, None)], [slice(0, 1, None)])
    """
    ends = [size * number // count for number in range(count + 1)]
    return [slice(first, last) for first, last in pairwise(ends) if first < last]


def product(xp: ArrayModule, a: RawArray, b: RawArray, out: RawArray) -> None:
    """Compute the same, on several cores of a host if that pays."""
    if xp is not np or out.size * a.shape[1] < 2 * FEW:
        matmul(xp, a, b, out)
    else:
        products((a, b, out))


def products(*each: tuple[RawArray, RawArray, RawArray]) -> None:
    """Compute several independent products on a host; the cores wait for each other once."""
    parts = [part for one in each for part in _parts(*one)]

    def compute(number: int) -> None:
        a, b, out = parts[number]
        multiply(np, a, b, out)

    if len(parts) > len(each):
        split(compute, len(parts))
    else:  # all are small
        for number in range(len(parts)):
            compute(number)


def _parts(a: RawArray, b: RawArray, out: RawArray) -> list[tuple[RawArray, RawArray, RawArray]]:
    """Return the smaller products that make up a product."""
    rows, columns = out.shape
    work = rows * columns * a.shape[1]
    if work < 2 * FEW:
        return [(a, b, out)]
    longer = max(rows, columns)
    parts = min(work // FEW, MOST) // 2 * 2  # three would leave one of two cores idle for a third of the time
    step = -(-longer // (parts * STEP)) * STEP
    ranges = [slice(first, first + step) for first in range(0, longer, step)]
    if columns >= rows:
        return [(a, b[:, some], out[:, some]) for some in ranges]
    return [(a[some], b, out[some]) for some in ranges]


def stacked_product(xp: ArrayModule, a: RawArray, b: RawArray, out: RawArray) -> None:
    """Compute ``out = a @ b`` for stacks of matrices, on a GPU in one call.

    ``b`` and ``out`` have shape (batch, groups, …), ``a`` has (groups, …).
    """
    batch = out.shape[0]
    parts = min(out.size * a.shape[-1] // FEW, MOST, batch)
    if xp is not np or parts < 2:
        if batch == 1 and out.shape[1] == 1:
            product(xp, a[0], b[0, 0], out[0, 0])
        else:
            multiply(xp, a, b, out)
        return
    step = -(-batch // parts)

    def part(number: int) -> None:
        some = slice(number * step, (number + 1) * step)
        multiply(np, a, b[some], out[some])

    split(part, -(-batch // step))
