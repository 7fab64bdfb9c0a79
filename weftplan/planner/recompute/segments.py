"""The square-root rule: keep the results at cuts of the forward part, compute what lies between them again.

The forward order is cut into segments; results that cross a cut are kept, the rest of a segment is repeated when the
backward part reaches it. The last segment is not repeated: its results are alive when the backward part begins.

While the backward part works on a segment, the results kept at earlier cuts and the segment's own are alive, those at
later cuts are dead. So segments may be the larger the earlier they are: for a *room* of M bytes, a segment ends where
its weight and all that is kept before it reach M. With n equal layers and one result kept at a cut the segments are M,
M - 1, M - 2, … layers long and M is about sqrt(2 n), where equal segments (Chen and others, "Training deep nets with
sublinear memory cost") need 2 sqrt(n).

Where exactly a segment ends is free within a window: the cut is made where fewest bytes cross.

Deep networks repeat one block many times: :func:`block_sets` finds the period of the forward part once, and the cut
within it that fewest bytes cross.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weftplan.planner.program import IntArray
from weftplan.planner.recompute.tape import Price, Tape

WINDOWS = (0.75, 0.4)
"""A segment has at least this part of its greatest length: if results differ in size, either value may be better."""
PATIENCE = 3
"""How many rooms in a row without a better choice end the sweep."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """Facts of the forward order. Arrays over forward steps."""

    weight: IntArray
    """Bytes a step makes that are kept for the backward part when nothing is repeated."""
    until: IntArray
    """Last forward step that reads what the step makes; the step itself when none does."""
    crossing: IntArray
    """Bytes a step makes that later forward steps read."""
    nodes: IntArray
    """The steps' nodes."""
    can: NDArray[np.bool_]
    """Which of them may be repeated."""


def measure(tape: Tape) -> Cuts:
    """Weights and crossings of the forward order."""
    steps, entries = len(tape.forward), tape.made
    trace = tape.trace(())
    step, end, nbytes = tape.made_at[entries], tape.last_forward[entries], tape.nbytes[entries]
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
    cuts: Cuts, room: float, *, light: Collection[int] = (), window: float = WINDOWS[0]
) -> frozenset[int] | None:
    """Return the nodes to repeat when segments end as their weight and the bytes kept before them reach ``room`` bytes.

    The last segment, whose ``light`` nodes alone are repeated, begins as early as the room allows.

    Args:
        light: nodes to repeat in any case; in the last segment they weigh nothing.
        window: a segment has at least this part of the length that the room allows.

    Returns:
        None when what has to be kept fills the room before the end.
    """
    steps = len(cuts.nodes)
    mine = cuts.can
    light_steps = mine & np.isin(cuts.nodes, np.array(list(light), dtype=np.int64))
    weight = np.cumsum(np.where(mine, cuts.weight, 0))
    heavy = np.cumsum(np.where(mine & ~light_steps, cuts.weight, 0))
    fixed = np.cumsum(np.where(mine, 0, cuts.weight))
    crossing = np.where(mine, cuts.crossing, 0)
    kept = np.zeros(steps, dtype=bool)
    begin = held = behind = done = 0
    while int(heavy[-1]) - done + int(fixed[-1]) + held > room:
        load = weight[begin:] - behind + fixed[begin:] + held
        used = int(fixed[begin]) + held
        last = begin + int(np.searchsorted(load, room, side="right"))
        if last <= begin + 1 or used >= room:
            return None
        across = _across(cuts, np.where(kept, 0, crossing), begin, last)
        tail = int(heavy[-1]) - heavy[begin:last] + int(fixed[-1]) + held + across
        enough = np.flatnonzero(tail <= room)
        if len(enough):
            cut = begin + int(enough[0])
        else:
            first = begin + int(np.searchsorted(load[: last - begin - 1], used + window * (room - used), side="right"))
            first = min(first, last - 1)
            # The latest of the best.
            cut = last - 1 - int(np.argmin(across[first - begin :][::-1]))
        stays = np.arange(begin, cut + 1)
        kept[stays[mine[stays] & (cuts.until[stays] > cut)]] = True
        held += int(across[cut - begin])
        behind, done = int(weight[cut]), int(heavy[cut])
        begin = cut + 1
    repeated = mine & ~kept
    repeated[begin:] &= light_steps[begin:]
    return frozenset(cuts.nodes[repeated].tolist())


def _across(cuts: Cuts, crossing: IntArray, begin: int, end: int) -> IntArray:
    """Per step of begin … end: bytes made since ``begin``, as ``crossing`` counts them, that later steps read."""
    change = np.zeros(end - begin + 1, dtype=np.int64)
    change[:-1] = crossing[begin:end]
    np.subtract.at(change, np.minimum(cuts.until[begin:end], end) - begin, crossing[begin:end])
    return np.cumsum(change)[:-1]


def least_room(cuts: Cuts, *, window: float = WINDOWS[0]) -> float:
    """Return about the smallest room that lets segments reach the end."""
    high = float(cuts.weight.sum())
    low = high / max(len(cuts.nodes), 1)
    while high > low * 1.01:
        middle = (low * high) ** 0.5
        if segments(cuts, middle, window=window) is None:
            low = middle
        else:
            high = middle
    return high


def rooms(cuts: Cuts, count: int) -> list[float]:
    """Rooms worth a trial, in equal ratios: from most of all weight down to the smallest that works."""
    total = float(cuts.weight.sum())
    if total <= 0.0:
        return []
    least = least_room(cuts)
    return [total * (least / total) ** ((k + 1) / count) for k in range(count)]


def square_root(tape: Tape, *, windows: Sequence[float] = WINDOWS) -> Price:
    """The best choice of the rule: from the smallest room that works up, the choice with the least peak.

    Equal peaks prefer fewer seconds. The price of the empty set when no room lowers the peak.
    """
    cuts = measure(tape)
    start = best = tape.price(())
    if not cuts.weight.any():
        return best
    for window in windows:
        room = least_room(cuts, window=window)
        idle = 0
        while idle < PATIENCE and room < 0.9 * start.peak:
            chosen = segments(cuts, room, window=window)
            price = start if chosen is None else tape.price(chosen)
            idle += 1
            if price.twins and (price.peak, price.seconds) < (best.peak, best.seconds):
                best, idle = price, 0
            room *= 2.0 ** (1 / 8)
    return best


SHORTEST = 3
"""Fewest steps of a block."""
ENOUGH = 0.9
"""The shortest period counts whose run has this part of the longest run."""
STRIDES = 4
"""Most blocks of a segment."""


def block_sets(tape: Tape) -> list[frozenset[int]]:
    """Choices that keep only what crosses from block to block; none when the forward part has no period."""
    graph, nbytes = tape.program.graph, tape.program.nbytes
    numbers: dict[object, int] = {}  # steps of one label, one number of inputs and equal sizes are of one kind
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
