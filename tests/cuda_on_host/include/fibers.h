// The threads of a block as fibers of one host thread, so that barriers and shuffles wait as they do on a GPU.
//
// One fiber runs at a time, from one barrier to the next; which comes first is drawn from a seed. Blocks run one after
// the other. Whatever goes wrong ends the launch: fail() keeps a text and leaves all fibers where they are.
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static const int warpSize = 32;

namespace host {

enum State { NEW, READY, AT_BARRIER, AT_WARP, DONE };
const int MOST = 1024;
const size_t STACK = 128 << 10;

struct Fiber {
    ucontext_t start;
    jmp_buf here;
    char* stack;
    bool begun;
};
struct Thread {
    State state;
    Fiber* fiber;
    int line;
    unsigned mask;
};
struct Slot {
    unsigned char bytes[8];
};

static char error[1024];
static Thread threads[MOST];
static Fiber fibers[MOST];
static Fiber* spare[MOST];
static int spares = -1;
static Slot slots[MOST];
static jmp_buf scheduler;
static int me, count;               // the running thread of the block, and how many there are
static long long block_number;      // of the grid
static unsigned epoch;              // barriers of the block that have been passed
static unsigned warp_epochs[MOST / 32];
static bool inside;                 // whether a fiber is running
static void (*body)();
static uint64_t chance;

[[noreturn]] static void fail(const char* format, ...) {
    char what[800];
    va_list given;
    va_start(given, format);
    vsnprintf(what, sizeof what, format, given);
    va_end(given);
    snprintf(error, sizeof error, "block %lld, thread %d: %s", block_number, me, what);
    if (!inside) abort();
    _longjmp(scheduler, 2);
}

static void pause() {
    if (_setjmp(threads[me].fiber->here) == 0) _longjmp(scheduler, 1);
}

static void entry() {
    for (;;) {
        body();
        threads[me].state = DONE;
        pause();
    }
}

static void forget_fibers() {
    for (int k = 0; k < MOST; ++k) {
        fibers[k].begun = false;
        spare[k] = fibers + k;
    }
    spares = MOST;
}

// Runs thread t until it waits or ends; false where it has failed.
__attribute__((noinline)) static bool resume(int t) {
    me = t;
    threadIdx.x = t % blockDim.x;
    threadIdx.y = t / blockDim.x % blockDim.y;
    threadIdx.z = t / (blockDim.x * blockDim.y);
    Fiber* fiber = threads[t].fiber;
    int how = _setjmp(scheduler);
    if (how == 0) {
        inside = true;
        if (fiber->begun) _longjmp(fiber->here, 1);
        fiber->begun = true;
        if (!fiber->stack)
            fiber->stack = (char*)mmap(0, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        getcontext(&fiber->start);
        fiber->start.uc_stack.ss_sp = fiber->stack;
        fiber->start.uc_stack.ss_size = STACK;
        fiber->start.uc_link = 0;
        makecontext(&fiber->start, entry, 0);
        setcontext(&fiber->start);
    }
    inside = false;
    return how == 1;
}

static uint64_t draw() {
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return chance;
}

// Seed 0: in their order; 1: the last comes first; others: shuffled.
static void order_of(int* order, int n, unsigned seed) {
    for (int k = 0; k < n; ++k) order[k] = seed == 1 ? n - 1 - k : k;
    if (seed < 2) return;
    for (int k = n - 1; k > 0; --k) {
        int other = (int)(draw() % (uint64_t)(k + 1));
        int kept = order[k];
        order[k] = order[other];
        order[other] = kept;
    }
}

static bool refuse(const char* what, int t) {
    me = t;
    snprintf(error, sizeof error, "block %lld, thread %d: %s", block_number, t, what);
    return false;
}

// Lets the warps go on of which all lanes of a mask have come; false where a lane waits for one that never comes.
static bool release_warps(bool* some) {
    for (int t = 0; t < count; ++t) {
        if (threads[t].state != AT_WARP) continue;
        unsigned mask = threads[t].mask;
        int first = t / 32 * 32;
        bool whole = true;
        for (int lane = 0; lane < 32; ++lane) {
            if (!(mask >> lane & 1)) continue;
            int other = first + lane;
            if (other >= count || threads[other].state == DONE)
                return refuse("waits for lanes of its warp that have ended, or are not there", t);
            whole = whole && threads[other].state == AT_WARP && threads[other].mask == mask;
        }
        if (!whole) continue;
        for (int lane = 0; lane < 32; ++lane)
            if (mask >> lane & 1) threads[first + lane].state = READY;
        if (mask == 0xffffffffu) ++warp_epochs[t / 32];
        *some = true;
    }
    return true;
}

static bool run_block(unsigned seed) {
    static int order[MOST];
    if (spares < 0) forget_fibers();
    for (int t = 0; t < count; ++t) threads[t].state = NEW;
    epoch = 0;
    memset(warp_epochs, 0, sizeof warp_epochs);
    for (;;) {
        order_of(order, count, seed);
        for (int k = 0; k < count; ++k) {
            Thread& thread = threads[order[k]];
            if (thread.state == NEW) {
                thread.fiber = spare[--spares];
                thread.state = READY;
            }
            if (thread.state != READY) continue;
            if (!resume(order[k])) return false;
            if (thread.state == DONE) spare[spares++] = thread.fiber;
        }
        int at_barrier = 0, at_warp = 0, one = -1;
        for (int t = 0; t < count; ++t) {
            at_barrier += threads[t].state == AT_BARRIER;
            at_warp += threads[t].state == AT_WARP;
            if (threads[t].state == AT_BARRIER) one = t;
        }
        if (!at_barrier && !at_warp) return true;
        bool some = false;
        if (!release_warps(&some)) return false;
        if (some) continue;
        if (at_barrier < count)
            return refuse("__syncthreads() or a shuffle is reached by some threads of a block only", one < 0 ? 0 : one);
        for (int t = 0; t < count; ++t) {
            if (threads[t].line != threads[0].line)
                return refuse("threads of a block wait at different calls of __syncthreads()", t);
            threads[t].state = READY;
        }
        ++epoch;
    }
}

static void barrier(int line) {
    threads[me].state = AT_BARRIER;
    threads[me].line = line;
    pause();
}

static void warp_barrier(unsigned mask) {
    if (!(mask >> me % 32 & 1)) fail("a lane is not in the mask %#x of its own shuffle", mask);
    threads[me].state = AT_WARP;
    threads[me].mask = mask;
    pause();
}

// What lane `source` of the warp gives, or the own value where there is no such lane.
template <class V> V exchanged(unsigned mask, V value, int source) {
    static_assert(sizeof(V) <= sizeof(Slot), "a shuffle moves at most 8 bytes");
    V found = value;
    memcpy(slots[me].bytes, &value, sizeof value);
    warp_barrier(mask);
    if (source >= 0) {
        if (!(mask >> source & 1)) fail("a shuffle reads lane %d, which is not in its mask %#x", source, mask);
        memcpy(&found, slots[me / 32 * 32 + source].bytes, sizeof found);
    }
    warp_barrier(mask);
    return found;
}

static unsigned ballot(unsigned mask, bool yes) {
    int first = me / 32 * 32;
    slots[me].bytes[0] = yes;
    warp_barrier(mask);
    unsigned found = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) found |= (unsigned)slots[first + lane].bytes[0] << lane;
    warp_barrier(mask);
    return found;
}

}  // namespace host
