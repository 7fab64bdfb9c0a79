"""Candidate routes of a sum and a broadcast over devices: ranges of the array, each with a tree of devices.

    one_step   all devices send the whole array to the home, the device of the sum
    ranges     each device sums one range: the additions of ``one_step``, distributed over the devices
    ring       each range travels around the ring, and each device adds its part
    chain      ranges travel along the ring to the home, in a pipeline of several ranges
    tree       the whole array is summed on a binary tree whose root is the home
    trees      each device is the root of a binary tree that sums one range

A route fixes the order of an element's additions. The functions of this module are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftplan.device.links import Interconnect
from weftplan.kvstore.exchange.trees import binary_trees, ring
from weftplan.kvstore.partition import even_range

Parents = tuple[int, ...]
"""A tree: the parent of each device, to which the device sends its sum; the root is its own parent."""

CHUNKS = (4, 16)
"""Numbers of ranges with which a chain is tried."""

_THROUGH_HOST = 1e-3
"""Factor for the weight of links between devices that are not peers, so that trees use them last."""


@dataclass(frozen=True, slots=True)
class RouteShare:
    """A range of elements, ``begin`` to ``end``, and the tree that sums it."""

    begin: int
    end: int
    parents: Parents


@dataclass(frozen=True, slots=True)
class SumRoute:
    """A named route: shares that together cover the whole array."""

    name: str
    shares: tuple[RouteShare, ...]


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


def one_step(count: int, elements: int, home: int) -> SumRoute:
    """Return the route ``one_step``: all devices send the whole array to the home."""
    return SumRoute("one_step", (RouteShare(0, elements, _star(count, home)),))


def routes_between(links: Interconnect, elements: int, home: int, rule: TreeRule) -> list[SumRoute]:
    """Return the candidate routes for an array of ``elements`` that is summed at ``home``."""
    count = links.count
    around = ring(_weights(links))
    routes = [
        one_step(count, elements, home),
        SumRoute("ranges", _cut(elements, [_star(count, root) for root in range(count)])),
        SumRoute("ring", _cut(elements, [_path(around, root) for root in around])),
    ]
    routes += [SumRoute("chain", _cut(elements, [_path(around, home)] * chunks)) for chunks in CHUNKS]
    return routes + trees(links, elements, home, rule, bounded=False)


def trees(links: Interconnect, elements: int, home: int, rule: TreeRule, *, bounded: bool = True) -> list[SumRoute]:
    """Return the routes ``tree`` and ``trees``; if ``bounded``, only the route that the rule's bound selects."""
    parents = binary_trees(_weights(links), rule.penalty, exhaustive=rule.backtrack)
    tree = SumRoute("tree", (RouteShare(0, elements, parents[home]),))
    sliced = SumRoute("trees", _cut(elements, parents))
    if not bounded:
        return [tree, sliced]
    return [sliced if elements > rule.bound else tree]


def _star(count: int, root: int) -> Parents:
    return (root,) * count


def _path(around: Sequence[int], root: int) -> Parents:
    """Return the tree that is the ring without the link from ``root``, so that all links lead to the root."""
    parents = [0] * len(around)
    for device, successor in zip(around, [*around[1:], around[0]], strict=True):
        parents[device] = root if device == root else successor
    return tuple(parents)


def _cut(elements: int, parents: Sequence[Parents]) -> tuple[RouteShare, ...]:
    count = len(parents)
    shares = [RouteShare(*even_range(elements, count, position), tree) for position, tree in enumerate(parents)]
    return tuple(share for share in shares if share.end > share.begin)


def _weights(links: Interconnect) -> tuple[tuple[float, ...], ...]:
    """Return the weight of each link: its bandwidth relative to the fastest; far less for copies through the host."""
    positions = range(links.count)

    def speed(a: int, b: int) -> float:
        return 0.0 if a == b else links.bandwidth(a, b) * (1.0 if links.peers(a, b) else _THROUGH_HOST)

    speeds = [[speed(a, b) for b in positions] for a in positions]
    best = max(map(max, speeds)) or 1.0
    return tuple(tuple(speed / best for speed in row) for row in speeds)
