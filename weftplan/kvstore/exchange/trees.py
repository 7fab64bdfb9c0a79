"""Deterministic search for binary trees and rings over devices that use fast links, given the link weights.

A tree with root r is found by recursive bisection: the devices are divided into two halves, r is the root of one half
and another device the root of the other, and so on within each half, in ``ceil(log2(n))`` levels. The halves follow
Kernighan and Lin ("An efficient heuristic procedure for partitioning graphs", 1970): two devices swap sides as long as
this increases the weight within the halves. With MXNET_KVSTORE_TREE_BACKTRACK, all divisions of up to
:data:`EXHAUSTIVE` devices are tried. As in MXNet 1.9.1, a link's weight falls with each tree that uses it, so that
trees of different roots use different links.
"""

from __future__ import annotations

import functools
import itertools

Weights = tuple[tuple[float, ...], ...]

EXHAUSTIVE = 8
"""Maximum number of devices for an exhaustive search: 5,040 trees for one root."""

_TRIES = 20_000
"""Maximum number of steps of the search for a ring, for each minimum weight."""


@functools.lru_cache(maxsize=64)
def binary_trees(weights: Weights, penalty: float, *, exhaustive: bool) -> tuple[tuple[int, ...], ...]:
    """Return a tree for each root, as the parent of each device; a root is its own parent.

    Args:
        weights: weight of the link from row to column, 0 to 1.
        penalty: factor applied to a link's weight by each tree that uses it.
        exhaustive: whether to try all divisions of up to :data:`EXHAUSTIVE` devices.
    """
    current = [list(row) for row in weights]
    trees = []
    for root in range(len(current)):
        parents = [root] * len(current)
        members = tuple(range(len(current)))
        memo: dict[tuple[int, tuple[int, ...]], tuple[float, _Edges]] = {}
        for parent, child in _grow(current, root, members, exhaustive, memo)[1]:
            parents[child] = parent
            current[parent][child] *= penalty
            current[child][parent] *= penalty
        trees.append(tuple(parents))
    return tuple(trees)


_Edges = tuple[tuple[int, int], ...]


def _grow(
    weights: list[list[float]],
    root: int,
    members: tuple[int, ...],
    exhaustive: bool,
    memo: dict[tuple[int, tuple[int, ...]], tuple[float, _Edges]],
) -> tuple[float, _Edges]:
    """Return (weight, (parent, child) of each link) of the best tree found over ``members``, cached in ``memo``."""
    if len(members) == 1:
        return 0.0, ()
    if (root, members) in memo:
        return memo[root, members]
    every = exhaustive and len(members) <= EXHAUSTIVE
    best: tuple[float, _Edges] = (-1.0, ())
    for far in _cuts(root, members) if every else [_kernighan_lin(weights, root, members)]:
        near = tuple(member for member in members if member not in far)
        heads = far if every else (max(far, key=lambda head: (weights[root][head], -head)),)
        near_edges = _grow(weights, root, near, exhaustive, memo)
        for head in heads:
            far_edges = _grow(weights, head, far, exhaustive, memo)
            total = weights[root][head] + near_edges[0] + far_edges[0]
            if total > best[0]:
                best = total, ((root, head), *near_edges[1], *far_edges[1])
    memo[root, members] = best
    return best


def _cuts(root: int, members: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return every choice of the half of the devices that does not contain the root."""
    return list(itertools.combinations([member for member in members if member != root], len(members) // 2))


def _kernighan_lin(weights: list[list[float]], root: int, members: tuple[int, ...]) -> tuple[int, ...]:
    """Return the half of the devices that does not contain the root, improved by swaps of pairs, best swap first."""
    candidates = sorted(
        (member for member in members if member != root), key=lambda other: (weights[root][other], -other)
    )
    far, near = set(candidates[: len(members) // 2]), {root, *candidates[len(members) // 2 :]}

    def between(a: int, b: int) -> float:
        return weights[a][b] + weights[b][a]

    def pull(member: int) -> float:
        """Return the weight of a device's links to the other half minus that of its links within its own half."""
        side, opposite = (far, near) if member in far else (near, far)
        return sum(between(member, neighbour) for neighbour in opposite) - sum(
            between(member, neighbour) for neighbour in side
        )

    while True:  # terminates: each swap lowers the weight between the halves
        gains = [(pull(a) + pull(b) - 2 * between(a, b), -a, -b) for a in sorted(near - {root}) for b in sorted(far)]
        gain, a, b = max(gains, default=(0.0, 0, 0))
        if gain <= 1e-12:
            return tuple(sorted(far))
        near ^= {-a, -b}
        far ^= {-a, -b}


@functools.lru_cache(maxsize=64)
def ring(weights: Weights) -> tuple[int, ...]:
    """Return the devices in the order of a ring whose smallest link weight is the largest that the search finds."""
    count = len(weights)
    for least in sorted({weight for row in weights for weight in row}, reverse=True):
        order = _ring_above(weights, least)
        if order is not None:
            return tuple(order)
    return tuple(range(count))


def _ring_above(weights: Weights, least: float) -> list[int] | None:
    """Return a ring of links of at least this weight; None if a search of :data:`_TRIES` steps finds none."""
    count, tries = len(weights), 0
    path = [0]
    unvisited = [iter(range(1, count))]
    while unvisited:
        tip = path[-1]
        for successor in unvisited[-1]:
            tries += 1
            if successor not in path and weights[tip][successor] >= least:
                path.append(successor)
                break
        else:
            unvisited.pop()
            path.pop()
            continue
        if len(path) == count and weights[path[-1]][0] >= least:
            return path
        if tries > _TRIES:
            return None
        unvisited.append(iter(range(1, count)))
    return None
