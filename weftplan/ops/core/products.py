"""Parallel matrix products whose bits do not depend on the number of cores.

A BLAS with more threads adds in another order. So each BLAS call has one thread, and this module cuts a large product
into several calls, along the longer side of the result. The cuts follow from the sizes alone, on every machine and
engine; :mod:`weftplan.support.core_sharing` decides which core computes which part.

The bits do not depend on the operands' addresses either. From addresses and strides, NumPy recognizes a matrix that is
multiplied by its own transpose, and computes it by another routine (``syrk`` in place of ``gemm``), whose last bits
differ. So a plan in which two operands share memory could change results. Kernels therefore multiply through this
module, which never passes such a product to NumPy.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from weftplan.ops.core.cuda_gemm import DTYPES, gemm
from weftplan.support.array_types import ArrayModule, RawArray
from weftplan.support.core_sharing import split

FEW = 1 << 24
"""Minimum multiplications of a part: a third of a millisecond at 100 GFLOP/s. On one core, products of a small network
take 0 to 4 per cent longer if they are cut in two, and 3 to 9 per cent if in four."""
MOST = 4
"""Maximum parts of a product."""
SHARE = 4
"""Minimum ratio of the bytes of a convolution's arrays to the scratch of all its parts, if it has more than two
parts. An inference plan of inception_v3 for 8 images takes 71 MB uncut, 81 MB with this rule, and 85 MB with four parts
everywhere."""
STEP = 16
"""Parts begin at multiples of this, so that a BLAS computes whole tiles, except the last."""


def matmul(xp: ArrayModule, a: RawArray, b: RawArray, out: RawArray) -> None:
    """Compute ``out = a @ b`` for matrices on the calling thread; on a GPU without copies of transposed operands."""
    if xp is not np and out.dtype.name in DTYPES and a.dtype == b.dtype == out.dtype and a.size and b.size:
        gemm(xp, a, b, out)
    else:
        multiply(xp, a, b, out)


def multiply(xp: ArrayModule, a: RawArray, b: RawArray, out: RawArray) -> None:
    """Compute ``out = a @ b`` for matrices or stacks; the bits do not depend on whether ``a`` and ``b`` share memory.

    If ``b`` could be the transpose of ``a`` by shapes and strides, the columns are computed in two calls, at any
    addresses: then neither result is square. On AVX2 a product of 64 by 64 by 64 numbers takes 11 µs instead of 8. 128
    columns take 10 % longer, 256 columns 3 to 14 % (most for short sums), and 512 or more columns 2 to 4 %.
    """
    columns = out.shape[-1]
    if xp is np and columns == out.shape[-2] > 1 and a.strides[-2:] == b.strides[:-3:-1]:
        middle = _halfway(columns)
        np.matmul(a, b[..., :middle], out=out[..., :middle])
        np.matmul(a, b[..., middle:], out=out[..., middle:])
    else:
        xp.matmul(a, b, out=out)


def _halfway(columns: int) -> int:
    """Return the column at which ``columns`` columns are cut in two: a multiple of :data:`STEP` if there is one."""
    middle = -(-columns // (2 * STEP)) * STEP
    return middle if middle < columns else columns // 2


def ranges(size: int, count: int) -> list[slice]:
    """Return at most ``count`` ranges of nearly equal lengths that together cover 0 to ``size``.

    >>> ranges(5, 2), ranges(1, 2)
    ([slice(0, 2, None), slice(2, 5, None)], [slice(0, 1, None)])
    """
    ends = [size * number // count for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends) if start < stop]


def product(xp: ArrayModule, a: RawArray, b: RawArray, out: RawArray) -> None:
    """Compute ``out = a @ b`` for matrices; a large product on a host is cut into parts for several cores."""
    if xp is not np or out.size * a.shape[1] < 2 * FEW:
        matmul(xp, a, b, out)
    else:
        products((a, b, out))


def products(*operands: tuple[RawArray, RawArray, RawArray]) -> None:
    """Compute independent products ``(a, b, out)`` of matrices on a host; cores wait for each other only at the end."""
    parts = [part for arrays in operands for part in _parts(*arrays)]

    def compute(number: int) -> None:
        a, b, out = parts[number]
        multiply(np, a, b, out)

    if len(parts) > len(operands):
        split(compute, len(parts))
    else:  # all products are small
        for number in range(len(parts)):
            compute(number)


def _parts(a: RawArray, b: RawArray, out: RawArray) -> list[tuple[RawArray, RawArray, RawArray]]:
    """Return the parts of a product as smaller products (a, b, out); the product itself if it is small."""
    rows, columns = out.shape
    work = rows * columns * a.shape[1]
    if work < 2 * FEW:
        return [(a, b, out)]
    longer = max(rows, columns)
    parts = min(work // FEW, MOST) // 2 * 2  # three would leave one of two cores idle for a third of the time
    step = -(-longer // (parts * STEP)) * STEP
    ranges = [slice(start, start + step) for start in range(0, longer, step)]
    if columns >= rows:
        return [(a, b[:, part], out[:, part]) for part in ranges]
    return [(a[part], b, out[part]) for part in ranges]


def stacked_product(xp: ArrayModule, a: RawArray, b: RawArray, out: RawArray) -> None:
    """Compute ``out = a @ b`` for stacks of matrices; a large product on a host in parts for several cores.

    ``b`` and ``out`` have shape (batch, groups, …), ``a`` has shape (groups, …).
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
        images = slice(number * step, (number + 1) * step)
        multiply(np, a, b[images], out[images])

    split(part, -(-batch // step))
