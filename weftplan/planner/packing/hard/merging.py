"""Glue buffers that fit together exactly, pack the pieces, and take them apart again.

Two rules, applied until nothing changes: buffers of one lifetime become a stack; a buffer that dies when another of
the same size is born becomes one with it. Neither always keeps an optimum, so the result only competes with other
packings. Where an allocation was once cut from a full rectangle, the rules undo the cuts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np

from weftplan.planner.packing.problem import ENDLESS, Deadline, Int64, Problem, sectioned

# (piece of each buffer, offset of each buffer in it, lo, hi, size of the pieces)
Pieces = tuple[Int64, Int64, Int64, Int64, Int64]
Rule = Callable[[Int64, Int64, Int64], Pieces]

# Subsets are tried in groups of at most so many buffers.
MOST_IN_SUBSET = 9


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


def glue(problem: Problem, rounds: int = 1 << 30, *, deadline: Deadline = ENDLESS) -> Glued:
    """Glue until nothing changes, at most ``rounds`` times; O(n log n) per round.

    Equal times and sizes also meet by accident, and one wrong piece spoils all that it should have become part of. So
    the surest rule that finds anything is applied, then the surest again: stacks as high as a neighbour that begins or
    ends with them, and joins where few buffers die and are born; then parts of stacks that fit a neighbour; then busier
    moments; then any stack.
    """
    lo, hi, size = problem.lo, problem.hi, problem.size
    steps: list[tuple[Int64, Int64]] = []
    crowd = 1
    while rounds > 0:
        before = len(lo)
        rules: list[Rule] = [_stack_matching, partial(_join, crowd=crowd)]
        if crowd > before:
            rules = [_stack_all]
        elif crowd > 1:
            rules.append(_stack_some)
        for rule in rules:
            deadline.check()
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


def _groups(lo: Int64, hi: Int64, size: Int64) -> tuple[Int64, Int64, Int64, Int64]:
    """Buffers by lifetime: (order that puts each group together, start of each in it, number in each, total size)."""
    order = np.lexsort((-size, hi, lo))
    first = np.ones(len(lo), bool)
    first[1:] = (np.diff(lo[order]) != 0) | (np.diff(hi[order]) != 0)
    start = np.flatnonzero(first)
    return order, start, np.diff(start, append=len(lo)), np.add.reduceat(size[order], start)


def _stack_all(lo: Int64, hi: Int64, size: Int64) -> Pieces:
    """All buffers of one lifetime, one on the other."""
    order, start, number, _ = _groups(lo, hi, size)
    label = np.empty(len(lo), np.int64)
    label[order] = np.repeat(start, number)
    return _stack(lo, hi, size, label)


def _stack_matching(lo: Int64, hi: Int64, size: Int64) -> Pieces:
    """Buffers of one lifetime whose sum is that of the buffers of one lifetime just before or just after."""
    order, start, number, total = _groups(lo, hi, size)
    begin, end = lo[order][start], hi[order][start]
    _, rank = np.unique(total, return_inverse=True)
    born, dead = begin * len(total) + rank.reshape(-1), end * len(total) + rank.reshape(-1)
    match = np.isin(dead, born) | np.isin(born, dead)
    label = np.empty(len(lo), np.int64)
    label[order] = np.where(np.repeat(match, number), np.repeat(start, number), np.arange(len(lo)))
    return _stack(lo, hi, size, label)


def _stack_some(lo: Int64, hi: Int64, size: Int64) -> Pieces:
    """For a few buffers of one lifetime, those among them whose sum is that of a neighbour."""
    order, start, number, total = _groups(lo, hi, size)
    begin, end = lo[order][start], hi[order][start]
    label = np.arange(len(lo))
    few = np.flatnonzero((number > 2) & (number <= MOST_IN_SUBSET))
    # Only what is born when one of these dies, or dies when one is born, can be its neighbour.
    births, deaths = np.isin(begin, end[few]), np.isin(end, begin[few])
    wanted: dict[tuple[int, bool], set[int]] = defaultdict(set)
    for g in np.flatnonzero(births | deaths).tolist():
        sums = {int(total[g]), *size[order[start[g] : start[g] + number[g]]].tolist()}
        if births[g]:
            wanted[int(begin[g]), True] |= sums
        if deaths[g]:
            wanted[int(end[g]), False] |= sums
    for g in few.tolist():
        members = order[start[g] : start[g] + number[g]].tolist()
        goals = wanted[int(end[g]), True] | wanted[int(begin[g]), False]
        for width in range(2, len(members)):
            chosen = next((c for c in combinations(members, width) if int(size[list(c)].sum()) in goals), None)
            if chosen is not None:
                label[list(chosen)] = chosen[0]
                break
    return _stack(lo, hi, size, label)


def _stack(lo: Int64, hi: Int64, size: Int64, label: Int64) -> Pieces:
    """Buffers of one label (and lifetime), one on the other."""
    order = np.lexsort((-size, label))
    first = np.ones(len(lo), bool)
    first[1:] = np.diff(label[order]) != 0
    group = np.cumsum(first) - 1
    below = np.cumsum(size[order]) - size[order]
    owner, shift = np.empty_like(order), np.empty_like(size)
    owner[order] = group
    shift[order] = below - below[first][group]
    height = np.add.reduceat(size[order], np.flatnonzero(first))
    return owner, shift, lo[order][first], hi[order][first], height


def _join(lo: Int64, hi: Int64, size: Int64, crowd: int) -> Pieces:
    """Join equal sizes one after the other where at most ``crowd`` die and are born."""
    n = len(lo)
    # The k-th buffer that dies at (time, size) goes with the k-th that is born there.
    moment = np.concatenate([hi, lo])
    nbytes = np.concatenate([size, size])
    born = np.repeat([0, 1], n)
    order = np.lexsort((born, nbytes, moment))
    new = np.ones(2 * n, bool)
    new[1:] = (np.diff(moment[order]) != 0) | (np.diff(nbytes[order]) != 0)
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
