"""Recomputation as one step of the planner: a policy, the rewritten graph, its plan, and the check that it helps.

Whatever a policy proposes, it is planned by the real planner, and used only when that plan needs fewer bytes than the
plan without it (for a budget: when it fits). Otherwise the plan without recomputation stands and a note says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weftplan.errors import BudgetError
from weftplan.planner.inplace import Assignment
from weftplan.planner.liveness import Facts
from weftplan.planner.options import PlanOptions
from weftplan.planner.plan import MemoryPlan
from weftplan.planner.recompute.cost import node_seconds
from weftplan.planner.recompute.curve import Point, curve
from weftplan.planner.recompute.echo import chosen_echo
from weftplan.planner.recompute.rewrite import repeat
from weftplan.planner.recompute.rules import chosen_v1, has_forced
from weftplan.planner.recompute.segments import square_root
from weftplan.planner.recompute.tape import Tape
from weftplan.planner.strategies import plan_memory

CHEAP_SHARE = 0.05
"""Policy ``cheap`` spends at most this part of a step's modelled time on repeating."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A graph with sizes in execution order, its plan, and what was decided."""

    facts: Facts
    memory: MemoryPlan
    found: Assignment
    notes: tuple[str, ...]


def wanted(options: PlanOptions, facts: Facts) -> bool:
    """Whether these options (or a node's attribute) ask for recomputation."""
    return options.recompute != "off" or options.budget is not None or has_forced(facts.graph.nodes)


def apply(
    facts: Facts,
    num_forward: int,
    options: PlanOptions,
    memory: MemoryPlan,
    found: Assignment,
    *,
    measured: Mapping[str, float] | None = None,
) -> Outcome:
    """Apply the policy of ``options`` to a training graph.

    Args:
        facts: the graph in execution order.
        num_forward: how many steps of its order are the forward part; the others are the backward part.
        options: names the policy, or a budget, which wins over it.
        memory: the plan without recomputation.
        found: its assignment.
        measured: seconds of nodes by name, where the caller has measured them.

    Raises:
        BudgetError: no choice fits the budget; the message names the smallest budget found that works.
    """
    start = Outcome(facts, memory, found, ())
    if options.budget is not None and memory.peak <= options.budget:
        return start
    if num_forward == len(facts.order):
        if options.budget is None:
            return start
        raise BudgetError(
            f"the plan needs {memory.peak:,} bytes, the budget is {options.budget:,}: without a backward part there is "
            f"nothing to recompute; the smallest budget that works is {memory.peak}"
        )
    tape = Tape(facts, num_forward, found, options, node_seconds(facts, measured))
    if options.budget is not None:
        return _within(start, num_forward, tape, options, options.budget)
    policy = options.recompute
    if policy == "cheap":
        return _cheapest(start, num_forward, tape, options)
    if policy == "sqrt":
        chosen = square_root(tape)
    elif policy == "echo":
        chosen = chosen_echo(tape)
    else:
        chosen = chosen_v1(tape, everywhere=policy == "mxnet")
    return _try(start, num_forward, tape, options, [chosen], policy if policy != "off" else "__force_mirroring__")


def _planned(start: Outcome, num_forward: int, options: PlanOptions, chosen: Iterable[int]) -> Outcome:
    facts = repeat(start.facts, num_forward, frozenset(chosen))
    if facts is start.facts:
        return start
    memory, found = plan_memory(facts, options)
    return Outcome(facts, memory, found, ())


def _try(
    start: Outcome,
    num_forward: int,
    tape: Tape,
    options: PlanOptions,
    proposals: Sequence[frozenset[int]],
    policy: str,
) -> Outcome:
    """The smallest real plan among the proposals, if it is smaller than the plan without recomputation."""
    best, spent = start, tape.price(())
    refused = 0
    for chosen in proposals:
        price = tape.price(chosen)
        if not price.twins:
            continue
        outcome = _planned(start, num_forward, options, price.twins)
        if outcome.memory.peak < best.memory.peak:
            best, spent = outcome, price
        else:
            refused = min(refused, outcome.memory.peak) or outcome.memory.peak
    if best is start:
        why = f"it needs {refused:,} bytes" if refused else "it repeats nothing"
        return _noted(start, f"recompute {policy}: not used, {why}; without it {start.memory.peak:,}")
    return _noted(best, _saved(policy, start, best, tape, spent.seconds, len(spent.twins)))


def _cheapest(start: Outcome, num_forward: int, tape: Tape, options: PlanOptions) -> Outcome:
    """The smallest plan whose repetition takes at most :data:`CHEAP_SHARE` of a step."""
    limit = CHEAP_SHARE * tape.step_seconds
    points = [point for point in curve(tape) if point.seconds <= limit]
    # The smallest lower bounds first; a few, because offsets may cost one of them what another does not pay.
    proposals = [point.twins for point in sorted(points, key=lambda point: point.peak)[:3]]
    return _try(start, num_forward, tape, options, proposals, "cheap")


def _within(start: Outcome, num_forward: int, tape: Tape, options: PlanOptions, budget: int) -> Outcome:
    """The choice of least time whose real plan fits.

    The curve does not depend on the budget, and its points are tried from the fastest to the slowest. So a larger
    budget stops at the same point or earlier: time never rises with the budget.
    """
    smallest: Outcome = start
    points = curve(tape)
    for point in points:
        if point.peak > budget:
            continue
        outcome = _planned(start, num_forward, options, point.twins)
        if outcome.memory.peak < smallest.memory.peak:
            smallest = outcome
        if outcome.memory.peak <= budget:
            return _noted(outcome, _saved("budget", start, outcome, tape, point.seconds, len(point.twins)))
    if smallest is start or smallest.memory.peak > budget:
        smallest = _smallest(start, num_forward, options, points, smallest)
    raise BudgetError(
        f"the plan needs {start.memory.peak:,} bytes without recomputation and {smallest.memory.peak:,} with the most "
        f"that was found, more than the budget of {budget:,}; the smallest budget found that works is "
        f"{smallest.memory.peak}: raise the budget to that or use a smaller batch"
    )


def _smallest(
    start: Outcome, num_forward: int, options: PlanOptions, points: Sequence[Point], known: Outcome
) -> Outcome:
    """The smallest real plan on the curve, so that the number in the error is one that works."""
    best = known
    for point in sorted(points, key=lambda point: point.peak):
        if point.peak >= best.memory.peak:
            break
        outcome = _planned(start, num_forward, options, point.twins)
        if outcome.memory.peak < best.memory.peak:
            best = outcome
    return best


def _saved(policy: str, start: Outcome, outcome: Outcome, tape: Tape, seconds: float, count: int) -> str:
    share = 100.0 * seconds / tape.step_seconds if tape.step_seconds else 0.0
    less = 100.0 * (1.0 - outcome.memory.peak / start.memory.peak)
    return (
        f"recompute {policy}: {count} node(s) run twice, {outcome.memory.peak:,} bytes instead of "
        f"{start.memory.peak:,} (-{less:.1f} %) for {share:.1f} % more modelled time"
    )


def _noted(outcome: Outcome, note: str) -> Outcome:
    return Outcome(outcome.facts, outcome.memory, outcome.found, (*outcome.notes, note))
