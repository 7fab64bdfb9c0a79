"""Candidate routes of a sum and a broadcast over devices: ranges of the array, each with a tree of places.

    one_step   all places send the whole array to the home, the place of the sum
    ranges     each place sums one range: the additions of ``one_step``, distributed over the places
    ring       each range travels around the ring, and each place adds its part
    chain      ranges travel along the ring to the home, in a pipeline of several ranges
    tree       the whole array is summed on a binary tree whose root is the home
    trees      each place is the root of a binary tree that sums one range

A route fixes the order of an element's additions. The functions of this module are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftplan.device.links import Interconnect
from weftplan.kvstore.buckets import even_range
from weftplan.kvstore.exchange.trees import binary_trees, ring

Parents = tuple[int, ...]
"""A tree: the parent of each place, to which the place sends its sum; the root is its own parent."""

CHUNKS = (4, 16)
"""Numbers of ranges with which a chain is tried."""

_THROUGH_HOST = 1e-3
"""Factor for the weight of links between devices that are not peers, so that trees use them last."""


@dataclass(frozen=True, slots=True)
class Share:
    """A range of elements, ``first`` to ``end``, and the tree that sums it."""

    first: int
    end: int
    parents: Parents


@dataclass(frozen=True, slots=True)
class Way:
    """A named route: shares that together cover the whole array."""

    name: str
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class TreeRule:
    """Settings for trees, from the variables MXNET_KVSTORE_TREE_….

    Attributes:
        bound: arrays of more elements use the trees of all roots, each for one range.
        backtrack: whether to search for trees exhaustively if there are few devices.
        penalty: factor applied to a link's weight by each tree that uses it.
    """

    bound: int = 10_000_000
    backtrack: bool = False
    penalty: float = 0.7


def one_step(count: int, elements: int, home: int) -> Way:
    """Return the route ``one_step``: all places send the whole array to the home."""
    return Way("one_step", (Share(0, elements, _star(count, home)),))


def all_ways(links: Interconnect, elements: int, home: int, rule: TreeRule) -> list[Way]:
    """Return the candidate routes for an array of ``elements`` that is summed at ``home``."""
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
    """Return the routes ``tree`` and ``trees``; if ``bounded``, only the route that the rule's bound selects."""
    parents = binary_trees(_weights(links), rule.penalty, exhaustive=rule.backtrack)
    whole = Way("tree", (Share(0, elements, parents[home]),))
    sliced = Way("trees", _cut(elements, parents))
    if not bounded:
        return [whole, sliced]
    return [sliced if elements > rule.bound else whole]


def _star(count: int, root: int) -> Parents:
    return (root,) * count


def _path(around: Sequence[int], root: int) -> Parents:
    """Return the tree that is the ring without the link from ``root``, so that all links lead to the root."""
    parents = [0] * len(around)
    for here, there in zip(around, [*around[1:], around[0]], strict=True):
        parents[here] = root if here == root else there
    return tuple(parents)


def _cut(elements: int, parents: Sequence[Parents]) -> tuple[Share, ...]:
    count = len(parents)
    shares = [Share(*even_range(elements, count, place), tree) for place, tree in enumerate(parents)]
    return tuple(share for share in shares if share.end > share.first)


def _weights(links: Interconnect) -> tuple[tuple[float, ...], ...]:
    """Return the weight of each link: its bandwidth relative to the fastest; far less for copies through the host."""
    places = range(links.count)

    def speed(a: int, b: int) -> float:
        return 0.0 if a == b else links.bandwidth(a, b) * (1.0 if links.peers(a, b) else _THROUGH_HOST)

    speeds = [[speed(a, b) for b in places] for a in places]
    best = max(map(max, speeds)) or 1.0
    return tuple(tuple(speed / best for speed in row) for row in speeds)
