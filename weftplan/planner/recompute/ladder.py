"""The Pareto curve of time against memory of one graph: sets of nodes to recompute, for all useful budgets.

A *choice* is a set of nodes to recompute. :func:`curve` returns the Pareto-optimal choices of all that it has priced.
It does not depend on a budget, so answers taken from it are monotone: a larger budget never costs more time.

1. Seeds: the empty set; all nodes whose seconds per byte are below a threshold, for several thresholds; and each of
   these sets combined with the square-root rule for several segment sizes (*capacities*).
2. Descents through decreasing targets, in four variants, while the allowance of prices lasts.
3. For small graphs, choices that differ by one or two nodes from a choice on the curve.

Very small graphs are enumerated instead. The number of prices is bounded; the bound depends on the graph alone.

A descent starts from the peak without recomputation and lowers the target rung by rung. At each rung the search takes
the steps whose :func:`.tape.pressure` exceeds the target and the results that are idle there, between their last
forward and their first backward use. Recomputing the maker of such a result frees its bytes during this gap. A
*bundle* is that maker with all nodes that must run again for it, back to results that are alive anyway. The search adds
the bundles that free the most bytes per second until the peak meets the target. Then it removes superfluous nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import TypeVar

import numpy as np

from weftplan.planner.program import IntArray
from weftplan.planner.recompute.segments import capacities, measure, segments
from weftplan.planner.recompute.tape import Price, Tape
from weftplan.planner.stop_request import asked

Choice = TypeVar("Choice", bound=Price)

STEPS_PRICED = 2_000_000
"""Maximum of prices times steps of one search: one to six seconds of Python, depending on the graph's length."""
MAX_PRICES = 24_000
"""Maximum number of prices of one search; more do not improve the curve of a small graph."""


def undominated(ranked: Iterable[Choice]) -> list[Choice]:
    """Return the Pareto-optimal choices of ``ranked``, which is sorted from the fastest to the slowest.

    Each returned choice has a lower peak than the choice before it.
    """
    front: list[Choice] = []
    for choice in ranked:
        if not front or choice.peak < front[-1].peak:
            front.append(choice)
    return front


RUNG = 0.96
"""Ratio of a target to the target before it."""
STEP = 12
"""Divisor: at most this fraction of the bundles is added in one step, because each changes the gain of the others."""
FEW = 6
"""Number of single bundles to compare if adding several in one step does not help."""
REFILLS = 3
"""Maximum number of passes of :meth:`Ladder.refill`."""
TRIMS = 160
"""Divisor: one :meth:`Ladder.trim` may use this fraction of the search's allowance of prices."""
LEAST_TRIMS = 4
"""Minimum number of prices that one :meth:`Ladder.trim` may use."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Nodes whose recomputation frees ``nbytes`` bytes during steps ``begin`` to ``end - 1``."""

    nodes: frozenset[int]
    begin: int
    end: int
    nbytes: int


def _enough(bundles: Sequence[Bundle], over: IntArray) -> list[frozenset[int]]:
    """Return the first bundles that together bring the pressure below the target, estimated by their bytes.

    A bundle is skipped if less than half of its bytes would still reduce an excess.

    Args:
        bundles: candidates, the best first.
        over: pressure of each step minus the target.
    """
    over = over.copy()
    chosen: list[frozenset[int]] = []
    for bundle in bundles:
        span = over[bundle.begin : bundle.end]
        need = np.maximum(span, 0)
        if (
            int(np.minimum(need, bundle.nbytes).sum()) * 2 < bundle.nbytes * int(np.count_nonzero(need))
            or not need.any()
        ):
            continue
        span -= bundle.nbytes
        chosen.append(bundle.nodes)
        if int(over.max()) <= 0:
            break
    return chosen


