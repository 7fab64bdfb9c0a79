"""The square-root rule: keep the results at cuts of the forward part, compute what lies between them again.

A cut is a moment in the forward order at which few bytes cross from before to after. Walking the order, a cut is made
once the results since the last one weigh more than a threshold; a chain of n equal layers cut every sqrt(n) layers
keeps about 2 sqrt(n) results alive. The right threshold depends on everything else that is alive, so several are tried
and each is priced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from weftplan.planner.recompute.tape import Tape, Trace


@dataclass(frozen=True, slots=True)
class Cuts:
    """What the rule knows about the forward order."""

    weight: list[int]
    """Per forward step: bytes it makes that are kept for the backward part when nothing is repeated."""
    crossing: list[int]
    """Per forward step: bytes that later forward steps read and that exist after it."""
    across: list[tuple[int, ...]]
    """Per forward step: the repeatable nodes that make these bytes; filled for candidates only."""
    candidates: list[int]
    """Steps after which few bytes cross, compared with their neighbourhood."""


def measure(tape: Tape) -> Cuts:
    """Weights and crossings of the forward order."""
    facts = tape.facts
    trace = Trace()
    tape.price((), trace)
    steps = len(tape.forward)
    last_forward: dict[int, int] = {}
    for step, nid in enumerate(tape.forward):
        for e in facts.reads[nid]:
            last_forward[e] = step
    weight = [0] * steps
    change = np.zeros(steps + 1, dtype=np.int64)
    counted: set[int] = set()
    spans: list[tuple[int, int, int]] = []
    can = set(tape.repeatable)
    for step, nid in enumerate(tape.forward):
        for e in tape.outputs[nid]:
            if trace.last.get(e, -1) >= steps and trace.block[e] not in counted:
                counted.add(trace.block[e])
                weight[step] += facts.nbytes[e]
            end = last_forward.get(e, step)
            if end > step:
                change[step] += facts.nbytes[e]
                change[end] -= facts.nbytes[e]
                if nid in can:
                    spans.append((step, end, nid))
    crossing: list[int] = np.cumsum(change)[:steps].tolist()
    candidates = [
        s for s in range(steps - 1) if crossing[s] <= min(crossing[max(0, s - 3) : s + 4]) * 1.25 and weight[s] >= 0
    ]
    across: list[tuple[int, ...]] = [()] * steps
    wanted = set(candidates)
    for start, end, nid in spans:
        for s in range(start, end):
            if s in wanted:
                across[s] = (*across[s], nid)
    return Cuts(weight, crossing, across, candidates)


def segments(tape: Tape, cuts: Cuts, threshold: float) -> frozenset[int]:
    """The nodes to repeat when a cut is made as soon as more than ``threshold`` bytes lie behind the last one."""
    kept: set[int] = set()
    wanted = set(cuts.candidates)
    running = 0
    for step, weight in enumerate(cuts.weight):
        running += weight
        if running > threshold and step in wanted:
            kept.update(cuts.across[step])
            running = 0
    return frozenset(tape.repeatable) - kept


def thresholds(cuts: Cuts, count: int = 16) -> Iterator[float]:
    """Thresholds worth a trial: from two segments to one cut at every candidate, in equal ratios."""
    total = float(sum(cuts.weight))
    most = max(2, len(cuts.candidates))
    for k in range(count):
        yield total / (2.0 * (most / 2.0) ** (k / (count - 1)))


def square_root(tape: Tape, cuts: Cuts | None = None) -> frozenset[int]:
    """The best choice of the rule: the threshold whose peak is least, found by a sweep and then a closer look.

    Equal peaks prefer fewer seconds. The empty set when no threshold lowers the peak.
    """
    cuts = measure(tape) if cuts is None else cuts
    start = tape.price(())
    best = (start.peak, 0.0)
    choice: frozenset[int] = frozenset()
    at = 0.0
    tried = list(thresholds(cuts))
    for step in (0, 1):
        for threshold in tried:
            chosen = segments(tape, cuts, threshold)
            price = tape.price(chosen)
            if (price.peak, price.seconds) < best:
                best, choice, at = (price.peak, price.seconds), frozenset(price.twins), threshold
        if not step:
            # Between the neighbours of the best threshold of the sweep.
            tried = [at * 1.25 ** (k / 3) for k in (-3, -2, -1, 1, 2, 3)]
    return choice
