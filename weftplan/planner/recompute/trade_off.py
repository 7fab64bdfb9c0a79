"""The trade of time for memory of one graph: which nodes to repeat for every budget worth having.

The curve is computed whole and does not depend on any budget that a user names, so that answers taken from it are
monotone: a larger budget never costs more time. Everything priced on the way is remembered, and the curve has the
choices that no other dominates.

1. Seeds: nothing; all nodes whose time per byte is below a threshold, for several thresholds; and each of these sets
   together with the square-root rule in rooms of many sizes, which repeats the early part of the graph whole.
2. Descents from target to target (:mod:`.ladder`), in four variants while prices are left.
3. For small graphs, choices that differ in one node or two from one on the curve.

Very small graphs are enumerated instead. The work is bounded by a number of prices that depends on the graph alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from math import inf

from weftplan.planner.recompute.archive import Archive
from weftplan.planner.recompute.ladder import Ladder
from weftplan.planner.recompute.segments import measure, rooms, segments
from weftplan.planner.recompute.tape import Price, Tape
from weftplan.planner.stopping import asked

EXHAUSTIVE = 12
"""So few nodes that may be repeated are tried in all combinations."""
SMALL = 24
"""Around the curve of so few nodes every neighbour is tried: bundles are too coarse for them."""
LEVELS = 8
"""How many sets of light nodes are tried."""
SEEDS = 12
"""How many sizes of rooms are tried with each of them."""


def curve(tape: Tape, *, most_seconds: float = inf, seeds: Iterable[frozenset[int]] = ()) -> list[Price]:
    """Choices from the fastest (nothing repeated) to the smallest found; peaks fall strictly, seconds rise.

    Args:
        most_seconds: do not look for choices that take longer (the curve may have some all the same).
        seeds: choices to begin with, besides its own.
    """
    archive = Archive(tape)
    archive.price(frozenset())
    can = tape.repeatable
    if len(can) <= EXHAUSTIVE:
        for mask in range(1, 1 << len(can)):
            archive.price(frozenset(nid for k, nid in enumerate(can) if mask >> k & 1))
        return archive.frontier()
    seed(archive)
    for chosen in seeds:
        archive.price(chosen)
    # Seeds come on top: they are few, and the only choices that reach the far end of a deep graph.
    archive.left = 0 if asked() else archive.allowance
    ladder = Ladder(archive)
    for fine in (False, True):
        for jump in (False, True):
            ladder.climb_down(jump=jump, fine=fine, most_seconds=most_seconds)
    if len(can) <= SMALL:
        polish(archive)
    return archive.frontier()


def polish(archive: Archive) -> None:
    """Price what differs in one node or two from a choice on the curve, until the curve stays as it is."""
    can, done = archive.tape.repeatable, set[frozenset[int]]()
    steps = [frozenset(step) for width in (1, 2) for step in combinations(can, width)]
    while fresh := [twins for point in archive.frontier() if (twins := frozenset(point.twins)) not in done]:
        for twins in fresh:
            done.add(twins)
            for step in steps if archive.left > 0 else ():
                archive.price(twins ^ step)


def seed(archive: Archive) -> None:
    """Price the choices that need no search."""
    tape = archive.tape
    cuts = measure(tape)
    ratio = {
        nid: tape.seconds[nid] / max(1, max((tape.program.nbytes[e] for e in tape.outputs[nid]), default=1))
        for nid in tape.repeatable
    }
    levels = sorted(set(ratio.values()))
    count = min(len(levels), LEVELS)
    cheap = [
        frozenset(nid for nid in tape.repeatable if ratio[nid] <= levels[(k + 1) * len(levels) // count - 1])
        for k in range(count)
    ]
    for light in (frozenset[int](), *cheap):
        archive.price(light)
        if asked():
            return
        for room in rooms(cuts, SEEDS):
            chosen = segments(cuts, room, light=light)
            if chosen:
                archive.price(chosen)
