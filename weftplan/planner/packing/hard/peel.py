"""Set aside the buffers that will fit wherever the others lie, and pack only the rest.

Let a buffer of ``s`` units meet ``k`` others of ``m`` units in all. Whatever their offsets under a capacity ``C``,
they leave at most ``k + 1`` gaps; if all were too short, at most ``(k + 1) * (s - 1)`` units would be free. So when
``C - m > (k + 1) * (s - 1)`` the buffer can wait until the others are placed. Setting it aside frees its neighbours in
turn (as a register allocator simplifies its graph). No packing under ``C`` is lost, and what remains is often small,
and falls into parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weftplan.planner.packing.hard.greedy import Placed
from weftplan.planner.packing.problem import ENDLESS, Deadline, Int64, Problem

ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Peeled:
    """What is left, and in which order the others come back.

    Attributes:
        core: indices of the buffers to pack.
        later: indices of the others, in the order in which to place them.
    """

    core: Int64
    later: Int64

    def restore(self, problem: Problem, core_offsets: Int64, *, deadline: Deadline = ENDLESS) -> Int64:
        """Offsets of all buffers: the core as given, the others one by one at the lowest gap."""
        offsets = np.zeros(len(problem), np.int64)
        offsets[self.core] = core_offsets
        placed = Placed(len(problem))
        placed.fill(problem.lo[self.core], problem.hi[self.core], core_offsets, core_offsets + problem.size[self.core])
        placed.place_each(problem, self.later, offsets=offsets, deadline=deadline)
        return offsets


def peel(problem: Problem, capacity: int, *, deadline: Deadline = ENDLESS) -> Peeled:
    """Set buffers aside until none can be, or for `ROUNDS` rounds of O(n) each."""
    left = np.arange(len(problem))
    aside: list[Int64] = []
    for _ in range(ROUNDS):
        deadline.check()
        lo, hi, size = problem.lo[left], problem.hi[left], problem.size[left]
        met = _met(lo, hi, size, problem.sections)
        others = _met(lo, hi, np.ones_like(size), problem.sections)
        # As floats, since a product of count and size may leave int64; one part in 2**52 more is asked to make up for
        # it.
        free = (capacity - met) > (others + 1.0) * (size - 1.0) * (1.0 + 2.0**-50)
        if not free.any():
            break
        aside.append(left[free])
        left = left[~free]
    later = np.concatenate(aside[::-1]) if aside else np.zeros(0, np.int64)
    return Peeled(left, later)


def _met(lo: Int64, hi: Int64, weight: Int64, sections: int) -> Int64:
    """For each buffer the weight of the others that live together with it."""
    born = np.zeros(sections + 1, np.int64)
    dead = np.zeros(sections + 1, np.int64)
    np.add.at(born, lo + 1, weight)
    np.add.at(dead, hi, weight)
    met: Int64 = np.cumsum(born)[hi] - np.cumsum(dead)[lo] - weight
    return met
