"""Random numbers on a GPU by Philox4x64-10, which computes the k-th number of a key only from the key and k.

So the numbers do not depend on the number of multiprocessors or on the order of threads. Uniform numbers equal those of
the host to the bit, because NumPy uses the same generator (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", 2011). Numbers of other distributions differ, because they are computed from uniform numbers by other methods than
NumPy's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weftplan.ops.core.cuda_source import each
from weftplan.support import slots
from weftplan.support.array_types import ArrayModule, DTypeLike, RawArray, ShapeLike

ROUNDS = """for (int round = 0; round < 10; ++round) {
        unsigned long long high0 = __umul64hi(0xD2E7470EE14C6C93ull, x0);
        unsigned long long high1 = __umul64hi(0xCA5A826395121157ull, x2);
        unsigned long long low0 = 0xD2E7470EE14C6C93ull * x0;
        unsigned long long low1 = 0xCA5A826395121157ull * x2;
        x0 = high1 ^ x1 ^ key0;
        x1 = low1;
        x2 = high0 ^ x3 ^ key1;
        x3 = low0;
        key0 += 0x9E3779B97F4A7C15ull;
        key1 += 0xBB67AE8584CAA73Bull;
    }"""
"""CUDA C that replaces the counter ``x0`` to ``x3`` by four random words, and changes the key ``key0``, ``key1``."""
PHILOX = """
__device__ unsigned long long philox(unsigned long long key0, unsigned long long key1, unsigned long long n) {
    unsigned long long x0 = n / 4ull + 1ull;  // NumPy counts from 1
    unsigned long long x1 = 0ull;
    unsigned long long x2 = 0ull;
    unsigned long long x3 = 0ull;
    ROUNDS
    int which = (int)(n % 4ull);
    return which == 0 ? x0 : (which == 1 ? x1 : (which == 2 ? x2 : x3));
}

__device__ float uniform_float(unsigned long long key0, unsigned long long key1, unsigned long long n) {
    unsigned long long word = philox(key0, key1, n / 2ull) >> (n % 2ull == 0ull ? 0 : 32) & 0xffffffffull;
    return (float)(word >> 8) * (1.0f / 16777216.0f);
}

__device__ double uniform_double(unsigned long long key0, unsigned long long key1, unsigned long long n) {
    return (double)(philox(key0, key1, n) >> 11) * (1.0 / 9007199254740992.0);
}

__device__ double normal(unsigned long long key0, unsigned long long key1, unsigned long long n) {
    double radius = sqrt(-2.0 * log1p(-uniform_double(key0, key1, n)));
    return radius * cos(6.283185307179586 * uniform_double(key0, key1, n + 1ull));
}
""".replace("ROUNDS", ROUNDS)
_FILL = (
    PHILOX
    + """
extern "C" __global__ void fill_uniform(T* out, unsigned long long key0, unsigned long long key1,
                                        unsigned long long first, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = (T)U(key0, key1, first + (unsigned long long)i);
}

extern "C" __global__ void fill_normal(T* out, unsigned long long key0, unsigned long long key1,
                                       unsigned long long first, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = (T)normal(key0, key1, first + 2ull * (unsigned long long)i);
}

extern "C" __global__ void fill_exponential(T* out, unsigned long long key0, unsigned long long key1,
                                            unsigned long long first, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) out[i] = (T)(-log1p(-uniform_double(key0, key1, first + (unsigned long long)i)));
}

extern "C" __global__ void fill_gamma(T* out, unsigned long long key0, unsigned long long key1,
                                      unsigned long long first, const double* shapes, int several, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    unsigned long long n = first + ((unsigned long long)i << 16);
    double shape = shapes[several == 1 ? i : 0ll];
    double boost = 1.0;
    if (shape < 1.0) {  // Marsaglia and Tsang (2000): a variate of shape + 1, times a power of a uniform number
        boost = pow(1.0 - uniform_double(key0, key1, n), 1.0 / shape);
        shape += 1.0;
    }
    double d = shape - 1.0 / 3.0;
    double c = 1.0 / sqrt(9.0 * d);
    double found = d;
    for (int tries = 0; tries < 20000; ++tries) {
        n += 3ull;
        double x = normal(key0, key1, n);
        double v = 1.0 + c * x;
        if (v <= 0.0) continue;
        v = v * v * v;
        double u = 1.0 - uniform_double(key0, key1, n + 2ull);
        if (log(u) < 0.5 * x * x + d - d * v + d * log(v)) {
            found = d * v;
            break;
        }
    }
    out[i] = (T)(shapes[several == 1 ? i : 0ll] == 0.0 ? 0.0 : found * boost);
}

