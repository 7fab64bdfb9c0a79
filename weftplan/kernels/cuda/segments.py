"""Sums of slices by index, without atomic additions, whose order and rounding would vary from run to run.

The pairs (index, position) are sorted as integers, which are distinct. The slices of each index are then added in the
order of their positions, as on a CPU.
"""

from __future__ import annotations

import numpy as np

from weftplan.ops.core.cuda_source import each, launch
from weftplan.ops.core.kernels import accumulator
from weftplan.ops.core.schema import DType, OpContext, Shape
from weftplan.support.array_types import ArrayModule, RawArray

KEY = np.dtype(np.uint64)
TILE = 2048
"""Keys that a block sorts in shared memory."""

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
PIECE = 1024
"""Maximum number of terms that one thread adds; a longer sum is cut into pieces of this number of terms."""
_SUM = """
__device__ unsigned int start_of(const unsigned long long* keys, unsigned int end, unsigned long long row) {
    unsigned int low = 0;  // the first of the sorted keys below end that names the row
    unsigned int high = end;
    while (low < high) {
        unsigned int middle = (low + high) / 2;
        if (keys[middle] >> 32 < row) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

extern "C" __global__ void sum_slices(const unsigned long long* keys, const T* source, T* out, A* parts, long long n,
                                      long long rows, long long inner, long long outer, long long count) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (unsigned int)count) return;
    unsigned int slice = (unsigned int)(outer * inner);
    unsigned int wide = (unsigned int)inner;
    unsigned int size = (unsigned int)n;
    unsigned int place = i / slice;
    unsigned int o = (i - place * slice) / wide;
    unsigned int w = i - place * slice - o * wide;
    unsigned long long row = keys[place] >> 32;
    if (row == 0xffffffffull) return;
    bool first = place == 0 || keys[place - 1] >> 32 != row;
    if (!first) {
        if (place < PIECE || keys[place - PIECE] >> 32 != row) return;
        if ((place - start_of(keys, place, row)) % PIECE != 0) return;
    }
    A sum = (A)0;
    unsigned int end = place + PIECE < size ? place + PIECE : size;
    unsigned int j = place;
    for (; j < end; ++j) {
        unsigned long long key = keys[j];
        if (key >> 32 != row) break;
        sum += (A)source[((unsigned int)o * size + (unsigned int)(key & 0xffffffffull)) * wide + w];
    }
    bool more = j < size && j == place + PIECE && keys[j] >> 32 == row;
    if (first && !more) {
        out[(o * (unsigned int)rows + (unsigned int)row) * wide + w] = (T)sum;
    } else {
        unsigned int slot = place / PIECE + (first ? (size + PIECE - 1) / PIECE : 0u);
        parts[slot * slice + o * wide + w] = sum;
    }
}

extern "C" __global__ void join_pieces(const unsigned long long* keys, const A* parts, T* out, long long n,
                                       long long rows, long long inner, long long outer, long long count) {
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (unsigned int)count) return;
    unsigned int slice = (unsigned int)(outer * inner);
    unsigned int wide = (unsigned int)inner;
    unsigned int size = (unsigned int)n;
    unsigned int slot = i / slice;
    unsigned int at = i - slot * slice;
    unsigned int o = at / wide;
    unsigned int w = at - o * wide;
    unsigned int next = (slot + 1) * PIECE;
    if (next >= size) return;
    unsigned long long row = keys[next] >> 32;
    if (row == 0xffffffffull) return;
    unsigned int first = start_of(keys, next, row);  // a sum of several pieces that begins before this place
    if (first < slot * PIECE || first == next) return;
    unsigned int place = first + PIECE;
    if (place >= size || keys[place] >> 32 != row) return;
    A sum = parts[((size + PIECE - 1) / PIECE + slot) * slice + at];
    for (; place < size; place += PIECE) {
        if (keys[place] >> 32 != row) break;
        sum += parts[place / PIECE * slice + at];
    }
    out[(o * (unsigned int)rows + (unsigned int)row) * wide + w] = (T)sum;
}
""".replace("PIECE", f"{PIECE}u")


def keys_scratch(count: int) -> tuple[Shape, DType]:
    """Return the shape and dtype of the array that :func:`sort` needs for ``count`` keys: a power of two.

    >>> keys_scratch(5)
    ((8,), dtype('uint64'))
    """
    return (1 << max(1, (count - 1).bit_length()),), KEY


def sort(xp: ArrayModule, keys: RawArray) -> None:
    """Sort keys in place by Batcher's bitonic sort; their number is a power of two."""
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
    """Set each row of ``out`` to the sum of the slices of ``source`` whose index is that row.

    Terms are added in the order of their positions, so a sum of at most :data:`PIECE` terms equals the host's to the
    bit. A longer sum is added in pieces, and then the pieces in order. Its error is at most (PIECE + terms / PIECE)
    roundings of the sum of the absolute terms; a host's error is at most as many roundings as there are terms.

    Args:
        ctx: the call, whose workspace has the arrays of :func:`sums_scratch`.
        index: the row of ``out`` for each position.
        mode: ``wrap`` takes indices modulo the number of rows; any other mode clips them.
        source: array of shape (outer, positions, inner).
        out: array of shape (outer, rows, inner).
    """
    xp = ctx.xp
    outer, rows, inner = out.shape
    index = index.reshape(-1)
    keys, parts = (ctx.take(*spec) for spec in sums_scratch(index.size, outer * inner, out.dtype))
    wrap = int(mode == "wrap")
    each(xp, _INDEX, "index_keys", keys.size, (index, keys, index.size, rows, wrap), I=index.dtype)
    sort(xp, keys)
    out.fill(0)
    extents = (index.size, rows, inner, outer)
    args = (keys, source, out, parts, *extents)
    each(xp, _SUM, "sum_slices", index.size * outer * inner, args, T=out.dtype)
    if index.size > PIECE:
        slots = -(-index.size // PIECE)
        each(xp, _SUM, "join_pieces", slots * outer * inner, (keys, parts, out, *extents), T=out.dtype)


def sums_scratch(count: int, width: int, dtype: DType) -> list[tuple[Shape, DType]]:
    """Return the shapes and dtypes of scratch that :func:`add_slices` needs: keys, and the sums of pieces.

    Args:
        count: number of indices.
        width: elements of a slice, over ``outer`` and ``inner``.
        dtype: dtype of the result.
    """
    pieces = 2 * -(-count // PIECE) if count > PIECE else 0
    return [keys_scratch(count), ((max(1, pieces * width),), accumulator(dtype))]
