"""Sums of slices by index without atomics: slices are sorted by index, and each index adds up its own in their order.

Atomic additions of floats come in any order, and so do their rounding errors. Here the pairs (index, position) are
sorted as whole numbers, of which no two are alike, so the order of additions is that of the positions, as on a CPU.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np

from weftplan.ops.core.cuda_source import each, launch
from weftplan.ops.core.schema import DType, OpContext, Shape
from weftplan.support.array_types import RawArray

KEY = np.dtype(np.uint64)
TILE = 2048
"""Keys that one block sorts in shared memory."""

SORT = """
extern "C" __global__ void sort_tile(unsigned long long* keys, long long first, long long tile) {
    __shared__ unsigned long long s[2048];
    int t = threadIdx.x;
    int half = blockDim.x;
    long long base = blockIdx.x * tile;
    s[t] = keys[base + t];
    s[t + half] = keys[base + t + half];
    long long last = first > tile ? first : tile;
    for (long long k = first; k <= last; k *= 2) {
        for (int j = (int)((k > tile ? tile : k) / 2); j > 0; j /= 2) {
            __syncthreads();
            int i = t / j * 2 * j + t % j;
            unsigned long long x = s[i];
            unsigned long long y = s[i + j];
            bool up = ((base + i) & k) == 0;
            if ((x > y) == up) {
                s[i] = y;
                s[i + j] = x;
            }
        }
    }
    __syncthreads();
    keys[base + t] = s[t];
    keys[base + t + half] = s[t + half];
}

extern "C" __global__ void sort_step(unsigned long long* keys, long long k, long long j, long long pairs) {
    long long t = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= pairs) return;
    long long i = t / j * 2 * j + t % j;
    unsigned long long x = keys[i];
    unsigned long long y = keys[i + j];
    bool up = (i & k) == 0;
    if ((x > y) == up) {
        keys[i] = y;
        keys[i + j] = x;
    }
}
"""
_INDEX = """
extern "C" __global__ void index_keys(const I* index, unsigned long long* keys, long long n, long long size,
                                      long long wrap, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    unsigned long long key = 0xffffffffffffffffull;
    if (i < n) {
        long long row = (long long)index[i];
        if (wrap != 0) {
            row = row % size;
            if (row < 0) row += size;
        } else {
            row = row < 0ll ? 0ll : (row >= size ? size - 1 : row);
        }
        key = (unsigned long long)row << 32 | (unsigned long long)i;
    }
    keys[i] = key;
}
"""
_SUM = """
extern "C" __global__ void sum_slices(const unsigned long long* keys, const T* source, T* out, long long n,
                                      long long rows, long long inner, long long outer, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    long long place = i / (outer * inner);
    long long o = i / inner % outer;
    long long w = i % inner;
    unsigned long long row = keys[place] >> 32;
    if (row == 0xffffffffull) return;
    if (place > 0 && keys[place - 1] >> 32 == row) return;
    A sum = (A)0;
    for (long long j = place; j < n; ++j) {
        unsigned long long key = keys[j];
        if (key >> 32 != row) break;
        sum += (A)source[(o * n + (long long)(key & 0xffffffffull)) * inner + w];
    }
    out[(o * rows + (long long)row) * inner + w] = (T)sum;
}
"""


def room(count: int) -> tuple[Shape, DType]:
    """What :func:`sort` needs for ``count`` keys: a power of two of them.

    >>> room(5)
    ((8,), dtype('uint64'))
    """
    return (1 << max(1, (count - 1).bit_length()),), KEY


def sort(xp: ModuleType, keys: RawArray) -> None:
    """Sort keys, of which no two are alike but those of nobody, in place: Batcher's bitonic sort."""
    count = keys.size
    tile = min(TILE, count)
    launch(xp, SORT, "sort_tile", count // tile, tile // 2, (keys, 2, tile))
    k = 2 * tile
    while k <= count:
        j = k // 2
        while j >= tile:
            each(xp, SORT, "sort_step", count // 2, (keys, k, j))
            j //= 2
        launch(xp, SORT, "sort_tile", count // tile, tile // 2, (keys, k, tile))
        k *= 2


def add_slices(ctx: OpContext, index: RawArray, mode: str, source: RawArray, out: RawArray) -> None:
    """``out`` (outer, rows, inner) = for each row the sum of the places of ``source`` whose index names it.

    ``source`` is (outer, places, inner). Takes :func:`room` of the places.
    """
    xp = ctx.xp
    outer, rows, inner = out.shape
    index = index.reshape(-1)
    keys = ctx.take(*room(index.size))
    wrap = int(mode == "wrap")
    each(xp, _INDEX, "index_keys", keys.size, (index, keys, index.size, rows, wrap), I=index.dtype)
    sort(xp, keys)
    out.fill(0)
    args = (keys, source, out, index.size, rows, inner, outer)
    each(xp, _SUM, "sum_slices", index.size * outer * inner, args, T=out.dtype)
