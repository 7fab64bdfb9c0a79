"""Recomputation as one step of the planner: a policy, the rewritten graph, its plan, and the check that it helps.

Whatever a policy proposes, it is planned by the real planner, and used only when that plan needs fewer bytes than the
plan without it (for a budget: when it fits). Otherwise the plan without recomputation stands and a note says why.

``planner/options.py`` describes the policies, ``rules_of`` in ``planner/symbolic/indexed_graph.py`` says which
operators MXNet's mirroring repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

from weftplan.device.amounts import counted, pasteable
from weftplan.errors import BudgetError
from weftplan.planner.options import PlanOptions
from weftplan.planner.order import lazy_backward, reversed_backward, stepwise_forward
from weftplan.planner.program import Program
from weftplan.planner.recompute.echo import chosen_echo
from weftplan.planner.recompute.ladder import Archive, Ladder, curve
from weftplan.planner.recompute.segments import WINDOWS, square_root
from weftplan.planner.recompute.tape import Price, Tape
from weftplan.planner.rewiring import repeat
from weftplan.planner.strategies import Draft, assignment, plan_graph

Cost = Callable[[Program], Sequence[float]]
"""Seconds of every node of a graph (0 for variables), modelled or measured; asked again for rewritten graphs."""
WORTH_A_PLAN = 0.99
"""A proposal is planned if its lower bound is below this part of the smallest plan so far."""
CHEAP_SHARE = 0.05
"""Policy ``cheap`` spends at most this part of a step's modelled time on repeating."""


def wanted(options: PlanOptions, program: Program) -> bool:
    """Whether these options (or a node) ask for recomputation."""
    asked = options.recompute != "off" or options.budget is not None
    return asked or any(map(attrgetter("asked_twice"), program.graph.works))


def apply(start: Draft, options: PlanOptions, *, cost: Cost, most_time: float | None = None) -> Draft:
    """Apply the policy of ``options``, or its budget, which wins over it, to a training graph ``start``.

    ``most_time``: in place of a rule's choice, the smallest plan whose repetition takes this part of a step.

    Raises:
        BudgetError: no choice fits the budget; the message names the smallest budget found that works.
    """
    memory = start.memory
    if options.budget is not None and memory.peak <= options.budget:
        return start
    if not start.program.backward:
        if options.budget is None:
            return start
        raise BudgetError(
            f"the plan needs {memory.peak:,} bytes, the budget is {options.budget:,}: without a backward part there is "
            f"nothing to recompute; the smallest budget that works is {pasteable(memory.peak)}",
            smallest=memory.peak,
        )
    starts = _tapes(start, options, cost)
    if options.budget is not None:
        return _within(start, starts, options, options.budget)
    policy = options.recompute
    if policy == "cheap" or most_time is not None:
        return _cheapest(start, starts, options, most_time=CHEAP_SHARE if most_time is None else most_time)
    if policy == "sqrt":
        proposals = _roots(starts)
    else:
        rule = chosen_echo if policy == "echo" else partial(_chosen_v1, everywhere=policy == "mxnet")
        proposals = [(tape, tape.price(rule(tape))) for tape in starts]
    return _try(start, options, proposals, policy if policy != "off" else "__force_mirroring__")


def _tapes(start: Draft, options: PlanOptions, cost: Cost) -> list[Tape]:
    """The graph ready for prices, in the orders worth a trial.

    The given one; with free backward steps placed lazily; with the backward part in reverse forward order; with both
    parts step by step.
    """
    seconds = cost(start.program)
    tapes = [Tape(start.program, assignment=start.assignment, options=options, seconds=seconds)]
    orders = [start.program.order]
    for program in (
        lazy_backward(start.program),
        reversed_backward(start.program),
        reversed_backward(stepwise_forward(start.program)),
    ):
        if program.order not in orders:
            orders.append(program.order)
            tapes.append(Tape(program, assignment=assignment(program, options), options=options, seconds=seconds))
    return tapes


def _chosen_v1(tape: Tape, *, everywhere: bool) -> frozenset[int]:
    """The nodes that MXNet 1.x's rule repeats; without ``everywhere`` only those that ask for it."""
    works = tape.program.graph.works
    return frozenset(
        nid for nid in tape.repeatable if "mxnet" in works[nid].rules and (everywhere or works[nid].asked_twice)
    )


def _roots(tapes: Sequence[Tape]) -> list[tuple[Tape, Price]]:
    """The square-root rule's choice: without the nodes whose repetition its peak does not need, and whole.

    The first is faster at the same lower bound; the second wins if the real plan of the first needs more.
    """
    tape = _better_order(tapes)
    whole = square_root(tape)
    if not whole.twins:
        return []
    archive = Archive(tape)
    trimmed = archive.price(Ladder(archive).trim(frozenset(whole.twins), whole.peak))
    return [(tape, trimmed), (tape, whole)]