class Ladder:
    """A search that moves from a choice to a choice below a target, and from there to a cheaper choice.

    It caches all prices and counts them against an allowance.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        steps = len(tape.forward) + len(tape.backward)
        self.allowance = max(60, min(MAX_PRICES, STEPS_PRICED // max(steps, 1)))
        """Number of prices that the search may compute, without the seeds."""
        self.prices_left = self.allowance
        self.prices: dict[frozenset[int], Price] = {}
        self.can = frozenset(tape.repeatable)

    def price(self, chosen: frozenset[int]) -> Price:
        """Return the price of a choice, from the cache if it is there."""
        if chosen not in self.prices:
            self.prices[chosen] = self.look(chosen)[0]
        return self.prices[chosen]

    def look(self, chosen: frozenset[int]) -> tuple[Price, IntArray]:
        """Compute and cache the price; return it and the :func:`.tape.pressure` of each step.

        The price is cached under the nodes that are recomputed in fact, which may be fewer than ``chosen``.
        """
        price, live = self.tape.look(chosen)
        self.prices_left = 0 if asked() else self.prices_left - 1
        self.prices[frozenset(price.twins)] = price
        return price, live

    def frontier(self) -> list[Price]:
        """Return the Pareto-optimal choices, the fastest first."""
        return undominated(sorted(self.prices.values(), key=lambda p: (p.seconds, p.peak, len(p.twins), p.twins)))

    def climb_down(self, *, jump: bool, fine: bool, max_seconds: float) -> None:
        """Lower the target rung by rung while the allowance lasts.

        Args:
            jump: continue each rung from the best choice known so far; else from the choice that this descent reached.
            fine: add the best bundles in order; else skip bundles that mostly overlap with those already added.
            max_seconds: stop as soon as the choice of a rung takes longer.
        """
        target = self.price(frozenset()).peak
        chosen: frozenset[int] = frozenset()
        missed = 0
        while self.prices_left > 0 and missed < 3:
            target = int(target * RUNG)
            fitting = [(p.seconds, p.twins) for p in self.prices.values() if p.peak <= target]
            reached = self.descend(chosen, target, fine=fine)
            if reached is not None:
                chosen = self.trim(reached, target)
                missed = 0
            if fitting:
                # The fastest known choice under this target, trimmed. To continue from it is not always right: the
                # best choice at this target may be far from the best choice at a lower target.
                _, twins = min(fitting)
                best_twins = self.trim(frozenset(twins), target) if self.prices_left > 0 else frozenset(twins)
                if reached is None or (jump and self.price(best_twins).seconds < self.price(chosen).seconds):
                    chosen, missed = best_twins, 0
            elif reached is None:
                missed += 1
            if self.price(chosen).seconds > max_seconds:
                return

    def descend(self, chosen: frozenset[int], target: int, *, fine: bool) -> frozenset[int] | None:
        """Add bundles until the peak is at most ``target``; return the choice, or None if no bundle helps.

        ``fine`` is the argument of :meth:`climb_down`.
        """
        live, price, excess = self._look(chosen, target)
        while price.peak > target:
            bundles = self._bundles(chosen, live, target)
            accepted = None
            sets = [bundle.nodes for bundle in bundles] if fine else _enough(bundles, live - target)
            many = sets[: max(1, len(bundles) // STEP)]
            while self.prices_left > 0 and accepted is None:
                # Try several bundles together; if that does not help, a quarter of them; at last single bundles.
                groups = (
                    [frozenset[int]().union(*many)] if len(many) > 1 else [bundle.nodes for bundle in bundles[:FEW]]
                )
                best = 0.0
                for group in groups:
                    peak_after, cost, work_after = self._look(chosen | group, target)
                    gain = (excess - work_after) / max(cost.seconds - price.seconds, 1e-9)
                    if work_after < excess and gain > best:
                        best, accepted = gain, (peak_after, cost, work_after)
                if len(many) <= 1:
                    break
                many = many[: len(many) // 4]
            if accepted is None:
                return None
            live, price, excess = accepted
            chosen = frozenset(price.twins)
        return chosen

    def _look(self, chosen: frozenset[int], target: int) -> tuple[IntArray, Price, float]:
        """Return the pressure of each step, the price, and the excess over the target in bytes times steps."""
        price, live = self.look(chosen)
        return live, price, float(np.maximum(live - target, 0).sum())

    def _bundles(self, chosen: frozenset[int], live: IntArray, target: int) -> list[Bundle]:
        """Return the bundles that would free bytes at steps whose pressure exceeds the target, the best first."""
        tape = self.tape
        trace = tape.trace(chosen)
        over = np.maximum(live - target, 0)
        hot = np.flatnonzero(over)
        lowest, highest = int(hot[0]), int(hot[-1])
        # Idle blocks of forward entries: from the last forward use of any of their entries to the first use after it.
        mine = tape.produced[trace.block[tape.produced] >= 0]
        block = trace.block[mine]
        begin = np.full(int(block.max(initial=-1)) + 1, -1, dtype=np.int64)
        end = np.full(len(begin), len(live), dtype=np.int64)
        size = np.zeros(len(begin), dtype=np.int64)
        used = tape.last_forward[mine]
        np.maximum.at(begin, block, np.where(used < 0, trace.first[mine], used) + 1)
        np.minimum.at(end, block, trace.needed[mine])
        size[block] = tape.nbytes[mine]
        idle = (begin >= 0) & (end < len(live)) & (end > lowest) & (begin <= highest) & (begin < end)
        gain = np.zeros(len(begin))
        for nbytes in np.unique(size[idle]).tolist():
            equal_sized = np.flatnonzero(idle & (size == nbytes))
            total = np.concatenate([[0], np.cumsum(np.minimum(over, nbytes))])
            gain[equal_sized] = total[end[equal_sized]] - total[begin[equal_sized]]
        makers: dict[int, set[int]] = {}
        useful = (gain[block] > 0.0) & (trace.needed[mine] < len(live))
        for e, b in zip(mine[useful].tolist(), block[useful].tolist(), strict=True):
            makers.setdefault(b, set()).add(tape.makers[e])
        ranked: list[tuple[float, float, int, Bundle]] = []
        deaths: list[int] = trace.last.tolist()
        begins, ends, sizes, gains = begin.tolist(), end.tolist(), size.tolist(), gain.tolist()
        for b, start in makers.items():
            nodes = self._closure(start, chosen, deaths, ends[b])
            if nodes is None or nodes <= chosen:
                continue
            cost = sum(tape.seconds[nid] for nid in nodes - chosen)
            ranked.append((-gains[b] / max(cost, 1e-9), cost, b, Bundle(nodes, begins[b], ends[b], sizes[b])))
        ranked.sort(key=lambda item: item[:3])
        return [bundle for _, _, _, bundle in ranked]

    def _closure(
        self, start: Collection[int], chosen: frozenset[int], deaths: Sequence[int], when: int
    ) -> frozenset[int] | None:
        """Return ``start`` and all nodes that must run again to recompute it at step ``when``.

        The walk ends at results that are still alive at that step and at nodes that must not be recomputed.

        Args:
            start: the nodes to recompute.
            chosen: nodes that are recomputed already.
            deaths: last step that reads each entry.
            when: the step before which the results are needed.

        Returns:
            None if a node of ``start`` must not be recomputed.
        """
        tape, reads = self.tape, self.tape.program.reads
        bundle = set(start)
        if not bundle <= self.can:
            return None
        stack = list(bundle)
        while stack:
            for e in reads[stack.pop()]:
                nid = tape.makers[e]
                if nid not in tape.step_of or nid in bundle or nid in chosen:
                    continue
                if deaths[e] >= when or nid not in self.can:
                    continue
                bundle.add(nid)
                stack.append(nid)
        return frozenset(bundle)

    def trim(self, chosen: frozenset[int], target: int) -> frozenset[int]:
        """Return ``chosen`` without nodes whose recomputation the target does not need.

        First :meth:`refill`; then a bisection over the remaining nodes, the most expensive first.
        """
        current = self.refill(chosen, target)
        price = self.price(current)
        tape = self.tape
        queue: list[list[int]] = [sorted(current, key=lambda nid: (-tape.seconds[nid], nid))]
        allowed = max(LEAST_TRIMS, self.allowance // TRIMS)
        while queue and allowed > 0 and not asked():
            part = [nid for nid in queue.pop(0) if nid in current]
            if not part:
                continue
            less = self.price(current.difference(part))
            allowed -= 1
            if less.peak <= target and less.seconds < price.seconds:
                price, current = less, frozenset(less.twins)
            elif len(part) > 1:
                half = (len(part) + 1) // 2
                queue[:0] = [part[:half], part[half:]]
        return current

    def refill(self, chosen: frozenset[int], target: int) -> frozenset[int]:
        """Return ``chosen`` without nodes whose results can be kept under the target.

        The most expensive nodes are removed first. :meth:`_refillable` selects them by the bytes left to each step
        under the target. Because of in-place sharing the new peak may still exceed the target; then only the more
        expensive half of them is removed, and so on.
        """
        price = self.price(chosen)
        current = frozenset(price.twins)
        for _ in range(REFILLS):
            keep = self._refillable(current, target)
            while keep:
                less = self.price(current.difference(keep))
                if less.peak <= target:
                    break
                keep = keep[: len(keep) // 2]
            if not keep or less.seconds >= price.seconds:
                break
            price, current = less, frozenset(less.twins)
        return current

    def _refillable(self, current: frozenset[int], target: int) -> list[int]:
        """Return recomputed nodes whose results could be kept under the target, the most expensive first.

        A result is kept from its last forward use to the step of its twin.
        """
        tape, count = self.tape, self.tape.num_entries
        _, live = self.look(current)
        trace = tape.trace(current)
        spare = target - live
        twin: list[int] = trace.first[count:].tolist()
        maker_step: list[int] = trace.first[:count].tolist()
        read: list[int] = tape.last_forward.tolist()
        stored: list[int] = []
        for nid in sorted(current, key=lambda nid: (-tape.seconds[nid], nid)):
            spans = [
                (max(read[e], maker_step[e]) + 1, twin[e], tape.program.nbytes[e])
                for e in tape.outputs[nid]
                if twin[e] >= 0
            ]
            if all(int(spare[begin:end].min(initial=size)) >= size for begin, end, size in spans):
                stored.append(nid)
                for begin, end, size in spans:
                    spare[begin:end] -= size
        return stored


EXHAUSTIVE = 12
"""Maximum number of repeatable nodes for which all combinations are priced."""
SMALL = 24
"""Maximum number of repeatable nodes for which :func:`polish` runs: bundles are too coarse for so small a graph."""
LEVELS = 8
"""Maximum number of thresholds of seconds per byte; each gives one set of cheap nodes among the seeds."""
SEEDS = 12
"""Number of segment sizes (capacities) to combine with each set of cheap nodes, and with the empty set."""


def curve(tape: Tape, *, max_seconds: float = inf, seeds: Iterable[frozenset[int]] = ()) -> list[Price]:
    """Return the Pareto-optimal choices, from the fastest (nothing is recomputed) to the one with the lowest peak.

    Peaks decrease strictly; seconds do not decrease.

    Args:
        tape: the graph.
        max_seconds: a descent stops at choices that take longer; seeds may still add some to the curve.
        seeds: further choices to price before the search.
    """
    ladder = Ladder(tape)
    ladder.price(frozenset())
    can = tape.repeatable
    if len(can) <= EXHAUSTIVE:
        for mask in range(1, 1 << len(can)):
            ladder.price(frozenset(nid for k, nid in enumerate(can) if mask >> k & 1))
        return ladder.frontier()
    seed(ladder)
    for chosen in seeds:
        ladder.price(chosen)
    # Seeds do not count against the allowance: they are few, and only they reach the low end of a deep graph's curve.
    ladder.prices_left = 0 if asked() else ladder.allowance
    for fine in (False, True):
        for jump in (False, True):
            ladder.climb_down(jump=jump, fine=fine, max_seconds=max_seconds)
    if len(can) <= SMALL:
        polish(ladder)
    return ladder.frontier()


def polish(ladder: Ladder) -> None:
    """Price all choices that differ by one or two nodes from a choice on the curve.

    This is repeated until the curve is stable or the allowance is spent.
    """
    can, polished = ladder.tape.repeatable, set[frozenset[int]]()
    steps = [frozenset(step) for width in (1, 2) for step in combinations(can, width)]
    while fresh := [twins for point in ladder.frontier() if (twins := frozenset(point.twins)) not in polished]:
        for twins in fresh:
            polished.add(twins)
            for step in steps if ladder.prices_left > 0 else ():
                ladder.price(twins ^ step)


def seed(ladder: Ladder) -> None:
    """Price the seeds: the choices that need no search."""
    tape = ladder.tape
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
        ladder.price(light)
        if asked():
            return
        for capacity in capacities(cuts, SEEDS):
            chosen = segments(cuts, capacity, light=light)
            if chosen:
                ladder.price(chosen)
