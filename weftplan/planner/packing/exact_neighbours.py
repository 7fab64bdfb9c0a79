"""Merging of buffers that fit each other exactly, which makes large problems smaller before they are packed.

Buffers with one lifetime are stacked; buffers of one size, each born when the previous one dies, share their bytes.
Neither raises the load of any moment, so the lower bound stays. A million rectangles that were cut from one rectangle
merge into it again; if 15 % of them are removed, the others merge into a third of their number. All buffers are matched
by sorting, so a million buffers take one to three seconds. No function keeps state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weftplan.planner.packing.problem import ENDLESS, Deadline, Int64, Problem

Round = tuple[Int64, Int64]
"""The merged buffer that contains each buffer of a round, and the offset of the buffer in the merged buffer."""

MIN_SHARE = 32
"""Rounds end when a round merges less than this fraction of the buffers: 1 / 32."""


def merge_exact_neighbours(problem: Problem, deadline: Deadline = ENDLESS) -> tuple[Problem, list[Round]]:
    """Return a problem with the merged buffers in place of their members, and the rounds that merged them.

    Raises:
        OutOfTime: the time limit passed.

    >>> from weftplan.planner.packing.problem import sectioned
    >>> columns = np.array([[0, 0, 2, 1], [2, 2, 4, 3], [8, 4, 12, 5]])
    >>> merged, rounds = merge_exact_neighbours(sectioned(*columns, np.arange(4)))
    >>> merged.size.tolist(), unmerge(np.array([5, 0]), rounds).tolist()
    ([12, 5], [5, 13, 5, 0])
    """
    lo, hi, size = problem.lo, problem.hi, problem.size
    rounds: list[Round] = []
    count = len(lo)
    while True:
        deadline.check()
        order = np.lexsort((hi, lo))
        starts = _starts(lo[order], hi[order])
        parent, members = _numbered(order, starts), size[order]
        below = members.cumsum() - members
        offset = np.empty(len(lo), np.int64)
        offset[order] = below - below[starts][parent[order]]
        rounds.append((parent, offset))
        lo, hi, size = lo[order[starts]], hi[order[starts]], np.add.reduceat(members, starts)

        chain = _chains(lo, hi, size)
        order = np.lexsort((lo, chain))
        starts = _starts(chain[order])
        rounds.append((_numbered(order, starts), np.zeros(len(lo), np.int64)))
        lo, size, hi = lo[order[starts]], size[order[starts]], np.maximum.reduceat(hi[order], starts)
        if (count - len(lo)) * MIN_SHARE <= count:
            return Problem(lo, hi, size, problem.sections, np.arange(len(lo))), rounds
        count = len(lo)


def unmerge(offsets: Int64, rounds: Sequence[Round]) -> Int64:
    """Return the offsets of the original buffers from those of the merged buffers."""
    for parent, offset in reversed(rounds):
        offsets = offsets[parent] + offset
    return offsets


def _starts(*columns: Int64) -> Int64:
    """Return the first position of each run of equal rows."""
    changes = np.ones(len(columns[0]), bool)
    changes[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return changes.nonzero()[0]


def _numbered(order: Int64, starts: Int64) -> Int64:
    """Return the number of the run of each buffer; runs begin at ``starts`` of ``order``."""
    runs = np.zeros(len(order), np.int64)
    runs[starts[1:]] = 1
    numbers = np.empty(len(order), np.int64)
    numbers[order] = runs.cumsum()
    return numbers


def _chains(lo: Int64, hi: Int64, size: Int64) -> Int64:
    """Return the first buffer of each buffer's chain; the next buffer of a chain has its size and is born at its death.

    If several buffers fit, the k-th that dies precedes the k-th that is born.
    """
    count = len(lo)
    sizes = np.unique(size)
    class_of = sizes.searchsorted(size) * (int(hi.max()) + 1)
    births, deaths = class_of + lo, class_of + hi
    by_birth, by_death = births.argsort(kind="stable"), deaths.argsort(kind="stable")
    births, deaths = births[by_birth], deaths[by_death]
    successor = births.searchsorted(deaths) + np.arange(count) - deaths.searchsorted(deaths)
    fits = successor < count
    fits[fits] = births[successor[fits]] == deaths[fits]
    chain = np.arange(count)
    chain[by_birth[successor[fits]]] = by_death[fits]
    while not np.array_equal(further := chain[chain], chain):
        chain = further
    return chain
