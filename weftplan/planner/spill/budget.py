"""Plans under a budget that keep a forward result, recompute it, or offload it and fetch it back.

Recomputation gives a curve of graphs. For several points of it the search (:mod:`.search`) offloads results one by one.
The planner then plans the undominated choices, fastest first, until one fits. Plans with recomputation alone compete.
Bytes in offload targets do not count against the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weftplan.device.amounts import counted
from weftplan.errors import BudgetError
from weftplan.planner import recompute
from weftplan.planner.buffers import Buffers
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.options import PlanOptions
from weftplan.planner.rewiring import spilled
from weftplan.planner.spill.search import Search, SpillChoice, spill_targets
from weftplan.planner.strategies import Draft, assignment, plan_graph

BASES = 4
"""Number of points of the recomputation curve that are combined with offloading."""
MAX_STEPS = 3000
"""Maximum number of steps for combinations of recomputation and offloading; longer graphs use one of the two."""


def can_spill(options: PlanOptions, start: Draft) -> bool:
    """Return whether the plan exceeds the budget and some device has an offload target."""
    return (
        options.budget is not None
        and start.memory.peak > options.budget
        and any(spill_targets(context, options) for context in start.program.contexts)
    )


def apply(start: Draft, options: PlanOptions, *, cost: recompute.Cost) -> Draft:
    """Fit a training graph ``start`` into ``options.budget``, which its plan exceeds, at the least modelled time.

    Raises:
        BudgetError: no choice fits; names the smallest budget found that works.
    """
    assert options.budget is not None
    program, memory = start.program, start.memory
    seconds = cost(program)
    step = sum(seconds[nid] for nid in program.order)
    smallest = memory.peak
    choices = _curve(start, options, recompute.Price(memory.peak, 0.0, ()), cost)
    # No choice is faster than one whose copies delay nothing, so the first of them that fits is the answer.
    best, _ = _first_that_fits(start, options, [c for c in choices if c.seconds == 0.0], give_up=True)
    if best is None:
        if program.num_forward < len(program.order) <= MAX_STEPS:
            tape = recompute.Tape(program, assignment=start.assignment, options=options, seconds=seconds)
            for point in _spread(recompute.curve(tape)):
                choices += _curve(start, options, point, cost)
        best, low = _first_that_fits(start, options, _undominated(choices))
        smallest = min(smallest, low)
        try:
            recomputed = recompute.apply(start, options, cost=cost)
        except BudgetError as error:
            smallest = min(smallest, error.smallest or smallest)
        else:
            alone_seconds = cost(recomputed.program)
            if best is None or sum(alone_seconds[nid] for nid in recomputed.program.order) - step <= best[1].seconds:
                return recomputed
    if best is not None:
        draft, choice = best
        more = choice.seconds / step if step else 0.0
        return replace(draft.slowed(more), notes=(_note(memory, draft, choice, more),))
    limits = f"{smallest:,} with the most that was found to compute again or to send to the host"
    needs = f"with everything on the device, and {limits}"
    raise recompute.nothing_fits(start, options.budget, smallest=smallest, needs=needs)


def _curve(start: Draft, options: PlanOptions, repeated: recompute.Price, cost: recompute.Cost) -> list[SpillChoice]:
    """Return choices with offloads, from the graph that recomputes the twins of ``repeated``."""
    program, shared = start.program, start.assignment
    if repeated.twins:
        program = recompute.repeat(program, repeated.twins)
        shared = assignment(program, options)
    choices = Search(Buffers(program, shared, options=options), cost(program)).choices()
    return _undominated(
        [replace(choice, seconds=repeated.seconds + choice.seconds, twins=repeated.twins) for choice in choices]
    )


def _spread(points: Sequence[recompute.Price]) -> list[recompute.Price]:
    """Return at most ``BASES`` evenly spaced points of a curve that recompute something."""
    repeating = [point for point in points if point.twins]
    if len(repeating) <= BASES:
        return repeating
    return [repeating[k * (len(repeating) - 1) // (BASES - 1)] for k in range(BASES)]


def _undominated(choices: Sequence[SpillChoice]) -> list[SpillChoice]:
    """Return the undominated choices: seconds (then bytes copied) rise, peaks fall strictly."""
    return recompute.undominated(sorted(choices, key=lambda choice: (choice.seconds, choice.copied, choice.peak)))


def _first_that_fits(
    start: Draft, options: PlanOptions, choices: Sequence[SpillChoice], *, give_up: bool = False
) -> tuple[tuple[Draft, SpillChoice] | None, int]:
    """Return (draft, choice) for the fastest choice whose plan fits, or None, and the smallest peak that was planned.

    If no choice has a peak within the budget, the last one, with the lowest peak, is planned nevertheless, so that an
    error can name a budget that works; ``give_up`` omits this. Quick packing decides whether a choice fits; the final
    packing can only be smaller.
    """
    assert options.budget is not None
    quick = options.replace(effort="fast") if options.effort == "auto" else options
    fewest = 1 << 62
    fitting = [choice for choice in choices if choice.peak <= options.budget]
    for choice in fitting or ([] if give_up else choices[-1:]):
        draft = _planned(start, quick, choice)
        need = draft.memory.peak - draft.memory.offloaded
        fewest = min(fewest, need)
        if need <= options.budget:
            return (_planned(start, options, choice), choice), fewest
    return None, fewest


def _planned(start: Draft, options: PlanOptions, choice: SpillChoice) -> Draft:
    program = recompute.repeat(start.program, choice.twins)
    return plan_graph(spilled(program, choice.spills) if choice.spills else program, options)


def _note(plain: MemoryPlan, draft: Draft, choice: SpillChoice, more: float) -> str:
    need = draft.memory.peak - draft.memory.offloaded
    targets = sorted({str(spill.target) for spill in choice.spills})
    on_host = draft.memory.offloaded == draft.memory.on_host
    location = "on the host" if on_host else f"in {', '.join(targets)}"
    waits = f"{counted(len(choice.spills), 'result')} wait{'s' * (len(choice.spills) == 1)} {location}"
    twice, gain = f"{counted(len(choice.twins), 'node')} run twice", recompute.gain(need, plain.peak, more_time=more)
    return f"budget: {waits} ({draft.memory.offloaded:,} bytes), {twice}, {gain}"
