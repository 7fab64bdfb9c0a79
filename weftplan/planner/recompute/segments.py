"""The square-root rule: keep the results at cuts of the forward order and recompute the results between the cuts.

The forward order is cut into segments. Results that cross a cut are kept; the rest of a segment is recomputed when the
backward part reaches it. The last segment is not recomputed: its results are alive when the backward part begins.

While the backward part runs through a segment, the results kept at earlier cuts and the segment's own results are
alive; results at later cuts are dead. So earlier segments may be larger. A *room* is the bytes available to one
segment: in a room of M bytes, a segment ends when its weight plus all bytes kept before it reach M. With n equal
layers and one result kept per cut, the segments are M, M - 1, M - 2, … layers long and M is about sqrt(2 n); equal
segments (Chen and others, "Training deep nets with sublinear memory cost") need 2 sqrt(n).

Within a window before the end of a segment, the cut is placed at the step that the fewest bytes cross.

Deep networks repeat one block many times. :func:`block_sets` detects the period of the forward order and cuts every
block at the position that the fewest bytes cross.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weftplan.planner.program import IntArray
from weftplan.planner.recompute.tape import Price, Tape

WINDOWS = (0.75, 0.4)
"""Candidate minimum fills of a segment, as shares of its room; if results differ in size, either may be better."""
PATIENCE = 3
"""Number of consecutive capacities without an improvement after which the sweep stops."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Weights and lifetimes along the forward order; every array has one item per forward step."""

    weight: IntArray
    """Bytes made by the step that are kept for the backward part if nothing is recomputed."""
    until: IntArray
    """Last forward step that reads a result of the step; the step itself if there is none."""
    crossing: IntArray
    """Bytes made by the step that later forward steps read."""
    nodes: IntArray
    """Node of the step."""
    can: NDArray[np.bool_]
    """Whether the node may be recomputed."""


def measure(tape: Tape) -> Cuts:
    """Return the weights and crossings of the forward order."""
    steps, entries = len(tape.forward), tape.produced
    trace = tape.trace(())
    step, end, nbytes = tape.produced_at[entries], tape.last_forward[entries], tape.nbytes[entries]
    crosses = (end > step) & (np.array(tape.outside, dtype=np.uint8)[entries] == 0)
    until = np.arange(steps)
    np.maximum.at(until, step[crosses], end[crosses])
    held = np.flatnonzero(trace.last[entries] >= steps)
    held = held[np.unique(trace.block[entries[held]], return_index=True)[1]]  # the first entry of every block
    weight, crossing = np.zeros((2, steps), dtype=np.int64)
    np.add.at(weight, step[held], nbytes[held])
    np.add.at(crossing, step[crosses], nbytes[crosses])
    nodes = np.array(tape.forward, dtype=np.int64)
    return Cuts(weight, until, crossing, nodes, np.isin(nodes, tape.repeatable))


def segments(
    cuts: Cuts, capacity: float, *, light: Collection[int] = (), window: float = WINDOWS[0]
) -> frozenset[int] | None:
    """Return the nodes to recompute if every segment fits a capacity.

    A segment ends when its weight and the bytes kept before it reach ``capacity``. The last segment begins as early as
    the capacity allows; only its ``light`` nodes are recomputed.

    Args:
        cuts: weights and crossings of the forward order.
        capacity: bytes available to one segment and the results kept before it.
        light: nodes to recompute in every segment; they weigh nothing in the last one.
        window: minimum fill of a segment, as a share of the free bytes of its room.

    Returns:
        None if the kept results fill the room before the last segment.
    """
    steps = len(cuts.nodes)
    mine = cuts.can
    light_steps = mine & np.isin(cuts.nodes, np.array(list(light), dtype=np.int64))
    weight = np.cumsum(np.where(mine, cuts.weight, 0))
    heavy = np.cumsum(np.where(mine & ~light_steps, cuts.weight, 0))
    fixed = np.cumsum(np.where(mine, 0, cuts.weight))
    crossing = np.where(mine, cuts.crossing, 0)
    stored = np.zeros(steps, dtype=bool)
    begin = held = behind = recomputed = 0
    while int(heavy[-1]) - recomputed + int(fixed[-1]) + held > capacity:
        load = weight[begin:] - behind + fixed[begin:] + held
        used = int(fixed[begin]) + held
        stop = begin + int(np.searchsorted(load, capacity, side="right"))
        if stop <= begin + 1 or used >= capacity:
            return None
        across = _across(cuts, np.where(stored, 0, crossing), begin, stop)
        tail = int(heavy[-1]) - heavy[begin:stop] + int(fixed[-1]) + held + across
        enough = np.flatnonzero(tail <= capacity)
        if len(enough):
            cut = begin + int(enough[0])
        else:
            earliest = begin + int(
                np.searchsorted(load[: stop - begin - 1], used + window * (capacity - used), side="right")
            )
            earliest = min(earliest, stop - 1)
            # The last step of the window with the fewest crossing bytes.
            cut = stop - 1 - int(np.argmin(across[earliest - begin :][::-1]))
        stays = np.arange(begin, cut + 1)
        stored[stays[mine[stays] & (cuts.until[stays] > cut)]] = True
        held += int(across[cut - begin])
        behind, recomputed = int(weight[cut]), int(heavy[cut])
        begin = cut + 1
    repeated = mine & ~stored
    repeated[begin:] &= light_steps[begin:]
    return frozenset(cuts.nodes[repeated].tolist())


