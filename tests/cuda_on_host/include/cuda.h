// The names of CUDA C that kernels use, for a C++ compiler of the host.
#pragma once
#include <limits.h>
#include <math.h>
#include <stddef.h>

#include "memory.h"

#define __global__ static
#define __device__ static
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __launch_bounds__(...)
#define __syncthreads() host::barrier(__LINE__)
#define __syncwarp(...) host::warp_barrier(host::mask_of(__VA_ARGS__))

namespace host {

inline unsigned mask_of(unsigned mask = 0xffffffffu) { return mask; }

// A cast to a whole number: floats end at its bounds, and what is no number becomes what PTX says of cvt.
template <class W> struct whole {
    W value;
    template <class V> static W cut(V x) {
        const bool wide = sizeof(V) == 8 || sizeof(W) == 8;
        const int bits = sizeof(W) == 8 ? 64 : 32;  // narrower ones are cut off from an int
        const bool negative = (W)-1 < (W)0 || sizeof(W) < 4;
        const double low = negative ? -ldexp(1.0, bits - 1) : 0.0, high = ldexp(1.0, negative ? bits - 1 : bits);
        if (isnan(x)) return wide ? (W)(1ull << (bits - 1)) : (W)0;
        if ((double)x >= high) return negative ? (W)((1ull << (bits - 1)) - 1) : (W)-1;
        if ((double)x <= low) return negative ? (W)(1ull << (bits - 1)) : (W)0;
        return negative ? (W)(long long)x : (W)(unsigned long long)x;
    }
    explicit whole(float x) : value(cut(x)) {}
    explicit whole(double x) : value(cut(x)) {}
    template <class V> explicit whole(V x) : value(other(x, 0)) {}
    operator W() const { return value; }

private:
    template <class V> static auto other(const V& x, int) -> decltype((W)(float)x.load()) { return whole(x.load()).value; }
    template <class V> static auto other(const V& x, long) -> decltype((W)x) { return (W)x; }
    template <class V> static W other(const V& x, ...) { return cut((float)x); }
};

}  // namespace host

template <class V> V __ldg(host::ptr<const V> p) { return *p; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
#define HOST_EXTREMES(V) \
    inline V min(V a, V b) { return b < a ? b : a; } \
    inline V max(V a, V b) { return a < b ? b : a; }
HOST_EXTREMES(int)
HOST_EXTREMES(unsigned)
HOST_EXTREMES(long long)
HOST_EXTREMES(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// Whole numbers only: sums of floats by atomics have no fixed order. Other threads may add to the same element.
#define HOST_ATOMIC(V) \
    inline V atomicAdd(host::ptr<V> p, V v) { \
        V* found = (V*)host::checked(p.r, p.at, sizeof(V), "adds to"); \
        V before = *found; \
        *found = before + v; \
        return before; \
    }
HOST_ATOMIC(int)
HOST_ATOMIC(unsigned)
HOST_ATOMIC(unsigned long long)

template <class V> V __shfl_sync(unsigned mask, V value, int lane, int width = 32) {
    int here = host::me % 32;
    return host::exchanged(mask, value, here / width * width + lane % width);
}
template <class V> V __shfl_down_sync(unsigned mask, V value, unsigned by, int width = 32) {
    int here = host::me % 32;
    return host::exchanged(mask, value, here % width + (int)by < width ? here + (int)by : -1);
}
template <class V> V __shfl_up_sync(unsigned mask, V value, unsigned by, int width = 32) {
    int here = host::me % 32;
    return host::exchanged(mask, value, here % width >= (int)by ? here - (int)by : -1);
}
template <class V> V __shfl_xor_sync(unsigned mask, V value, int with, int width = 32) {
    int here = host::me % 32, there = here ^ with;
    return host::exchanged(mask, value, there / width <= here / width ? there : -1);
}
inline unsigned __ballot_sync(unsigned mask, int yes) { return host::ballot(mask, yes != 0); }
inline int __any_sync(unsigned mask, int yes) { return host::ballot(mask, yes != 0) != 0; }
inline int __all_sync(unsigned mask, int yes) { return host::ballot(mask, yes != 0) == mask; }
