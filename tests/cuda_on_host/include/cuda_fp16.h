// CUDA's half: loaded, stored, and cast; nearest even. Text that computes with it does not compile.
#pragma once
#include <math.h>

struct __half {
    _Float16 value;
    __half() = default;
    template <class V> explicit __half(V given) : value((_Float16)given) {}
    explicit operator float() const { return (float)value; }
    explicit operator double() const { return (double)value; }
};
inline float __half2float(__half x) { return (float)x; }
inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }

// CuPy's own half, which its elementwise kernels use.
struct float16 {
    _Float16 value;
    float16() = default;
    float16(float given) : value((_Float16)given) {}
    operator float() const { return (float)value; }
};
