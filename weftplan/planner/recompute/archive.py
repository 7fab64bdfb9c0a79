"""All choices that a search has priced, and those among them that no other beats.

It owns the number of prices that a search may still ask for, and relies on a tape for each price. One search, in one
thread, uses an archive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from weftplan.planner.graph import IntArray
from weftplan.planner.recompute.tape import Price, Tape
from weftplan.planner.stopping import asked

T = TypeVar("T")

STEPS_PRICED = 2_000_000
"""Steps that a whole search may price: one to six seconds of Python, by the length of the graph."""
MOST_PRICES = 24_000
"""Prices are not worth more than this many, however small the graph."""


@dataclass(frozen=True, slots=True)
class Point:
    """One choice that no other choice beats in both bytes and seconds."""

    peak: int
    seconds: float
    twins: frozenset[int]


def undominated(ranked: Iterable[T], peak: Callable[[T], int]) -> list[T]:
    """What is left of choices from the fastest to the slowest without those that a faster one undercuts: peaks fall."""
    kept: list[T] = []
    lowest: int | None = None
    for choice in ranked:
        if lowest is None or peak(choice) < lowest:
            lowest = peak(choice)
            kept.append(choice)
    return kept


class Archive:
    """Prices that are remembered, and how many may still be asked for."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        steps = len(tape.forward) + len(tape.backward)
        self.allowance = max(60, min(MOST_PRICES, STEPS_PRICED // max(steps, 1)))
        """Prices that the search may ask for in all, seeds aside."""
        self.left = self.allowance
        self.known: dict[frozenset[int], Price] = {}
        self.stairs: list[tuple[float, int]] = []
        self.can = frozenset(tape.repeatable)

    def price(self, chosen: frozenset[int]) -> Price:
        """The price of a choice, remembered under what it really repeats."""
        known = self.known.get(chosen)
        if known is None:
            known = self.tape.price(chosen)
            self.known[chosen] = known
            self._remember(known)
        return known

    def _remember(self, price: Price) -> None:
        self.left = 0 if asked() else self.left - 1
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

    def frontier(self) -> list[Point]:
        """What is not dominated, fastest first."""
        ranked = sorted(
            {(p.seconds, p.peak, p.twins) for p in self.known.values()}, key=lambda p: (p[0], p[1], len(p[2]), p[2])
        )
        best = undominated(ranked, peak=lambda p: p[1])
        return [Point(peak, seconds, frozenset(twins)) for seconds, peak, twins in best]

    def look(self, chosen: frozenset[int]) -> tuple[Price, IntArray]:
        """The price, and what each step asks of its peak."""
        price, live = self.tape.look(chosen)
        self._remember(price)
        return price, live
