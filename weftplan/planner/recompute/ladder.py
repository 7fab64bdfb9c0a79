"""The trade of time for memory of one graph: which nodes to repeat for every budget worth having.

:func:`curve` is computed whole and does not depend on any budget that a user names, so that answers taken from it are
monotone: a larger budget never costs more time. It has the choices among all priced ones that no other dominates.

1. Seeds: nothing; all nodes whose time per byte is below a threshold, for several thresholds; and each of these sets
   together with the square-root rule in rooms of many sizes, which repeats the early part of the graph whole.
2. Descents from target to target, in four variants while prices are left.
3. For small graphs, choices that differ in one node or two from one on the curve.

Very small graphs are enumerated instead. The work is bounded by a number of prices that depends on the graph alone.

A descent is a ladder of targets from the peak without recomputation down. At each rung the search looks at the steps
that ask more than the target (:func:`.tape.pressure`), and at the results that lie idle there between their last
forward and their first backward use. Repeating what made such a result frees its bytes during the gap; its needs are
followed back to results that are kept anyway: a bundle. The bundles that free most per second are taken until the
target holds; then whatever turns out superfluous is taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from typing import TypeVar

import numpy as np

from weftplan.planner.program import IntArray
from weftplan.planner.recompute.segments import measure, rooms, segments
from weftplan.planner.recompute.tape import Price, Tape
from weftplan.planner.stopping import asked

Choice = TypeVar("Choice", bound=Price)

STEPS_PRICED = 2_000_000
"""Steps that a whole search may price: one to six seconds of Python, by the length of the graph."""
MOST_PRICES = 24_000
"""Prices are not worth more than this many, however small the graph."""


def undominated(ranked: Iterable[Choice]) -> list[Choice]:
    """Return the choices, from the fastest to the slowest, that no faster choice undercuts: peaks fall."""
    kept: list[Choice] = []
    for choice in ranked:
        if not kept or choice.peak < kept[-1].peak:
            kept.append(choice)
    return kept


RUNG = 0.96
"""Each target is this part of the target before."""
STEP = 12
"""At most one in this many bundles is taken at once: each changes the worth of the others."""
FEW = 6
"""How many single bundles are compared if several at once do not help."""
REFILLS = 3
"""How often the profile is looked at again for room."""
TRIMS = 160
"""Taking repetitions back one by one may use one in this many of the prices of the search …"""
LEAST_TRIMS = 4
"""… and at least this many."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Nodes whose repetition frees ``nbytes`` from step ``begin`` to step ``end``."""

    nodes: frozenset[int]
    begin: int
    end: int
    nbytes: int