def _try(start: Draft, options: PlanOptions, proposals: Iterable[tuple[Tape, Price]], policy: str) -> Draft:
    """The smallest real plan among the proposals, if it is smaller than the plan without recomputation."""
    best, note, more = start, "", 0.0
    refused = 0
    for tape, price in proposals:
        if not price.twins:
            continue
        need = price.peak
        # The price is the lower bound of the plan: one that cannot win much is not worth its packing.
        if need < best.memory.peak * (WORTH_A_PLAN if best is not start else 1.0):
            draft = plan_graph(repeat(tape.program, price.twins), options)
            need = draft.memory.peak
            if need < best.memory.peak:
                best, note = draft, _saved(policy, start, draft=draft, tape=tape, price=price)
                more = _share(tape, price)
                continue
        refused = min(refused, need) or need
    if best is start:
        why = f"it needs {refused:,} bytes" if refused else "it would repeat nothing"
        note = f"recompute {policy}: not used, {why}; without it {start.memory.peak:,}"
    return replace(best.slowed(more), notes=(*best.notes, note))


def _cheapest(start: Draft, tapes: Sequence[Tape], options: PlanOptions, *, most_time: float) -> Draft:
    """The smallest plan whose repetition takes at most this part of a step."""
    tape = _better_order(tapes)
    limit = most_time * tape.step_seconds
    points = [point for point in curve(tape, most_seconds=limit) if point.seconds <= limit]
    # The smallest lower bounds first; a few, because offsets may cost one of them what another does not pay.
    best = sorted(points, key=lambda point: point.peak)[:3]
    return _try(start, options, [(tape, point) for point in best], options.recompute)


def _better_order(tapes: Sequence[Tape]) -> Tape:
    """The order in which the square-root rule reaches less; the given order when it makes no difference."""
    return tapes[0] if len(tapes) == 1 else min(tapes, key=lambda tape: square_root(tape, windows=WINDOWS[:1]).peak)


def _within(start: Draft, tapes: Sequence[Tape], options: PlanOptions, budget: int) -> Draft:
    """The choice of least time whose real plan fits.

    The curve does not depend on the budget, and its points are tried from the fastest to the slowest. So a larger
    budget stops at the same point or earlier: time never rises with the budget.
    """
    smallest = start
    tape = _better_order(tapes)
    points = curve(tape)
    fitting = [point for point in points if point.peak <= budget]
    # After them the smallest of the others, so that the number in the error works.
    for point in (*fitting, *reversed(points[: len(points) - len(fitting)])):
        if point.peak >= smallest.memory.peak:
            break
        program = repeat(tape.program, point.twins)
        draft = start if program is start.program else plan_graph(program, options)
        if draft.memory.peak < smallest.memory.peak:
            smallest = draft
        if draft.memory.peak <= budget:
            note = _saved("budget", start, draft=draft, tape=tape, price=point)
            return replace(draft.slowed(_share(tape, point)), notes=(note,))
    needs = f"without recomputation and {smallest.memory.peak:,} with the most that was found"
    raise nothing_fits(start, budget, smallest=smallest.memory.peak, needs=needs)


def nothing_fits(start: Draft, budget: int, *, smallest: int, needs: str) -> BudgetError:
    """The error for a budget below the ``smallest`` plan; ``needs`` goes on after the bytes of the plan ``start``."""
    outside = sum(start.program.external_bytes.values())
    return BudgetError(
        f"the plan needs {start.memory.peak:,} bytes {needs}, more than the budget of {budget:,}; the smallest budget "
        f"found that works is {pasteable(smallest)}: raise the budget to that or use a smaller batch (arguments, "
        f"gradients and states come on top: {outside:,} bytes)",
        smallest=smallest,
    )


def _share(tape: Tape, price: Price) -> float:
    """The seconds of a price as a share of a step."""
    return price.seconds / tape.step_seconds if tape.step_seconds else 0.0


def _saved(policy: str, start: Draft, *, draft: Draft, tape: Tape, price: Price) -> str:
    twice = f"recompute {policy}: {counted(len(price.twins), 'node')} run twice"
    return f"{twice}, {gain(draft.memory.peak, start.memory.peak, more_time=_share(tape, price))}"


def gain(nbytes: int, before: int, *, more_time: float) -> str:
    """Return how many bytes a plan saves, and the time that this costs, in words."""
    less = 100.0 * (1.0 - nbytes / before)
    return f"{nbytes:,} bytes instead of {before:,} (-{less:.1f} %) for {100.0 * more_time:.1f} % more modelled time"
