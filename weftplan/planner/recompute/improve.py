"""The search of small graphs around the points of the curve: one node is repeated more, or kept, and others follow.

A point is *improved* by repeating a node more and then keeping everything again that its peak allows, or by keeping a
node and repeating others until the peak holds, and so on. One such move changes many nodes at once; single exchanges
would have to pass through worse choices on the way. Another pass looks below the smallest peak. The functions here own
nothing: what they find is in the archive, which one thread uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weftplan.planner.recompute.archive import Archive, Point
from weftplan.planner.recompute.ladder import Ladder
from weftplan.planner.recompute.tape import Price

PATIENCE = 120
"""So many prices per repeatable node without any change of the curve end the search."""
NEAR = 5
"""Pairs of nodes fewer steps apart are moved together."""


def improve(archive: Archive, ladder: Ladder, most_seconds: float) -> None:
    """Improve every point of the curve that takes at most ``most_seconds``, while prices are left.

    First by moves of single nodes, then of several.
    """
    patience = PATIENCE * len(archive.can)
    for moves in (_singles, _several):
        tried: set[tuple[int, frozenset[int]]] = set()
        fresh = True
        while fresh:
            fresh = False
            # In sweeps over the curve, so that no part of it takes all prices; the small end first, where more is
            # repeated and more is to be found.
            for point in reversed(archive.frontier()):
                if (point.peak, point.twins) in tried or not 0.0 < point.seconds <= most_seconds:
                    continue
                tried.add((point.peak, point.twins))
                fresh = True
                for move in moves(archive.tape.repeatable):
                    if archive.left <= 0 or archive.idle > patience:
                        return
                    if _moved(archive, ladder, point, move).seconds < point.seconds:
                        break


def deepen(archive: Archive, ladder: Ladder, reserve: int) -> None:
    """Look for peaks below the smallest known, from its choice after a move, while ``reserve`` prices are left."""
    while True:
        point = archive.frontier()[-1]
        for move in (*_singles(archive.tape.repeatable), *_several(archive.tape.repeatable)):
            if archive.left <= reserve:
                return
            if move <= point.twins:
                reached = ladder.descend(point.twins - move, point.peak - 1, without=move)
            else:
                reached = ladder.descend(point.twins | move, point.peak - 1)
            if reached is not None:
                break
        else:
            return


def _moved(archive: Archive, ladder: Ladder, point: Point, move: frozenset[int]) -> Price:
    """The price after a move: these nodes repeated or kept, the others adjusted to the same peak."""
    here = archive.price(point.twins)
    reached: frozenset[int] | None = None
    if move <= point.twins:
        reached = ladder.descend(point.twins - move, point.peak, without=move)
    elif move.isdisjoint(point.twins):
        reached = point.twins | move
    return here if reached is None else archive.price(ladder.refill(reached, point.peak))


def _singles(can: Sequence[int]) -> Iterator[frozenset[int]]:
    return (frozenset((nid,)) for nid in can)


def _several(can: Sequence[int]) -> Iterator[frozenset[int]]:
    """Pairs and triples that are near each other in the forward order."""
    for first in range(len(can)):
        for second in range(first + 1, min(first + NEAR, len(can))):
            yield frozenset((can[first], can[second]))
    for first in range(len(can) - 2):
        yield frozenset(can[first : first + 3])
