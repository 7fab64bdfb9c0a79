"""Routes of a sum and a broadcast over devices: ranges of the array, each with its own tree.

    one_step   all send everything to the home of the sum
    ranges     each place sums one range: the additions of ``one_step``, spread over the places
    ring       a range travels around and is added to at each place
    chain      the same towards the home, in many ranges in close succession
    tree       pairs, pairs of pairs, …: on one tree, or each range on the tree of another root

The order of an element's additions follows from the tree, so each way has one. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftplan.device.links import Interconnect
from weftplan.kvstore.buckets import even_range
from weftplan.kvstore.exchange.trees import binary_trees, ring

Parents = tuple[int, ...]
"""The target of each place; the root is its own target."""

CHUNKS = (4, 16)
"""Ranges of a chain that are tried."""

_THROUGH_HOST = 1e-3
"""Factor for a link between devices that are no peers: a tree takes any other before."""


@dataclass(frozen=True, slots=True)
class Share:
    """Elements ``first`` to ``end``, and the tree over which they are summed."""

    first: int
    end: int
    parents: Parents


@dataclass(frozen=True, slots=True)
class Way:
    """A name, and shares that make up the whole array."""

    name: str
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class TreeRule:
    """Settings of the variables MXNET_KVSTORE_TREE_….

    Attributes:
        bound: arrays of more elements are cut into one range for each tree.
        backtrack: search for trees exhaustively if that is feasible.
        penalty: factor of a link's weight, applied by each tree that uses it.
    """

    bound: int = 10_000_000
    backtrack: bool = False
    penalty: float = 0.7


def one_step(count: int, elements: int, home: int) -> Way:
    """Everything at the home."""
    return Way("one_step", (Share(0, elements, _star(count, home)),))


def all_ways(links: Interconnect, elements: int, home: int, rule: TreeRule) -> list[Way]:
    """Return the candidate routes for an array of ``elements``."""
    count = links.count
    around = ring(_weights(links))
    ways = [
        one_step(count, elements, home),
        Way("ranges", _cut(elements, [_star(count, root) for root in range(count)])),
        Way("ring", _cut(elements, [_path(around, root) for root in around])),
    ]
    ways += [Way("chain", _cut(elements, [_path(around, home)] * chunks)) for chunks in CHUNKS]
    return ways + trees(links, elements, home, rule, bounded=False)


def trees(links: Interconnect, elements: int, home: int, rule: TreeRule, *, bounded: bool = True) -> list[Way]:
    """Return one tree for the whole array, or a tree for each range; ``bounded``: the rule's bound decides."""
    parents = binary_trees(_weights(links), rule.penalty, exhaustive=rule.backtrack)
    whole = Way("tree", (Share(0, elements, parents[home]),))
    sliced = Way("trees", _cut(elements, parents))
    if not bounded:
        return [whole, sliced]
    return [sliced if elements > rule.bound else whole]


def _star(count: int, root: int) -> Parents:
    return (root,) * count


def _path(around: Sequence[int], root: int) -> Parents:
    """Return the ring without the link that leaves ``root``, whose links all lead to it."""
    parents = [0] * len(around)
    for here, there in zip(around, [*around[1:], around[0]], strict=True):
        parents[here] = root if here == root else there
    return tuple(parents)


def _cut(elements: int, parents: Sequence[Parents]) -> tuple[Share, ...]:
    count = len(parents)
    shares = [Share(*even_range(elements, count, place), tree) for place, tree in enumerate(parents)]
    return tuple(share for share in shares if share.end > share.first)


def _weights(links: Interconnect) -> tuple[tuple[float, ...], ...]:
    """Return the weight of each link for trees and rings: its bandwidth relative to the best, and little through the
    host."""
    places = range(links.count)

    def speed(a: int, b: int) -> float:
        return 0.0 if a == b else links.bandwidth(a, b) * (1.0 if links.peers(a, b) else _THROUGH_HOST)

    speeds = [[speed(a, b) for b in places] for a in places]
    best = max(map(max, speeds)) or 1.0
    return tuple(tuple(speed / best for speed in row) for row in speeds)
