"""Sets of nodes to repeat that follow the blocks of a forward part: results that cross from block to block are kept.

Deep networks repeat one block many times. A search that treats its copies as unrelated spends its prices on them one by
one. Here the period of the forward part is found once, the cut within it that fewest bytes cross, and sets for segments
of one block, two blocks and so on.
"""

from __future__ import annotations

import numpy as np

from weftplan.planner.graph import IntArray
from weftplan.planner.recompute.segments import Cuts, measure
from weftplan.planner.recompute.tape import Tape

SHORTEST = 3
"""Fewest steps of a block."""
ENOUGH = 0.9
"""The shortest period counts whose run has this part of the longest run."""
STRIDES = 4
"""Most blocks of a segment."""


def block_sets(tape: Tape) -> list[frozenset[int]]:
    """Choices that keep only what crosses from block to block; none when the forward part has no period."""
    kinds = _kinds(tape)
    run = _period(kinds)
    if run is None:
        return []
    period, start, length = run
    cuts = measure(tape)
    across = _across(cuts)
    phase = min(range(period), key=lambda k: (int(across[start + k : start + length : period].sum()), k))
    places = list(range(start + phase, start + length, period))
    sets = []
    for stride in range(1, STRIDES + 1):
        kept = np.zeros(len(kinds), dtype=np.bool_)
        steps = np.arange(len(kinds))
        last = places[(len(places) - 1) // stride * stride]
        for cut in places[::stride]:
            kept |= (steps <= cut) & (cuts.until > cut)
        chosen = cuts.can & ~kept
        sets += [frozenset(cuts.nodes[chosen & (steps <= end)].tolist()) for end in (last, len(kinds))]
    return [chosen for chosen in dict.fromkeys(sets) if chosen]


def _kinds(tape: Tape) -> IntArray:
    """Per forward step a number that is equal for steps of one label, one number of inputs and equal sizes."""
    graph, nbytes = tape.program.graph, tape.program.nbytes
    numbers: dict[object, int] = {}
    kinds = [
        (graph.works[nid].label, len(graph.inputs[nid]), tuple(nbytes[e] for e in tape.outputs[nid]))
        for nid in tape.forward
    ]
    return np.array([numbers.setdefault(kind, len(numbers)) for kind in kinds], dtype=np.int64)


def _period(kinds: IntArray) -> tuple[int, int, int] | None:
    """(period, first step, number of steps) of the longest part that repeats itself at least twice."""
    runs: dict[int, tuple[int, int]] = {}
    for period in range(SHORTEST, len(kinds) // 2 + 1):
        differs = np.flatnonzero(kinds[:-period] != kinds[period:])
        ends = np.concatenate([[-1], differs, [len(kinds) - period]])
        lengths = np.diff(ends) - 1
        longest = int(np.argmax(lengths))
        if lengths[longest] >= period:
            runs[period] = int(lengths[longest]), int(ends[longest]) + 1
    if not runs:
        return None
    most = max(run + period for period, (run, _) in runs.items())
    period = min(p for p, (run, _) in runs.items() if run + p >= ENOUGH * most)
    run, start = runs[period]
    return period, start, run + period


def _across(cuts: Cuts) -> IntArray:
    """Per forward step the bytes made until it that later forward steps read."""
    change = np.zeros(len(cuts.nodes) + 1, dtype=np.int64)
    np.add.at(change, np.arange(len(cuts.nodes)), cuts.crossing)
    np.subtract.at(change, cuts.until, cuts.crossing)
    across: IntArray = np.cumsum(change)[:-1]
    return across
