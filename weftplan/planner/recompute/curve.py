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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from weftplan.planner.graph import IntArray
from weftplan.planner.recompute.segments import measure, rooms, segments
from weftplan.planner.recompute.tape import Price, Tape

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
        self.nbytes = np.array(tape.facts.nbytes, dtype=np.int64)
        self.made = np.array([e for nid in tape.forward for e in tape.outputs[nid]], dtype=np.int64)
        """Entries that the forward part makes."""
        self.last_forward = np.full(tape.num_entries, -1, dtype=np.int64)
        """Last forward step that reads each entry, -1 for none."""
        for step, nid in enumerate(tape.forward):
            self.last_forward[tape.facts.reads[nid]] = step

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
        live, price, excess = self._look(chosen, target)
        while price.peak > target:
            bundles = self._bundles(chosen, live, target)
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
                        best, taken = gain, (there, cost, left)
                if taken is not None or size == 1:
                    break
                size //= 4
                size = max(size, 1)
            if taken is None:
                return None
            live, price, excess = taken
            chosen = frozenset(price.twins)
        return chosen

    def _look(self, chosen: frozenset[int], target: int) -> tuple[IntArray, Price, float]:
        """Bytes alive at each step, price, and bytes times steps above the target."""
        price, live = self.tape.look(chosen)
        self._remember(price)
        return live, price, float(np.maximum(live - target, 0).sum())

    def _bundles(self, chosen: frozenset[int], live: IntArray, target: int) -> list[frozenset[int]]:
        """Sets of nodes whose repetition would free bytes where more than the target is alive; best first."""
        tape = self.tape
        trace = tape.trace(chosen)
        over = np.maximum(live - target, 0)
        hot = np.flatnonzero(over)
        lowest, highest = int(hot[0]), int(hot[-1])
        # Results that lie idle: blocks of forward entries, from the last forward use of any to the first use behind it.
        mine = self.made[trace.block[self.made] >= 0]
        block = trace.block[mine]
        begin = np.full(int(block.max(initial=-1)) + 1, -1, dtype=np.int64)
        end = np.full(len(begin), len(live), dtype=np.int64)
        size = np.zeros(len(begin), dtype=np.int64)
        np.maximum.at(
            begin, block, np.where(self.last_forward[mine] < 0, trace.first[mine], self.last_forward[mine]) + 1
        )
        np.minimum.at(end, block, trace.needed[mine])
        size[block] = self.nbytes[mine]
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
        ranked: list[tuple[float, float, int, frozenset[int]]] = []
        last: list[int] = trace.last.tolist()
        ends: list[int] = end.tolist()
        gains: list[float] = gain.tolist()
        for b, start in makers.items():
            bundle = self._closure(start, chosen, last, ends[b])
            if bundle is None or bundle <= chosen:
                continue
            cost = sum(tape.seconds[nid] for nid in bundle - chosen)
            ranked.append((-gains[b] / max(cost, 1e-9), cost, b, bundle))
        ranked.sort(key=lambda item: item[:3])
        return [bundle for _, _, _, bundle in ranked]

    def _closure(
        self, start: Collection[int], chosen: frozenset[int], last: Sequence[int], when: int
    ) -> frozenset[int] | None:
        """``start`` and everything that has to run again for it at step ``when``: back to results alive then.

        ``last`` is the last step that reads each entry.
        """
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
                if last[e] >= when or nid not in self.can:
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
