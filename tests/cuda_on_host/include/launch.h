// Launching a kernel from outside: what its parameters are, by the compiler's word, and a call for every thread.
#pragma once
#include "cuda.h"
#include "cuda_fp16.h"

namespace host {

template <class T> struct name_of;
#define HOST_NAME(T, text) \
    template <> struct name_of<T> { static const char* get() { return text; } }; \
    template <> struct name_of<ptr<T>> { static const char* get() { return text "*"; } }; \
    template <> struct name_of<ptr<const T>> { static const char* get() { return "const " text "*"; } };
HOST_NAME(bool, "bool")
HOST_NAME(signed char, "int8")
HOST_NAME(unsigned char, "uint8")
HOST_NAME(int, "int32")
HOST_NAME(unsigned, "uint32")
HOST_NAME(long long, "int64")
HOST_NAME(unsigned long long, "uint64")
HOST_NAME(__half, "float16")
HOST_NAME(float16, "float16")
HOST_NAME(float, "float32")
HOST_NAME(double, "float64")

struct Argument {
    const void* value;  // of a number: where its bytes are
    Region* region;     // of a pointer
};
static const Argument* given;

template <class P> struct passed {
    static P get(const Argument& a) {
        P found;
        memcpy((void*)&found, a.value, sizeof found);
        return found;
    }
};
template <class T> struct passed<ptr<T>> {
    static ptr<T> get(const Argument& a) { return {a.region, 0}; }
};

template <int... K> struct places {};
template <int N, int... K> struct up_to : up_to<N - 1, N - 1, K...> {};
template <int... K> struct up_to<0, K...> { typedef places<K...> type; };

template <auto kernel> struct Kernel;
template <class... P, void (*kernel)(P...)> struct Kernel<kernel> {
    static const char* signature() {
        static char text[8192];
        if (!text[0]) (add(text, name_of<P>::get()), ...);
        return text;
    }
    static void add(char* text, const char* more) {
        if (text[0]) strcat(text, ",");
        strcat(text, more);
    }
    template <int... K> static void call(places<K...>) { kernel(passed<P>::get(given[K])...); }
    static void thread() { call(typename up_to<sizeof...(P)>::type()); }

    // Runs a grid, or only some of its blocks; the text of what went wrong, or null.
    static const char* launch(const unsigned* grid, const unsigned* block, const Argument* arguments, unsigned seed,
                              const uint64_t* only, unsigned some) {
        gridDim = {grid[0], grid[1], grid[2]};
        blockDim = {block[0], block[1], block[2]};
        count = (int)(block[0] * block[1] * block[2]);
        given = arguments;
        body = thread;
        chance = 0x9E3779B97F4A7C15ull * (seed + 1);
        ++launches;
        error[0] = 0;
        uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2], start = 0, stride = 1;
        if (seed == 1) {
            start = stride = blocks - 1;
        } else if (seed > 1) {
            start = draw() % blocks;
            do stride = draw() % blocks; while (common(stride, blocks) != 1);
        }
        for (uint64_t k = 0, next = start; k < (some ? some : blocks); ++k, next = (next + stride) % blocks) {
            uint64_t at = some ? only[k] : next;
            block_number = (long long)at;
            blockIdx = {(unsigned)(at % grid[0]), (unsigned)(at / grid[0] % grid[1]), (unsigned)(at / grid[0] / grid[1])};
            if (!run_block(seed)) {
                forget_fibers();
                return error;
            }
        }
        return 0;
    }
    static uint64_t common(uint64_t a, uint64_t b) {
        while (b) {
            uint64_t rest = a % b;
            a = b;
            b = rest;
        }
        return a;
    }
};

}  // namespace host

// What the compiler calls where a thread does what C leaves undefined (-fsanitize).
#define HOST_UNDEFINED(name, what) \
    extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_##name(void* where, ...) { \
        struct Place { const char* file; unsigned line, column; }; \
        host::fail(what " in line %u of %s", ((Place*)where)->line, ((Place*)where)->file); \
    }
HOST_UNDEFINED(add_overflow, "an addition overflows")
HOST_UNDEFINED(sub_overflow, "a subtraction overflows")
HOST_UNDEFINED(mul_overflow, "a multiplication overflows")
HOST_UNDEFINED(negate_overflow, "a negation overflows")
HOST_UNDEFINED(divrem_overflow, "a division by 0, or one that overflows,")
HOST_UNDEFINED(shift_out_of_bounds, "a shift by too many bits")
HOST_UNDEFINED(out_of_bounds, "an index beyond a local array")
HOST_UNDEFINED(float_cast_overflow, "a cast of a float that does not fit")
HOST_UNDEFINED(load_invalid_value, "a value that its type does not have")