def _enough(bundles: Sequence[Bundle], over: IntArray) -> list[frozenset[int]]:
    """The first bundles that together bring a profile under its target, as far as their bytes tell.

    ``over`` is the need of each step less the target. Bundles that find most of their work done are passed over.
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
    """A search: moves from a choice to choices below a target, and back to cheaper choices.

    It remembers all prices, and counts how many may still be asked for.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        steps = len(tape.forward) + len(tape.backward)
        self.allowance = max(60, min(MOST_PRICES, STEPS_PRICED // max(steps, 1)))
        """Prices that the search may ask for in all, seeds aside."""
        self.left = self.allowance
        self.known: dict[frozenset[int], Price] = {}
        self.can = frozenset(tape.repeatable)

    def price(self, chosen: frozenset[int]) -> Price:
        """The price of a choice, remembered under what it really repeats."""
        if chosen not in self.known:
            self.known[chosen] = self.look(chosen)[0]
        return self.known[chosen]

    def look(self, chosen: frozenset[int]) -> tuple[Price, IntArray]:
        """Return the price, never from the cache, and the need of each step (:func:`.tape.pressure`)."""
        price, live = self.tape.look(chosen)
        self.left = 0 if asked() else self.left - 1
        self.known[frozenset(price.twins)] = price
        return price, live

    def frontier(self) -> list[Price]:
        """Return the choices that no other dominates, fastest first."""
        return undominated(sorted(self.known.values(), key=lambda p: (p.seconds, p.peak, len(p.twins), p.twins)))

    def climb_down(self, *, jump: bool, fine: bool, most_seconds: float) -> None:
        """Go down rung by rung while prices are left.

        Args:
            jump: go on from the best choice known at each rung; else from the end of the descent itself.
            fine: take the best bundles as they come; else pass over those whose work others have done.
            most_seconds: stop where a rung takes longer.
        """
        target = self.price(frozenset()).peak
        chosen: frozenset[int] = frozenset()
        missed = 0
        while self.left > 0 and missed < 3:
            target = int(target * RUNG)
            fitting = [(p.seconds, p.twins) for p in self.known.values() if p.peak <= target]
            reached = self.descend(chosen, target, fine=fine)
            if reached is not None:
                chosen = self.trim(reached, target)
                missed = 0
            if fitting:
                # The best that the seeds and earlier rungs offer, taken back as far as this target allows. To go on
                # from there is not always right: the best choice here may be far from the best choice lower down.
                _, twins = min(fitting)
                known_best = self.trim(frozenset(twins), target) if self.left > 0 else frozenset(twins)
                if reached is None or (jump and self.price(known_best).seconds < self.price(chosen).seconds):
                    chosen, missed = known_best, 0
            elif reached is None:
                missed += 1
            if self.price(chosen).seconds > most_seconds:
                return

    def descend(self, chosen: frozenset[int], target: int, *, fine: bool) -> frozenset[int] | None:
        """Add bundles (``fine``: see :meth:`climb_down`) until the peak is at most ``target``; None when none helps."""
        live, price, excess = self._look(chosen, target)
        while price.peak > target:
            bundles = self._bundles(chosen, live, target)
            taken = None
            sets = [bundle.nodes for bundle in bundles] if fine else _enough(bundles, live - target)
            many = sets[: max(1, len(bundles) // STEP)]
            while self.left > 0 and taken is None:
                # Several at once; fewer if they turn out to spoil each other; at last the best bundle.
                groups = (
                    [frozenset[int]().union(*many)] if len(many) > 1 else [bundle.nodes for bundle in bundles[:FEW]]
                )
                best = 0.0
                for group in groups:
                    there, cost, left = self._look(chosen | group, target)
                    gain = (excess - left) / max(cost.seconds - price.seconds, 1e-9)
                    if left < excess and gain > best:
                        best, taken = gain, (there, cost, left)
                if len(many) <= 1:
                    break
                many = many[: len(many) // 4]
            if taken is None:
                return None
            live, price, excess = taken
            chosen = frozenset(price.twins)
        return chosen

    def _look(self, chosen: frozenset[int], target: int) -> tuple[IntArray, Price, float]:
        """Return the need of each step, the price, and bytes times steps above the target."""
        price, live = self.look(chosen)
        return live, price, float(np.maximum(live - target, 0).sum())

    def _bundles(self, chosen: frozenset[int], live: IntArray, target: int) -> list[Bundle]:
        """Sets of nodes whose repetition would free bytes at steps that ask more than the target; best first."""
        tape = self.tape
        trace = tape.trace(chosen)
        over = np.maximum(live - target, 0)
        hot = np.flatnonzero(over)
        lowest, highest = int(hot[0]), int(hot[-1])
        # Results that lie idle: blocks of forward entries, from the last forward use of any to the first use after it.
        mine = tape.made[trace.block[tape.made] >= 0]
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
            some = np.flatnonzero(idle & (size == nbytes))
            total = np.concatenate([[0], np.cumsum(np.minimum(over, nbytes))])
            gain[some] = total[end[some]] - total[begin[some]]
        makers: dict[int, set[int]] = {}
        useful = (gain[block] > 0.0) & (trace.needed[mine] < len(live))
        for e, b in zip(mine[useful].tolist(), block[useful].tolist(), strict=True):
            makers.setdefault(b, set()).add(tape.makers[e])
        ranked: list[tuple[float, float, int, Bundle]] = []
        last: list[int] = trace.last.tolist()
        begins, ends, sizes, gains = begin.tolist(), end.tolist(), size.tolist(), gain.tolist()
        for b, start in makers.items():
            nodes = self._closure(start, chosen, last, ends[b])
            if nodes is None or nodes <= chosen:
                continue
            cost = sum(tape.seconds[nid] for nid in nodes - chosen)
            ranked.append((-gains[b] / max(cost, 1e-9), cost, b, Bundle(nodes, begins[b], ends[b], sizes[b])))
        ranked.sort(key=lambda item: item[:3])
        return [bundle for _, _, _, bundle in ranked]

    def _closure(
        self, start: Collection[int], chosen: frozenset[int], last: Sequence[int], when: int
    ) -> frozenset[int] | None:
        """``start`` and everything that has to run again for it at step ``when``: back to results alive then.

        ``last`` is the last step that reads each entry.
        """
        tape, reads = self.tape, self.tape.program.reads
        bundle = set(start)
        if not bundle <= self.can:
            return None
        stack = list(bundle)
        while stack:
            for e in reads[stack.pop()]:
                nid = tape.makers[e]
                if nid not in tape.place or nid in bundle or nid in chosen:
                    continue
                if last[e] >= when or nid not in self.can:
                    continue
                bundle.add(nid)
                stack.append(nid)
        return frozenset(bundle)

    def trim(self, chosen: frozenset[int], target: int) -> frozenset[int]:
        """Keep results again if the target allows it: :meth:`refill`, and the rest in halves, the dearest first."""
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
        """Keep results again, the dearest first, that fit between the needs of steps and the target.

        The results are chosen on the profile and then priced; if in-place sharing upsets that, fewer are kept.
        """
        price = self.price(chosen)
        current = frozenset(price.twins)
        for _ in range(REFILLS):
            keep = self._room_for(current, target)
            while keep:
                less = self.price(current.difference(keep))
                if less.peak <= target:
                    break
                keep = keep[: len(keep) // 2]
            if not keep or less.seconds >= price.seconds:
                break
            price, current = less, frozenset(less.twins)
        return current

    def _room_for(self, current: frozenset[int], target: int) -> list[int]:
        """Repeated nodes whose results fit under the target from their last forward use on, the dearest first."""
        tape, count = self.tape, self.tape.num_entries
        _, live = self.look(current)
        trace = tape.trace(current)
        spare = target - live
        twin: list[int] = trace.first[count:].tolist()
        maker_step: list[int] = trace.first[:count].tolist()
        read: list[int] = tape.last_forward.tolist()
        kept: list[int] = []
        for nid in sorted(current, key=lambda nid: (-tape.seconds[nid], nid)):
            spans = [
                (max(read[e], maker_step[e]) + 1, twin[e], tape.program.nbytes[e])
                for e in tape.outputs[nid]
                if twin[e] >= 0
            ]
            if all(int(spare[begin:end].min(initial=size)) >= size for begin, end, size in spans):
                kept.append(nid)
                for begin, end, size in spans:
                    spare[begin:end] -= size
        return kept


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
    # Seeds come on top: they are few, and the only choices that reach the far end of a deep graph.
    ladder.left = 0 if asked() else ladder.allowance
    for fine in (False, True):
        for jump in (False, True):
            ladder.climb_down(jump=jump, fine=fine, most_seconds=most_seconds)
    if len(can) <= SMALL:
        polish(ladder)
    return ladder.frontier()


def polish(ladder: Ladder) -> None:
    """Price what differs in one node or two from a choice on the curve, until the curve stays as it is."""
    can, done = ladder.tape.repeatable, set[frozenset[int]]()
    steps = [frozenset(step) for width in (1, 2) for step in combinations(can, width)]
    while fresh := [twins for point in ladder.frontier() if (twins := frozenset(point.twins)) not in done]:
        for twins in fresh:
            done.add(twins)
            for step in steps if ladder.left > 0 else ():
                ladder.price(twins ^ step)


def seed(ladder: Ladder) -> None:
    """Price the choices that need no search."""
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
        for room in rooms(cuts, SEEDS):
            chosen = segments(cuts, room, light=light)
            if chosen:
                ladder.price(chosen)
