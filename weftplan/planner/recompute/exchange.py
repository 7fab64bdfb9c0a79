"""The exchange search of small graphs: around every point of the curve, then around what only the curve beats."""

from __future__ import annotations

from collections.abc import Iterator

from weftplan.planner.recompute.archive import Archive

PATIENCE = 120
"""So many prices per repeatable node without any change of the curve end the search."""
STRETCH = 6
"""The longest stretch of the forward order that is moved at once."""


def exchange(archive: Archive) -> None:
    """Look around every point of the curve, then around what only the curve beats.

    A choice that is beaten now may have a neighbour that is not, so the next layers below the curve are worth their
    prices once nothing new is found next to the curve itself.
    """
    seen: set[frozenset[int]] = set()
    patience = PATIENCE * len(archive.can)
    while archive.left > 0:
        fresh = next((layer for layer in archive.layers() if not seen.issuperset(layer)), None)
        if fresh is None:
            return
        # The slow end first: there the points are farther from each other, and more is to be found.
        for twins in reversed(fresh):
            if twins in seen:
                continue
            seen.add(twins)
            for neighbour in _neighbours(archive, twins):
                if archive.left <= 0 or archive.idle > patience:
                    return
                archive.price(neighbour)


def _neighbours(archive: Archive, twins: frozenset[int]) -> Iterator[frozenset[int]]:
    """One node in or out, one for another, a stretch of the forward order in or out."""
    can = archive.tape.repeatable
    outside = [nid for nid in can if nid not in twins]
    inside = [nid for nid in can if nid in twins]
    for nid in inside:
        yield twins - {nid}
    for nid in outside:
        yield twins | {nid}
    for start in range(len(can)):
        for end in range(start + 2, min(start + STRETCH, len(can)) + 1):
            stretch = can[start:end]
            yield twins.union(stretch)
            yield twins.difference(stretch)
    for out in inside:
        for new in outside:
            yield (twins - {out}) | {new}
