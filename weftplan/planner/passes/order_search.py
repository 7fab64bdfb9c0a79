"""The order of a block with the smallest peak: best-first search over the sets of nodes that have run.

A state is a down-set (a set of nodes closed under "must run before") with the bytes alive after it, which depend on the
set only. States are taken up by the peak on the way to them, so the first complete order is the best one.

What keeps the number of states small is the *safe move*: from a set S, a chain of nodes that ends with no more bytes
alive than S and needs no more than the peak so far may always run at once, before anything else. Alive bytes are a cut
of a hypergraph and therefore submodular: f(X | T) <= f(X) + f(T) - f(X & T). Let T be S with the chain; the sets from
S to T are the prefixes of the chain, and all have at least f(T). So for every later X of any other continuation
f(X | T) <= f(X): having run the chain first costs nothing, then or later. While a node runs the same holds, as inputs
die no later when more has run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from weftplan.planner.passes.order_model import Block, saved

CHAIN = 64
"""Longest chain that is tried as one safe move."""


@dataclass(slots=True, frozen=True)
class Found:
    """A result of the search. ``order`` is None when no order below the bound was found; ``proven`` says that none
    exists, or that ``order`` is the best."""

    order: list[int] | None
    peak: int
    proven: bool
    work: int
    """Steps that were priced, the cost of the search."""


class _Work:
    """Counts the steps that are priced."""

    __slots__ = ("block", "done")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.done = 0

    def step(self, done: int, alive: int, i: int) -> tuple[int, int]:
        self.done += 1
        return self.block.step(done, alive, i)


def best_order(block: Block, bound: int, limit: int, enough: int = 0) -> Found:
    """The order of least peak below ``bound`` bytes, pricing about ``limit`` steps at most.

    Peaks up to ``enough`` count as equally good, which lets the search run straight to the end where there is room; the
    order found is then proven best only if it cannot be avoided.
    """
    least = unavoidable(block)
    if least >= bound:
        return Found(None, bound, True, 0)
    floor = max(least, enough)
    work = _Work(block)
    count = len(block.nodes)
    everything = (1 << count) - 1
    followers: list[list[int]] = [[] for _ in range(count)]
    for i, mask in enumerate(block.needs):
        for j in _bits(mask):
            followers[j].append(i)
    ready = [i for i in range(count) if not block.needs[i]]
    # (peak, -nodes run, serial, set, bytes alive, ready nodes); `way` leads back: set -> (set before, nodes run since).
    way: dict[int, tuple[int, list[int]]] = {}
    heap: list[tuple[int, int, int, int, int, list[int]]] = []
    best: dict[int, int] = {}
    serial = 0

    def enter(origin: int, path: list[int], peak: int, done: int, alive: int, ready: list[int]) -> None:
        nonlocal serial
        peak, done, alive, ready = _safe(work, followers, peak, done, alive, ready, path)
        if best.get(done, bound) > peak:
            best[done] = peak
            way[done] = (origin, path)
            serial += 1
            heappush(heap, (peak, -done.bit_count(), serial, done, alive, ready))

    enter(0, [], floor, 0, block.base, ready)
    while heap:
        peak, _, _, done, alive, ready = heappop(heap)
        if peak > best[done]:
            continue
        if done == everything:
            return Found(_way_back(way, done), peak, floor == least or peak > floor, work.done)
        if work.done >= limit:
            return Found(None, bound, False, work.done)
        for i in ready:
            during, after = work.step(done, alive, i)
            if during < bound:
                now = done | 1 << i
                enter(done, [i], max(peak, during), now, after, _enabled(block, followers, now, ready, i))
    return Found(None, bound, True, work.done)


def unavoidable(block: Block) -> int:
    """Bytes that every order of the block needs: the largest single node with what outlives the block beside it."""
    dying = {v: nbytes for reads in block.reads for v, _, nbytes in reads}
    highest = max(block.base, block.base + sum(block.news) - sum(dying.values()))
    for i, reads in enumerate(block.reads):
        inputs = sum(nbytes for _, _, nbytes in reads)
        merged = saved(block.merges[i], {v for v, _, _ in block.reads[i]})
        highest = max(highest, block.constant + inputs + block.news[i] - merged + block.workspace[i])
    return highest


def _safe(
    work: _Work, followers: list[list[int]], peak: int, done: int, alive: int, ready: list[int], path: list[int]
) -> tuple[int, int, int, list[int]]:
    """Make safe moves until there are none; appends to ``path``."""
    block = work.block
    moved = True
    while moved:
        moved = False
        for i in ready:
            if done >> i & 1:
                continue
            chain, _, after = _downhill(work, followers, peak, done, alive, i)
            for j in chain:
                done |= 1 << j
                ready = _enabled(block, followers, done, ready, j)
            if chain:
                path += chain
                alive, moved = after, True
    return peak, done, alive, ready


def _downhill(
    work: _Work, followers: list[list[int]], peak: int, done: int, alive: int, first: int
) -> tuple[list[int], int, int]:
    """The shortest chain from ``first`` that ends with at most ``alive`` bytes and stays within ``peak``."""
    needs = work.block.needs
    chain: list[int] = []
    now, nxt = alive, first
    while len(chain) < CHAIN:
        during, now = work.step(done, now, nxt)
        if during > peak:
            break
        done |= 1 << nxt
        chain.append(nxt)
        if now <= alive:
            return chain, done, now
        enabled = [i for i in followers[nxt] if not needs[i] & ~done]
        if not enabled:
            break
        nxt = enabled[0]
        if len(enabled) > 1:
            nxt = min((work.step(done, now, i)[1], i) for i in enabled)[1]
    return [], done, now


def _enabled(block: Block, followers: list[list[int]], done: int, ready: list[int], ran: int) -> list[int]:
    """The ready nodes after ``ran``, which is in ``done``."""
    left = [i for i in ready if i != ran]
    left += [i for i in followers[ran] if not block.needs[i] & ~done]
    return left


def _way_back(way: dict[int, tuple[int, list[int]]], done: int) -> list[int]:
    paths = []
    while done:
        done, path = way[done]
        paths.append(path)
    return [i for path in reversed(paths) for i in path]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