def _across(cuts: Cuts, crossing: IntArray, begin: int, end: int) -> IntArray:
    """Return, for each step of ``begin`` to ``end - 1``, the bytes that cross a cut after it.

    Only bytes that steps from ``begin`` on make count; ``crossing`` holds them per step.
    """
    change = np.zeros(end - begin + 1, dtype=np.int64)
    change[:-1] = crossing[begin:end]
    np.subtract.at(change, np.minimum(cuts.until[begin:end], end) - begin, crossing[begin:end])
    return np.cumsum(change)[:-1]


def least_capacity(cuts: Cuts, *, window: float = WINDOWS[0]) -> float:
    """Return the smallest room for which :func:`segments` finds a choice, within 1 %, by bisection."""
    high = float(cuts.weight.sum())
    low = high / max(len(cuts.nodes), 1)
    while high > low * 1.01:
        middle = (low * high) ** 0.5
        if segments(cuts, middle, window=window) is None:
            low = middle
        else:
            high = middle
    return high


def capacities(cuts: Cuts, count: int) -> list[float]:
    """Return ``count`` capacities in geometric progression, from below the total weight to :func:`least_capacity`."""
    total = float(cuts.weight.sum())
    if total <= 0.0:
        return []
    least = least_capacity(cuts)
    return [total * (least / total) ** ((k + 1) / count) for k in range(count)]


def square_root(tape: Tape, *, windows: Sequence[float] = WINDOWS) -> Price:
    """Return the price of the rule's choice with the lowest peak, over capacities from :func:`least_capacity` upwards.

    Among equal peaks it is the fastest. If no room lowers the peak, it is the price of the empty set.
    """
    cuts = measure(tape)
    start = best = tape.price(())
    if not cuts.weight.any():
        return best
    for window in windows:
        capacity = least_capacity(cuts, window=window)
        idle = 0
        while idle < PATIENCE and capacity < 0.9 * start.peak:
            chosen = segments(cuts, capacity, window=window)
            price = start if chosen is None else tape.price(chosen)
            idle += 1
            if price.twins and (price.peak, price.seconds) < (best.peak, best.seconds):
                best, idle = price, 0
            capacity *= 2.0 ** (1 / 8)
    return best


SHORTEST = 3
"""Minimum number of steps of a block."""
ENOUGH = 0.9
"""Share of the longest run: the shortest period whose run reaches it is chosen."""
STRIDES = 4
"""Maximum number of blocks per segment."""


def block_sets(tape: Tape) -> list[frozenset[int]]:
    """Return choices that keep only the results that cross from block to block.

    The list is empty if the forward order is not periodic.
    """
    graph, nbytes = tape.program.graph, tape.program.nbytes
    numbers: dict[object, int] = {}  # steps with equal label, number of inputs and output sizes are of one kind
    facts = (
        (graph.works[nid].label, len(graph.inputs[nid]), *(nbytes[e] for e in tape.outputs[nid]))
        for nid in tape.forward
    )
    kinds = np.array([numbers.setdefault(fact, len(numbers)) for fact in facts], dtype=np.int64)
    run = _period(kinds)
    if run is None:
        return []
    period, start, length = run
    cuts = measure(tape)
    across = _across(cuts, cuts.crossing, 0, len(kinds))
    phase = min(range(period), key=lambda k: (int(across[start + k : start + length : period].sum()), k))
    starts = list(range(start + phase, start + length, period))
    sets = []
    for stride in range(1, STRIDES + 1):
        stored = np.zeros(len(kinds), dtype=np.bool_)
        steps = np.arange(len(kinds))
        final_start = starts[(len(starts) - 1) // stride * stride]
        for cut in starts[::stride]:
            stored |= (steps <= cut) & (cuts.until > cut)
        chosen = cuts.can & ~stored
        sets += [frozenset(cuts.nodes[chosen & (steps <= end)].tolist()) for end in (final_start, len(kinds))]
    return [chosen for chosen in dict.fromkeys(sets) if chosen]


def _period(kinds: IntArray) -> tuple[int, int, int] | None:
    """Return (period, first step, number of steps) of the longest periodic run of at least two periods, or None."""
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