extern "C" __global__ void fill_poisson(T* out, unsigned long long key0, unsigned long long key1,
                                        unsigned long long first, const double* rates, int several, long long count) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    unsigned long long n = first + ((unsigned long long)i << 16);
    double rate = rates[several == 1 ? i : 0ll];
    double found = 0.0;
    if (rate < 10.0) {  // products of uniform numbers: Knuth
        double product = 1.0 - uniform_double(key0, key1, n);
        double least = exp(-rate);
        while (product > least) {
            n += 1ull;
            found += 1.0;
            product *= 1.0 - uniform_double(key0, key1, n);
        }
    } else {  // transformed rejection: Hoermann (1993)
        double b = 0.931 + 2.53 * sqrt(rate);
        double a = -0.059 + 0.02483 * b;
        double inverse = 1.1239 + 1.1328 / (b - 3.4);
        double edge = 0.9277 - 3.6224 / (b - 2.0);
        for (int tries = 0; tries < 30000; ++tries) {
            double u = uniform_double(key0, key1, n) - 0.5;
            double v = 1.0 - uniform_double(key0, key1, n + 1ull);
            n += 2ull;
            double near = 0.5 - fabs(u);
            double k = floor((2.0 * a / near + b) * u + rate + 0.43);
            found = k;
            if (near >= 0.07 && v <= edge) break;
            if (k < 0.0 || (near < 0.013 && v > near)) continue;
            if (log(v) + log(inverse) - log(a / (near * near) + b) <= k * log(rate) - rate - lgamma(k + 1.0)) break;
        }
    }
    out[i] = (T)found;
}
"""
)
_MASK = 2**64 - 1
"""Mask of a 64-bit word, since Python's integers have no size."""
_WORDS_PER_ELEMENT = 1 << 16
"""Words of 64 bits that are reserved for one element of a distribution with rejection."""


class PhiloxGenerator:
    """The methods of :class:`numpy.random.Generator` that kernels use, on a GPU; one call of a kernel owns it."""

    def __init__(self, xp: ArrayModule, seed: int, counter: int) -> None:
        self._xp = xp
        self.key = (np.uint64(seed & _MASK), np.uint64(counter & _MASK))
        """The key of the generator, as two words of 64 bits."""
        self._halves = 0
        """Number of 32-bit words that have been used."""

    def _fill(self, name: str, out: RawArray, words: int, *more: object) -> RawArray:
        """Fill ``out`` by the kernel ``name``, reserving ``words`` words of 64 bits; return ``out``."""
        begin = (self._halves + 1) // 2
        self._halves = 2 * (begin + words)
        code = _FILL.replace("U(key0", "uniform_double(key0")
        each(self._xp, code, name, out.size, (out, *self.key, np.uint64(begin), *more), T=out.dtype)
        return out

    def _target(self, size: object, dtype: object, out: RawArray | None) -> RawArray:
        return self._xp.empty(() if size is None else size, dtype) if out is None else out

    def random(self, size: object = None, dtype: object = np.float64, out: RawArray | None = None) -> RawArray:
        """Return uniform numbers in [0, 1), equal to NumPy's for the same key."""
        target = self._target(size, dtype, out)
        if target.dtype == np.float64:
            return self._fill("fill_uniform", target, target.size)
        code = _FILL.replace("U(key0", "uniform_float(key0")
        begin = np.uint64(self._halves)
        self._halves += target.size
        each(self._xp, code, "fill_uniform", target.size, (target, *self.key, begin), T=target.dtype)
        return target

    def standard_normal(self, size: object = None, dtype: object = np.float64, out: RawArray | None = None) -> RawArray:
        """Return normal numbers, by the method of Box and Muller (1958)."""
        target = self._target(size, dtype, out)
        return self._fill("fill_normal", target, 2 * target.size)

    def standard_exponential(
        self, size: object = None, dtype: object = np.float64, out: RawArray | None = None
    ) -> RawArray:
        """Return exponential numbers, by the inverse of their distribution function."""
        target = self._target(size, dtype, out)
        return self._fill("fill_exponential", target, target.size)

    def standard_gamma(
        self, shape: RawArray | float, size: ShapeLike | None = None, dtype: DTypeLike = np.float64
    ) -> RawArray:
        """Return gamma numbers for one ``shape`` or an array of shapes, by Marsaglia and Tsang (2000)."""
        return self._by("fill_gamma", shape, size, dtype)

    def poisson(self, lam: RawArray | float, size: ShapeLike | None = None) -> RawArray:
        """Return Poisson numbers for one rate or an array of rates, by Knuth's method or Hörmann's (1993)."""
        return self._by("fill_poisson", lam, size, np.int64)

    def _by(self, name: str, parameter: RawArray | float, size: ShapeLike | None, dtype: DTypeLike) -> RawArray:
        several = getattr(parameter, "ndim", 0) > 0
        values: Any = parameter if several else self._xp.full((1,), parameter, np.float64)
        target = self._xp.empty(values.shape if size is None else size, dtype)
        return self._fill(name, target, target.size * _WORDS_PER_ELEMENT, values.reshape(-1), np.int32(several))


slots.RANDOM_GENERATOR.fill(PhiloxGenerator)
