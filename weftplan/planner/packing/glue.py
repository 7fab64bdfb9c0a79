"""Glue buffers that fit together exactly, pack the pieces, and take them apart again.

Two rules, applied until nothing changes: buffers of one lifetime become a stack; a buffer that dies when another of the same
size is born becomes one with it. Neither always keeps an optimum, so the result only competes with other packings.
Where an allocation was once cut from a full rectangle, the rules undo the cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from weftplan.planner.packing.problem import Int64, Problem, sectioned


@dataclass(frozen=True, slots=True)
class Glued:
    """Pieces, and how to get the offsets of the original buffers back.

    Attributes:
        problem: the pieces.
        steps: per round (owner, shift): the piece that each piece of the round before went into, and its offset there.
    """

    problem: Problem
    steps: tuple[tuple[Int64, Int64], ...]

    def expand(self, offsets: Int64) -> Int64:
        """Offsets of the original buffers from offsets of the pieces."""
        for owner, shift in reversed(self.steps):
            offsets = np.add(offsets[owner], shift)
        return offsets


def glue(problem: Problem, rounds: int = 1 << 30) -> Glued:
    """Apply both rules until nothing changes, at most ``rounds`` times; O(n log n) per round.

    Among many deaths and births at one moment equal sizes meet by accident. So joins start where a single buffer dies
    and a single one is born, and are allowed at busier moments only when nothing else is left to glue.
    """
    lo, hi, size = problem.lo, problem.hi, problem.size
    steps: list[tuple[Int64, Int64]] = []
    crowd = 1
    while rounds > 0:
        before = len(lo)
        for rule in (_stack, partial(_join, crowd=crowd)):
            owner, shift, *pieces = rule(lo, hi, size)
            if len(pieces[0]) < len(lo):
                lo, hi, size = pieces
                steps.append((owner, shift))
        if len(lo) < before:
            rounds -= 1
            crowd = 1
        elif crowd > before:
            break
        else:
            crowd += 1 + crowd // 4
    return Glued(sectioned(lo, hi, size, np.arange(len(lo))), tuple(steps))


def _stack(lo: Int64, hi: Int64, size: Int64) -> tuple[Int64, Int64, Int64, Int64, Int64]:
    """Buffers of one lifetime, one on the other: (owner, shift, lo, hi, size)."""
    order = np.lexsort((-size, hi, lo))
    first = np.ones(len(lo), bool)
    first[1:] = (np.diff(lo[order]) != 0) | (np.diff(hi[order]) != 0)
    group = np.cumsum(first) - 1
    below = np.cumsum(size[order]) - size[order]
    owner, shift = np.empty_like(order), np.empty_like(size)
    owner[order] = group
    shift[order] = below - below[first][group]
    height = np.add.reduceat(size[order], np.flatnonzero(first))
    return owner, shift, lo[order][first], hi[order][first], height


def _join(lo: Int64, hi: Int64, size: Int64, crowd: int) -> tuple[Int64, Int64, Int64, Int64, Int64]:
    """Buffers of one size, one after the other, where at most ``crowd`` die and are born: (owner, shift, lo, hi, size)."""
    n = len(lo)
    # The k-th buffer that dies at (time, size) goes with the k-th that is born there.
    moment = np.concatenate([hi, lo])
    nbytes = np.concatenate([size, size])
    born = np.repeat([0, 1], n)
    order = np.lexsort((born, nbytes, moment))
    new = np.ones(2 * n, bool)
    new[1:] = (np.diff(moment[order]) != 0) | (np.diff(nbytes[order]) != 0)
    group = np.cumsum(new) - 1
    start = np.flatnonzero(new)
    births = np.add.reduceat(born[order], start)
    deaths = np.diff(start, append=2 * n) - births
    pairs = np.minimum(deaths, births)
    dying_then = np.bincount(hi, minlength=int(hi.max()) + 1)
    born_then = np.bincount(lo, minlength=len(dying_then))
    pairs[np.maximum(dying_then, born_then)[moment[order[start]]] > crowd] = 0
    which = np.repeat(np.arange(len(start)), pairs)
    k = np.arange(len(which)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    dying = order[start[which] + k]
    follower = order[start[which] + deaths[which] + k] - n
    head = np.arange(n)
    head[follower] = dying
    while True:  # pointer jumping: every buffer of a chain learns the first one
        further = head[head]
        if np.array_equal(further, head):
            break
        head = further
    heads, owner = np.unique(head, return_inverse=True)
    end = np.zeros(len(heads), np.int64)
    np.maximum.at(end, owner, hi)
    return owner.reshape(-1), np.zeros(n, np.int64), lo[heads], end, size[heads]
