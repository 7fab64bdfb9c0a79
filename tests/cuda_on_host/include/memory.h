// Checked pointers: every access is within its array, and ordered against those of other threads.
//
// A cell that one thread has written may be read or written by another thread of its block only behind a barrier, and by
// a thread of another block not at all; the same holds for a write behind another's read. Shared memory is read only
// where a thread of the block has written it.
#pragma once
#include "fibers.h"

namespace host {

struct Moment {
    long long thread;  // number in the grid + 1; 0: nobody; SEVERAL: several threads of one block since its last barrier
    unsigned epoch, warp_epoch;
    int warp;          // of the block; -1: several
};
const long long SEVERAL = -1;

struct Cell {
    Moment written, read;
    long long readers_block;  // -1: several blocks
};

struct Region {
    void* data;
    long long size;
    const char* name;
    Cell* cells;      // of what no thread writes there are none
    bool shared;
    unsigned launch;  // shared memory: the launch whose marks it holds
};

static unsigned launches;

inline long long number() {
    return block_number * count + me + 1;
}

inline Moment now() {
    return {number(), epoch, warp_epochs[me / 32], me / 32};
}

// Whether a barrier stands between an access of this block and now.
inline bool ordered(const Moment& then) {
    return then.epoch != epoch || (then.warp == me / 32 && then.warp_epoch != warp_epochs[me / 32]);
}

inline long long block_of(const Moment& moment) {
    return (moment.thread - 1) / count;
}

[[noreturn]] inline void race(const Region* r, long long at, const char* verb, const Moment& other) {
    if (other.thread == SEVERAL) fail("race: it %s element %lld of %s several threads", verb, at, r->name);
    fail("race: it %s element %lld of %s block %lld, thread %lld", verb, at, r->name, block_of(other),
         (other.thread - 1) % count);
}

inline void note_read(Region* r, long long at) {
    Cell& cell = r->cells[at];
    const Moment& w = cell.written;
    if (r->shared && (!w.thread || block_of(w) != block_number))
        fail("it reads element %lld of %s, which no thread of the block has written", at, r->name);
    if (w.thread && w.thread != number() && (block_of(w) != block_number || !ordered(w)))
        race(r, at, "reads, without a barrier between,", w);
    Moment& seen = cell.read;
    bool first = !seen.thread || (r->shared && cell.readers_block != block_number);
    if (first) {
        seen = now();
        cell.readers_block = block_number;
    } else if (cell.readers_block != block_number) {
        cell.readers_block = -1;
    } else if (seen.thread == number() || ordered(seen)) {
        seen = now();
    } else {
        seen.thread = SEVERAL;
        if (seen.warp != me / 32) seen.warp = -1;
        seen.warp_epoch = warp_epochs[me / 32];
    }
}

inline void note_write(Region* r, long long at) {
    Cell& cell = r->cells[at];
    const Moment &w = cell.written, &seen = cell.read;
    bool stale = r->shared && w.thread && block_of(w) != block_number;
    if (w.thread && !stale && w.thread != number() && (block_of(w) != block_number || !ordered(w)))
        race(r, at, "writes, as another thread does,", w);
    if (seen.thread && !(r->shared && cell.readers_block != block_number)) {
        if (cell.readers_block != block_number) fail("race: it writes element %lld of %s, which other blocks read", at, r->name);
        if (seen.thread != number() && !ordered(seen)) race(r, at, "writes what is read, without a barrier between,", seen);
    }
    cell.written = now();
}

inline void* checked(Region* r, long long at, size_t item, const char* verb) {
    if (at < 0 || at >= r->size) fail("it %s element %lld of %s, which has %lld", verb, at, r->name, r->size);
    return (char*)r->data + at * (long long)item;
}

template <class T> struct ptr;

// One element that may be written: reading and assigning are noted.
template <class T> struct ref {
    Region* r;
    long long at;
    T load() const {
        T* found = (T*)checked(r, at, sizeof(T), "reads");
        if (r->cells) note_read(r, at);
        return *found;
    }
    T store(T value) const {
        T* found = (T*)checked(r, at, sizeof(T), "writes");
        if (!r->cells) fail("it writes to %s, which is const", r->name);
        note_write(r, at);
        return *found = value;
    }
    operator T() const { return load(); }
    template <class U> explicit operator U() const { return (U)load(); }
    T operator=(T value) const { return store(value); }
    T operator=(const ref& other) const { return store(other.load()); }
    template <class U> T operator+=(U v) const { return store(load() + v); }
    template <class U> T operator-=(U v) const { return store(load() - v); }
    template <class U> T operator*=(U v) const { return store(load() * v); }
    template <class U> T operator/=(U v) const { return store(load() / v); }
    template <class U> T operator|=(U v) const { return store(load() | v); }
    T operator++() const { return store(load() + 1); }
    T operator++(int) const {
        T before = load();
        store(before + 1);
        return before;
    }
    ptr<T> operator&() const { return {r, at}; }
};

template <class T> struct element { typedef ref<T> type; };
template <class T> struct element<const T> { typedef T type; };

template <class T> struct ptr {
    Region* r;
    long long at;
    typename element<T>::type operator[](long long k) const { return get((T*)0, at + k); }
    typename element<T>::type operator*() const { return get((T*)0, at); }
    ptr operator+(long long k) const { return {r, at + k}; }
    ptr operator-(long long k) const { return {r, at - k}; }
    ptr& operator+=(long long k) { at += k; return *this; }
    ptr& operator++() { ++at; return *this; }
    operator ptr<const T>() const { return {r, at}; }
    bool is_aligned(long long nbytes) const { return ((long long)r->data + at * (long long)sizeof(T)) % nbytes == 0; }

private:
    template <class U> ref<U> get(U*, long long k) const { return {r, k}; }
    template <class U> U get(const U*, long long k) const { return ref<U>{r, k}.load(); }
};

// A pointer of which the kernel says that it is aligned.
template <class P> P aligned(P p, long long nbytes) {
    if (!p.is_aligned(nbytes)) fail("it says that %s is aligned to %lld bytes", p.r->name, nbytes);
    return p;
}

// An array in shared memory, of one dimension or two.
template <class T, int N, int M = 1> struct shared {
    Region region;
    T values[N * M];
    Cell cells[N * M];
    explicit shared(const char* name) : region{values, N * M, name, cells, true, 0} {}
    ptr<T> start() {
        if (region.launch != launches) {
            memset((void*)cells, 0, sizeof cells);
            region.launch = launches;
        }
        return {&region, 0};
    }
    operator ptr<T>() { return start(); }
    ptr<T> operator+(long long k) { return start() + k; }
    auto operator[](long long k) {
        if constexpr (M == 1) return start()[k];
        else return start() + k * M;
    }
};

}  // namespace host
