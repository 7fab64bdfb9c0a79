"""Merging of parallel chains: optimal by itself on trees and series-parallel graphs, without loss elsewhere."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from weftplan.planner.passes.order_model import Block
from weftplan.planner.passes.order_search import best_order
from weftplan.planner.passes.order_series_parallel import add_order


def block_of(edges: list[tuple[int, int, int]], count: int, scratch: list[int]) -> Block:
    """A block of nodes in which every edge (maker, reader, bytes) is a value with one reader."""
    needs, news = [0] * count, [0] * count
    reads: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
    for v, (maker, reader, nbytes) in enumerate(edges):
        needs[reader] |= 1 << maker
        news[maker] += nbytes
        reads[reader].append((v, 1 << reader, nbytes))
    return Block(list(range(count)), 0, needs, news, scratch, reads, [[] for _ in range(count)], 0)


def random_tree(rng: random.Random, count: int, *, reverse: bool) -> Block:
    """A rooted tree: every node but the last feeds a later one (or, reversed, every node but the first reads one)."""
    edges = []
    for i in range(count - 1):
        edges.append((i, rng.randrange(i + 1, count), rng.choice([1, 2, 3, 8, 20])))
    if reverse:
        edges = [(count - 1 - b, count - 1 - a, nbytes) for a, b, nbytes in edges]
    return block_of(edges, count, [rng.choice([0, 0, 5, 15, 30]) for _ in range(count)])


def random_series_parallel(rng: random.Random, count: int) -> Block:
    """Two-terminal: an edge is replaced by two in series or doubled by a path, until there are ``count`` nodes."""
    edges = [(0, 1)]
    nodes = 2
    while nodes < count:
        a, b = rng.choice(edges)
        if rng.random() < 0.5:
            edges.remove((a, b))
        edges += [(a, nodes), (nodes, b)]
        nodes += 1
    followers: dict[int, list[int]] = {n: [] for n in range(nodes)}
    waits = dict.fromkeys(range(nodes), 0)
    for a, b in edges:
        followers[a].append(b)
        waits[b] += 1
    rank: dict[int, int] = {}
    ready = [0]
    while ready:
        node = ready.pop(rng.randrange(len(ready)))
        rank[node] = len(rank)
        for n in followers[node]:
            waits[n] -= 1
            if not waits[n]:
                ready.append(n)
    values = [(rank[a], rank[b], rng.choice([1, 2, 3, 8, 20])) for a, b in edges]
    return block_of(values, count, [rng.choice([0, 0, 5, 15, 30]) for _ in range(count)])


def least_peak(block: Block) -> int:
    """By brute force over all down-sets, without bounds or safe moves."""
    count = len(block.nodes)
    peak = {0: (0, block.base)}
    for _ in range(count):
        found: dict[int, tuple[int, int]] = {}
        for done, (highest, alive) in peak.items():
            for i in range(count):
                if not done >> i & 1 and not block.needs[i] & ~done:
                    during, after = block.step(done, alive, i)
                    candidate = max(highest, during), after
                    now = done | 1 << i
                    if now not in found or candidate < found[now]:
                        found[now] = candidate
        peak = found
    return peak[(1 << count) - 1][0]


def instances(kind: str) -> Iterator[Block]:
    """Sixty random blocks of 3 to 12 nodes."""
    for seed in range(60):
        rng = random.Random(f"{kind} {seed}")
        count = 3 + seed % 10
        if kind == "series-parallel":
            yield random_series_parallel(rng, count)
        else:
            yield random_tree(rng, count, reverse=kind == "out-tree")


def only_order(block: Block) -> list[int] | None:
    """The order of a block whose needs leave no choice, else None."""
    order: list[int] = []
    done = 0
    while len(order) < len(block.nodes):
        ready = [i for i in range(len(block.nodes)) if not done >> i & 1 and not block.needs[i] & ~done]
        if len(ready) != 1:
            return None
        order += ready
        done |= 1 << ready[0]
    return order


@pytest.mark.parametrize("kind", ["in-tree", "out-tree", "series-parallel"])
def test_series_parallel_blocks_are_solved_without_search(kind: str) -> None:
    """One order is left, and no other has a smaller peak."""
    improved = 0
    for number, block in enumerate(instances(kind)):
        least = least_peak(block)
        given = block.peak(range(len(block.nodes)))
        add_order(block)
        order = only_order(block)
        assert order is not None, f"{kind} {number}: a choice is left"
        assert block.peak(order) == least, f"{kind} {number}"
        improved += given > least
    assert improved > 15  # the given orders are not optimal by themselves


def test_nothing_is_lost_on_other_graphs() -> None:
    """Random graphs with values of several readers: the best order under the added needs is still the best."""
    added = 0
    for seed in range(200):
        rng = random.Random(seed)
        count = 4 + seed % 8
        needs, news = [0] * count, [0] * count
        reads: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
        for v in range(count + 2):
            maker = v if v < count - 1 else rng.randrange(count - 1)
            later = range(maker + 1, count)
            readers = rng.sample(later, min(len(later), rng.choice([1, 1, 1, 2, 3])))
            nbytes = rng.choice([1, 2, 3, 8, 20])
            news[maker] += nbytes
            for r in readers:
                needs[r] |= 1 << maker
                reads[r].append((v, sum(1 << i for i in readers), nbytes))
        scratch = [rng.choice([0, 0, 5, 15, 30]) for _ in range(count)]
        block = Block(list(range(count)), 0, needs, news, scratch, reads, [[] for _ in range(count)], 0)
        least = least_peak(block)
        before = list(block.needs)
        add_order(block)
        added += before != block.needs
        found = best_order(block, 1 << 30, 1 << 30)
        assert found.order is not None
        assert found.proven
        assert block.peak(found.order) == found.peak == least, f"seed {seed}"
    assert added > 50


def test_large_trees_take_no_time() -> None:
    """Eight hundred nodes: one order is left without any search, and it beats the given one."""
    block = random_tree(random.Random(1), 800, reverse=False)
    given = block.peak(range(800))
    add_order(block)
    order = only_order(block)
    assert order is not None
    assert block.peak(order) < given
