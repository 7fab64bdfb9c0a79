"""The trade of time for memory of one graph: which nodes to repeat for every budget worth having.

The curve is computed whole and does not depend on any budget that a user names, so that answers taken from it are
monotone: a larger budget never costs more time. Everything priced on the way is remembered, and the curve is what is
not dominated.

1. Seeds: nothing; the square-root rule in rooms of many sizes; all nodes whose time per byte is below a threshold; both
   together (inside segments, only nodes below a threshold).
2. A ladder of targets from the peak without recomputation down. At each rung the search descends: it looks at the
   steps where more is alive than the target, and at the results that lie idle there between their last forward and
   their first backward use. Repeating what made such a result frees its bytes during the gap; what that needs is
   followed back to results that are kept anyway. The bundle that frees most per second is taken, until the target
   holds; then whatever turns out superfluous is taken back.
3. Small graphs get an exchange search around every point of the curve; very small ones are enumerated.

The work is bounded by a number of prices that depends on the graph alone, never by a clock: equal graphs get equal
plans.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from weftplan.planner.recompute.segments import measure, rooms, segments
from weftplan.planner.recompute.tape import Price, Tape, Trace

STEPS_PRICED = 2_000_000
"""Steps that the whole search may walk: about four seconds of Python."""
MOST_PRICES = 16_000
"""Prices are not worth more than this many, however small the graph."""
EXHAUSTIVE = 12
"""So few nodes that may be repeated are tried in all combinations."""
SMALL = 64
"""Graphs with so few nodes that may be repeated get the exchange search."""
LAYERS = 4
"""How many layers the exchange search looks at."""
PATIENCE = 120
"""So many prices per repeatable node without any change of the curve end the exchange search."""
STRETCH = 6
"""The longest stretch of the forward order that the exchange search moves at once."""
RUNG = 0.96
"""Each target of the ladder is this part of the one before."""


@dataclass(frozen=True, slots=True)
class Point:
    """One choice that no other choice beats in both bytes and seconds."""

    peak: int
    seconds: float
    twins: frozenset[int]


def curve(tape: Tape, *, most_seconds: float | None = None) -> list[Point]:
    """Choices from the fastest (nothing repeated) to the smallest found; peaks fall strictly, seconds rise.

    ``most_seconds``: do not look for choices that take longer (the curve may have some all the same).
    """
    search = Search(tape, most_seconds=most_seconds)
    search.run()
    return search.frontier()


class Search:
    """Prices that are remembered, and the moves that lead to new ones."""

    def __init__(self, tape: Tape, *, most_seconds: float | None = None, steps_priced: int = STEPS_PRICED) -> None:
        self.tape = tape
        self.most_seconds = float("inf") if most_seconds is None else most_seconds
        steps = len(tape.forward) + len(tape.backward)
        self.left = max(60, min(MOST_PRICES, steps_priced // max(steps, 1)))
        """Prices that may still be asked for."""
        self.known: dict[frozenset[int], Price] = {}
        self.stairs: list[tuple[float, int]] = []
        self.idle = 0
        """Prices since the curve last changed."""
        self.can = frozenset(tape.repeatable)

    def run(self) -> None:
        """Fill the archive."""
        self.price(frozenset())
        if not self.can:
            return
        if len(self.can) <= EXHAUSTIVE:
            for mask in range(1, 1 << len(self.can)):
                self.price(frozenset(nid for k, nid in enumerate(self.tape.repeatable) if mask >> k & 1))
            return
        self._seeds()
        self._ladder()
        if len(self.can) <= SMALL:
            self._exchange()

    def price(self, chosen: frozenset[int]) -> Price:
        """The price of a choice, remembered under what it really repeats."""
        known = self.known.get(chosen)
        if known is None:
            known = self.tape.price(chosen)
            self.known[chosen] = known
            self._remember(known)
        return known

    def _remember(self, price: Price) -> None:
        self.left -= 1
        self.idle += 1
        self.known[frozenset(price.twins)] = price
        # `stairs` holds (seconds, peak) of the curve so far: seconds rise, peaks fall.
        stairs, step = self.stairs, (price.seconds, price.peak)
        at = bisect_left(stairs, step)
        if (at and stairs[at - 1][1] <= price.peak) or (at < len(stairs) and stairs[at] == step):
            return
        end = at
        while end < len(stairs) and stairs[end][1] >= price.peak:
            end += 1
        stairs[at:end] = [step]
        self.idle = 0

    def frontier(self) -> list[Point]:
        """What is not dominated, fastest first."""
        best: list[Point] = []
        ranked = sorted(
            {(p.seconds, p.peak, p.twins) for p in self.known.values()}, key=lambda p: (p[0], p[1], len(p[2]), p[2])
        )
        for seconds, peak, twins in ranked:
            if not best or peak < best[-1].peak:
                best.append(Point(peak, seconds, frozenset(twins)))
        return best

    # -- seeds ---------------------------------------------------------------------------------------------------

    def _seeds(self) -> None:
        tape = self.tape
        cuts = measure(tape)
        spans = [s for room in rooms(tape, cuts, 12) if (s := segments(tape, cuts, room))]
        ratio = {
            nid: tape.seconds[nid] / max(1, max((tape.facts.nbytes[e] for e in tape.outputs[nid]), default=1))
            for nid in tape.repeatable
        }
        levels = sorted(set(ratio.values()))
        count = min(len(levels), 8)
        cheap = [
            frozenset(nid for nid in tape.repeatable if ratio[nid] <= levels[(k + 1) * len(levels) // count - 1])
            for k in range(count)
        ]
        for chosen in (*cheap, *spans):
            self.price(chosen)
        for some in cheap[: count - 1]:
            for span in spans[::3]:
                self.price(some & span)

    # -- the ladder ----------------------------------------------------------------------------------------------

    def _ladder(self) -> None:
        start = self.price(frozenset()).peak
        target = start
        chosen: frozenset[int] = frozenset()
        reserve = self.left // 4 if len(self.can) <= SMALL else 0
        missed = 0
        while self.left > reserve and missed < 3:
            target = int(target * RUNG)
            fitting = [(p.seconds, p.twins) for p in self.known.values() if p.peak <= target]
            reached = self._descend(chosen, target)
            if reached is not None:
                chosen = self.trim(reached, target)
                missed = 0
            if fitting:
                # The best that the seeds and earlier rungs offer, taken back as far as this target allows.
                seconds, twins = min(fitting)
                if reached is None or seconds < self.price(chosen).seconds:
                    chosen = self.trim(frozenset(twins), target)
                    missed = 0
                elif self.left > reserve:
                    self.trim(frozenset(twins), target)
            elif reached is None:
                missed += 1
            if self.price(chosen).seconds > self.most_seconds:
                return

    def _descend(self, chosen: frozenset[int], target: int) -> frozenset[int] | None:
        """Add bundles until the peak is at most ``target``; None when no bundle helps any more."""
        trace, price, excess = self._look(chosen, target)
        while price.peak > target:
            bundles = self._bundles(chosen, trace, target)
            taken = None
            size = 1 if len(bundles) < 24 else len(bundles) // 12
            while self.left > 0:
                # Several bundles at once while the way is long; one by one where they turn out to spoil each other.
                groups = [frozenset[int]().union(*bundles[:size])] if size > 1 else bundles[:6]
                best = 0.0
                for group in groups:
                    there, cost, left = self._look(chosen | group, target)
                    gain = (excess - left) / max(cost.seconds - price.seconds, 1e-9)
                    if left < excess and gain > best:
                        best, taken = gain, (chosen | group, there, cost, left)
                if taken is not None or size == 1:
                    break
                size //= 4
                size = max(size, 1)
            if taken is None:
                return None
            chosen, trace, price, excess = taken
            chosen = frozenset(price.twins)
        return chosen

    def _look(self, chosen: frozenset[int], target: int) -> tuple[Trace, Price, float]:
        """Trace, price, and bytes times steps above the target (in proportion, the peak counts extra)."""
        trace = Trace()
        price = self.tape.price(chosen, trace)
        self._remember(price)
        live = np.array(trace.live, dtype=np.float64)
        return trace, price, float(np.maximum(live - target, 0.0).sum())

    def _bundles(self, chosen: frozenset[int], trace: Trace, target: int) -> list[frozenset[int]]:
        """Sets of nodes whose repetition would free bytes where more than the target is alive; best first."""
        tape, facts = self.tape, self.tape.facts
        over = np.maximum(np.array(trace.live, dtype=np.float64) - target, 0.0)
        hot = np.flatnonzero(over)
        lowest, highest = int(hot[0]), int(hot[-1])
        forward = len(tape.forward)
        first_read, last_forward = self._uses(trace, forward)
        members: dict[int, list[int]] = {}
        for e, block in trace.block.items():
            if e < tape.num_entries and tape.makers[e] in tape.place:
                members.setdefault(block, []).append(e)
        ranked: list[tuple[float, float, frozenset[int]]] = []
        for entries in members.values():
            late = [e for e in entries if e in first_read]
            if not late:
                continue
            begin = max(last_forward.get(e, trace.first[e]) for e in entries) + 1
            end = min(first_read[e] for e in late)
            if end <= lowest or begin > highest or begin >= end:
                continue
            gain = float(np.minimum(over[begin:end], facts.nbytes[entries[0]]).sum())
            if gain <= 0.0:
                continue
            bundle = self._closure({tape.makers[e] for e in late}, chosen, trace, end)
            if bundle is None or bundle <= chosen:
                continue
            cost = sum(tape.seconds[nid] for nid in bundle - chosen)
            ranked.append((-gain / max(cost, 1e-9), cost, bundle))
        ranked.sort(key=lambda item: (item[0], item[1], sorted(item[2])))
        return [bundle for _, _, bundle in ranked]

    def _uses(self, trace: Trace, forward: int) -> tuple[dict[int, int], dict[int, int]]:
        """(first backward read, last forward read) per forward entry; twins count as backward."""
        tape = self.tape
        reads = tape.facts.reads
        last: dict[int, int] = {}
        for step, nid in enumerate(tape.forward):
            for e in reads[nid]:
                last[e] = step
        twins = {-1 - nid for nid in trace.steps if nid < 0}
        first: dict[int, int] = {}
        for step in range(forward, len(trace.steps)):
            nid = trace.steps[step]
            for e in reads[-1 - nid if nid < 0 else nid]:
                if tape.makers[e] not in twins:
                    first.setdefault(e, step)
        return first, last

    def _closure(
        self, start: Collection[int], chosen: frozenset[int], trace: Trace, when: int
    ) -> frozenset[int] | None:
        """``start`` and everything that has to run again for it at step ``when``: back to results alive then."""
        tape, reads = self.tape, self.tape.facts.reads
        bundle = set(start)
        if not bundle <= self.can:
            return None
        stack = list(bundle)
        while stack:
            for e in reads[stack.pop()]:
                nid = tape.makers[e]
                if nid not in tape.place or nid in bundle or nid in chosen:
                    continue
                if trace.last.get(e, -1) >= when or nid not in self.can:
                    continue
                bundle.add(nid)
                stack.append(nid)
        return frozenset(bundle)

    def trim(self, chosen: frozenset[int], target: int) -> frozenset[int]:
        """Keep results again where the target allows it, the dearest first; in halves while the set is large."""
        tape = self.tape
        price = self.price(chosen)
        current = frozenset(price.twins)
        queue: list[list[int]] = [sorted(current, key=lambda nid: (-tape.seconds[nid], nid))]
        allowed = max(12, self.left // 16)
        while queue and allowed > 0:
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

    # -- small graphs ----------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Look around every point of the curve, then around what only the curve beats.

        A choice that is beaten now may have a neighbour that is not, so the next layers below the curve are worth their
        prices once nothing new is found next to the curve itself.
        """
        seen: set[frozenset[int]] = set()
        patience = PATIENCE * len(self.can)
        while self.left > 0:
            fresh = next((layer for layer in self._layers() if not seen.issuperset(layer)), None)
            if fresh is None:
                return
            # The slow end first: there the points are farther from each other, and more is to be found.
            for twins in reversed(fresh):
                if twins in seen:
                    continue
                seen.add(twins)
                for neighbour in self._neighbours(twins):
                    if self.left <= 0 or self.idle > patience:
                        return
                    self.price(neighbour)

    def _layers(self) -> Iterator[list[frozenset[int]]]:
        """What is not dominated; what is not dominated without these; and so on."""
        rest = sorted({(p.seconds, p.peak, p.twins) for p in self.known.values()}, key=lambda p: (p[0], p[1], p[2]))
        for _ in range(LAYERS):
            layer: list[frozenset[int]] = []
            behind = []
            lowest: int | None = None
            for item in rest:
                if lowest is None or item[1] < lowest:
                    lowest = item[1]
                    layer.append(frozenset(item[2]))
                else:
                    behind.append(item)
            yield layer
            rest = behind

    def _neighbours(self, twins: frozenset[int]) -> Iterator[frozenset[int]]:
        """One node in or out, one for another, a stretch of the forward order in or out."""
        can = self.tape.repeatable
        outside = [nid for nid in can if nid not in twins]
        inside = [nid for nid in can if nid in twins]
        for nid in inside:
            yield twins - {nid}
        for nid in outside:
            yield twins | {nid}
        for start in range(len(can)):
            for end in range(start + 2, min(start + STRETCH, len(can)) + 1):
                stretch = can[start:end]
                yield twins.union(stretch)
                yield twins.difference(stretch)
        for out in inside:
            for new in outside:
                yield (twins - {out}) | {new}
