"""All choices that a search has priced, and those among them that no other beats.

It owns the number of prices that a search may still ask for, and relies on a tape for each price.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from weftplan.planner.graph import IntArray
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


class Archive:
    """Prices that are remembered, and how many may still be asked for."""

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
