"""Repetition of nodes more than once, for budgets below every plan in which a node runs at most twice.

A *cut* divides the backward part. Seen from the cut, the steps before it are a forward part, and the steps after it may
compute its results again. So the search for one repetition also finds further ones: of a node that ran twice before the
cut, and of a checkpoint that is idle for a while in the middle of the backward part. Each round tries several cuts
behind the fullest step. It keeps the choice with the lowest peak and, among equal peaks, the fewest steps that reach
it, until no cut improves this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from math import inf

import numpy as np

from weftplan.planner.options import PlanOptions
from weftplan.planner.program import Program
from weftplan.planner.recompute.ladder import Ladder, seed
from weftplan.planner.recompute.tape import Price, Tape
from weftplan.planner.rewiring import repeat
from weftplan.planner.stop_request import asked
from weftplan.planner.storage_assignment import Assignment
from weftplan.planner.strategies import assignment

MAX_CUTS, MIN_CUTS, CUT_STEPS = 12, 3, 1200
"""Bounds of the number of cuts of a round, and the number times the steps of the program."""
ROUNDS = 16
"""Maximum number of rounds; for graphs of some ten layers two to six rounds reach the optimum."""
PRICES = 1500
"""Maximum number of prices of a cut, without the seeds of its search."""
STEPS_PRICED = 100_000
"""Maximum of prices times steps of a cut, without the seeds of its search: some tenths of a second of Python."""
TOTAL_STEPS_PRICED = 8_000_000
"""No round begins after this number of prices times steps: about ten seconds of Python."""
TIES = 20
"""Maximum number of choices of a cut with the same peak to compare by the number of their fullest steps."""


def further_repeats(
    program: Program, options: PlanOptions, *, cost: Callable[[Program], Sequence[float]]
) -> Iterator[tuple[Program, int, float]]:
    """Yield (program, peak, seconds): each program repeats nodes of the one before once more.

    Peaks do not rise. A peak is that of live bytes, a lower bound of the plan; the seconds are those of all further
    repetitions so far.

    Args:
        program: a training graph, in which nodes may be repeated already; only forward nodes are repeated.
        options: the options of its plan.
        cost: returns the seconds of each node.
    """
    begun, seconds = program.num_forward, 0.0
    pure = {program.graph.origin[nid] for nid in program.forward}
    spent = 0
    for _ in range(ROUNDS):
        if spent > TOTAL_STEPS_PRICED:
            return
        shared, costs = assignment(program, options), cost(program)  # neither depends on the cut
        price, live = _tape(program, begun, shared, options, costs, pure).look(frozenset())
        fullest = price.peak, int(np.count_nonzero(live == price.peak))
        found: tuple[Price, Program] | None = None
        first = max(int(np.argmax(live)) + 1, begun)
        last = len(program.order) - 1
        count = max(MIN_CUTS, min(MAX_CUTS, CUT_STEPS // len(program.order)))
        for cut in np.unique(np.linspace(first, last, count, dtype=np.int64)).tolist():
            if asked():
                return
            tape = _tape(program, cut, shared, options, costs, pure)
            choices, prices = _lowest(tape)
            spent += prices * len(program.order)
            for choice in choices:
                live = tape.look(choice.twins)[1]
                rank = choice.peak, int(np.count_nonzero(live == choice.peak))
                if rank < fullest:
                    found, fullest = (choice, tape.program), rank
        if found is None:
            return
        price, divided = found
        program, seconds = _divided(repeat(divided, price.twins), begun), seconds + price.seconds
        yield program, price.peak, seconds


def _divided(program: Program, step: int) -> Program:
    """Return the program with ``step`` steps in its forward part."""
    divided = copy(program)
    divided.num_forward = step
    return divided


def _tape(
    program: Program, cut: int, shared: Assignment, options: PlanOptions, costs: Sequence[float], pure: set[int]
) -> Tape:
    """Return the tape of a program divided at ``cut``; only nodes whose origin is in ``pure`` may be repeated."""
    divided = _divided(program, cut)
    tape = Tape(divided, assignment=shared, options=options, seconds=costs)
    tape.repeatable = [nid for nid in tape.repeatable if divided.graph.origin[nid] in pure]
    return tape


def _lowest(tape: Tape) -> tuple[list[Price], int]:
    """Return the fastest of the choices with the lowest peak that a short search finds, and its number of prices."""
    ladder = Ladder(tape)
    ladder.price(frozenset())
    seed(ladder)
    ladder.prices_left = min(PRICES, STEPS_PRICED // max(len(tape.program.order), 1))
    for fine in (False, True):
        ladder.climb_down(jump=False, fine=fine, max_seconds=inf)
    lowest = min(price.peak for price in ladder.prices.values())
    equal = [price for price in ladder.prices.values() if price.peak == lowest]
    return sorted(equal, key=lambda price: (price.seconds, price.twins))[:TIES], len(ladder.prices)
