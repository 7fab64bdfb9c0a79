"""Recomputation as one pass of the planner: apply a policy, plan the rewritten graph, check that it helps.

Every proposal of a policy is planned in full. It is used only if its plan needs fewer bytes than the plan without
recomputation, or, for a budget, if it fits. Otherwise the plan without recomputation is returned with a note that says
why.

``planner/options.py`` describes the policies; ``rules_of`` in ``planner/symbolic/indexed_graph.py`` lists the operators
that MXNet's mirroring repeats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from weftplan.device.amounts import counted, pasteable
from weftplan.errors import BudgetError
from weftplan.planner.choose_order import lazy_backward, reversed_backward, stepwise_forward
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import Program
from weftplan.planner.recompute.ladder import Ladder, curve
from weftplan.planner.recompute.segments import WINDOWS, square_root
from weftplan.planner.recompute.tape import Price, Tape
from weftplan.planner.rewiring import repeat
from weftplan.planner.strategies import Draft, assignment, plan_graph

Cost = Callable[[Program], Sequence[float]]
"""Function that returns the seconds of each node of a graph (0 for variables), modelled or measured."""
WORTH_A_PLAN = 0.99
"""Ratio: a proposal is planned only if its lower bound is below this multiple of the smallest plan so far."""
CHEAP_SHARE = 0.05
"""Maximum share of a step's modelled time that policy ``cheap`` spends on recomputation."""


def apply(start: Draft, options: PlanOptions, *, cost: Cost, max_time: float | None = None) -> Draft:
    """Apply the recomputation policy of ``options`` to a training graph; a budget takes precedence over the policy.

    Args:
        start: the plan without recomputation.
        options: policy and budget.
        cost: returns the seconds of each node.
        max_time: replaces the policy by the smallest plan that spends at most this share of a step on recomputation.

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
        return _within(start, starts, options, options.budget, cost)
    policy = options.recompute
    if policy == "cheap" or max_time is not None:
        return _cheapest(start, starts, options, max_time=CHEAP_SHARE if max_time is None else max_time)
    if policy == "sqrt":
        proposals = _roots(starts)
    else:
        rule = chosen_echo if policy == "echo" else partial(_chosen_v1, everywhere=policy == "mxnet")
        proposals = [(tape, tape.price(rule(tape))) for tape in starts]
    return _try(start, options, proposals, policy if policy != "off" else "__force_mirroring__")


def _tapes(start: Draft, options: PlanOptions, cost: Cost) -> list[Tape]:
    """Return the graph's tape for each distinct candidate order.

    The candidates are the order of ``start``; the order with independent backward steps placed lazily; the backward
    part in reverse forward order; and the same with the forward part deepest input first.
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
    """Return the nodes that the rule of MXNet 1.x repeats; unless ``everywhere``, only nodes that request it."""
    works = tape.program.graph.works
    return frozenset(
        nid for nid in tape.repeatable if "mxnet" in works[nid].rules and (everywhere or works[nid].asked_twice)
    )


def _roots(tapes: Sequence[Tape]) -> list[tuple[Tape, Price]]:
    """Return two proposals of the square-root rule: trimmed to the nodes that its peak needs, and in full.

    The trimmed proposal is faster at the same lower bound; the full one wins if its actual plan is smaller.
    """
    tape = _better_order(tapes)
    uncut = square_root(tape)
    if not uncut.twins:
        return []
    ladder = Ladder(tape)
    trimmed = ladder.price(ladder.trim(frozenset(uncut.twins), uncut.peak))
    return [(tape, trimmed), (tape, uncut)]


def _try(start: Draft, options: PlanOptions, proposals: Iterable[tuple[Tape, Price]], policy: str) -> Draft:
    """Plan the proposals; return the smallest plan, or ``start`` with a note if no plan is smaller."""
    best, note, more = start, "", 0.0
    refused = 0
    for tape, price in proposals:
        if not price.twins:
            continue
        need = price.peak
        # The price is a lower bound of the plan, so a proposal that cannot win is not packed. Once another proposal has
        # won, it must promise at least 1 %.
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


def _cheapest(start: Draft, tapes: Sequence[Tape], options: PlanOptions, *, max_time: float) -> Draft:
    """Return the smallest plan that spends at most the share ``max_time`` of a step on recomputation."""
    tape = _better_order(tapes)
    limit = max_time * tape.step_seconds
    points = [point for point in curve(tape, max_seconds=limit) if point.seconds <= limit]
    # The three smallest lower bounds: fragmentation may make the plan of one larger than that of another.
    best = sorted(points, key=lambda point: point.peak)[:3]
    return _try(start, options, [(tape, point) for point in best], options.recompute)


def _better_order(tapes: Sequence[Tape]) -> Tape:
    """Return the tape whose order gives the square-root rule the lowest peak; the first tape if peaks are equal."""
    return tapes[0] if len(tapes) == 1 else min(tapes, key=lambda tape: square_root(tape, windows=WINDOWS[:1]).peak)


def _within(start: Draft, tapes: Sequence[Tape], options: PlanOptions, budget: int, cost: Cost) -> Draft:
    """Return the fastest plan on the curve that fits the budget, or below the curve one that repeats nodes once more.

    The curve does not depend on the budget, and its points are planned from the fastest to the slowest. So with a
    larger budget the search stops at the same point or earlier: time never rises with the budget.

    Raises:
        BudgetError: no plan fits.
    """
    smallest = start
    tape = _better_order(tapes)
    points = curve(tape)
    fitting = [point for point in points if point.peak <= budget]
    # Then the points above the budget, the smallest first: they yield the smallest budget that the error names.
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
    # Loaded here, because few budgets are so small.
    from weftplan.planner.recompute.further_repeats import further_repeats

    larger = list[tuple[Program, int]]()
    for program, peak, seconds in further_repeats(repeat(tape.program, points[-1].twins), options, cost=cost):
        if peak > budget:
            larger.append((program, peak))
            continue
        draft = plan_graph(program, options)
        if draft.memory.peak < smallest.memory.peak:
            smallest = draft
        if draft.memory.peak <= budget:
            again = Price(peak, points[-1].seconds + seconds, tuple(program.graph.again))
            more = _share(tape, again)
            note = f"recompute budget: {counted(len(again.twins), 'repetition')}, some nodes run more than twice, "
            note += gain(draft.memory.peak, start.memory.peak, more_time=more)
            return replace(draft.slowed(more), notes=(note,))
    for program, peak in reversed(larger):  # they yield the smallest budget that the error names
        if peak >= smallest.memory.peak:
            break
        draft = plan_graph(program, options)
        if draft.memory.peak < smallest.memory.peak:
            smallest = draft
    needs = f"without recomputation and {smallest.memory.peak:,} with the most that was found"
    raise nothing_fits(start, budget, smallest=smallest.memory.peak, needs=needs)


def nothing_fits(start: Draft, budget: int, *, smallest: int, needs: str) -> BudgetError:
    """Return the error for a budget below the ``smallest`` plan.

    ``needs`` continues the message after the bytes of the plan ``start``.
    """
    outside = sum(start.program.external_bytes.values())
    return BudgetError(
        f"the plan needs {start.memory.peak:,} bytes {needs}, more than the budget of {budget:,}; the smallest budget "
        f"found that works is {pasteable(smallest)}: raise the budget to that or use a smaller batch (arguments, "
        f"gradients and states come on top: {outside:,} bytes)",
        smallest=smallest,
    )


def _share(tape: Tape, price: Price) -> float:
    """Return the seconds of a price as a share of a step's seconds."""
    return price.seconds / tape.step_seconds if tape.step_seconds else 0.0


def _saved(policy: str, start: Draft, *, draft: Draft, tape: Tape, price: Price) -> str:
    """Return the note of a plan that recomputation made smaller."""
    twice = f"recompute {policy}: {counted(len(price.twins), 'node')} run twice"
    return f"{twice}, {gain(draft.memory.peak, start.memory.peak, more_time=_share(tape, price))}"


def gain(nbytes: int, peak: int, *, more_time: float) -> str:
    """Return a text that states the bytes that a plan saves and the time that recomputation adds."""
    less = 100.0 * (1.0 - nbytes / peak)
    return f"{nbytes:,} bytes instead of {peak:,} (-{less:.1f} %) for {100.0 * more_time:.1f} % more modelled time"


def chosen_echo(tape: Tape) -> frozenset[int]:
    """Return the repeatable nodes that the echo rule repeats."""
    return _Echo(tape).run() & frozenset(tape.repeatable)


class _Echo:
    """One run of the echo rule (MXNET_MEMORY_OPT=1): recompute cheap nodes between heavy operators if that saves bytes.

    The forward part is divided into subgraphs bounded by heavy operators, which are never recomputed (their
    ``Work.rules`` lack ``echo``). Each subgraph is decided from its inputs upwards. A group of undecided nodes whose
    inputs are all stored is itself stored if that frees at least as many bytes as it adds. It frees the inputs that no
    other node needs; it adds its outputs and the inputs that other nodes need. Nodes that remain undecided are
    recomputed.

    All node sets hold forward nodes, variables included. ``stored`` holds the nodes whose results are kept.
    """

    def __init__(self, tape: Tape) -> None:
        program = tape.program
        graph = program.graph
        self.tape = tape
        self.nbytes = program.nbytes
        self.may = ["echo" in work.rules for work in graph.works]
        self.inputs = graph.inputs
        self.predecessors = [[*(tape.makers[e] for e in ins), *graph.controls[n]] for n, ins in enumerate(graph.inputs)]
        self.users: dict[int, set[int]] = {}
        """Nodes of both parts that read each entry when nothing is recomputed."""
        for nid in program.order:
            for e in program.reads[nid]:
                self.users.setdefault(e, set()).add(nid)
        forward = set(tape.forward)
        self.readers = {e: [n for n in users if n in forward] for e, users in self.users.items()}
        self.followers: dict[int, list[int]] = {}
        for nid in tape.forward:
            for source in dict.fromkeys(self.predecessors[nid]):
                self.followers.setdefault(source, []).append(nid)
        self.heads = list(dict.fromkeys(tape.makers[e] for e in graph.outputs if tape.makers[e] in forward))
        self.repeated: set[int] = set()
        self.stored: set[int] = set()

    def run(self) -> frozenset[int]:
        """Decide all subgraphs, from the outputs down; return the nodes to recompute."""
        queue = deque(self.heads)
        while queue:
            item = queue.popleft()
            if item in self.stored or item in self.repeated:
                continue
            subgraph, ends = self._subgraph(item)
            queue.extend(ends)
            self._decide(subgraph)
        return frozenset(self.repeated)

    def _subgraph(self, item: int) -> tuple[set[int], list[int]]:
        """Return (nodes that are decided together with ``item``, heavy nodes before them)."""
        inside: set[int] = set()
        ends: dict[int, None] = {}
        fresh: list[int] = []
        checked: set[int] = set()
        # Check the inputs of each added node: their other readers join the subgraph. The set only grows, so its fixed
        # point does not depend on the order of the checks.
        self._walk(item, inside, ends, fresh)
        while fresh:
            for e in self.inputs[fresh.pop()]:
                if e in checked:
                    continue
                checked.add(e)
                for reader in self.readers.get(e, ()):
                    if reader not in inside:
                        for head in self._forward_to_heads(reader, inside):
                            self._walk(head, inside, ends, fresh)
        return inside, [n for n in ends if n not in inside]

    def _walk(self, item: int, inside: set[int], ends: dict[int, None], fresh: list[int]) -> None:
        """Add ``item`` and its ancestors up to the nearest heavy nodes, which are collected in ``ends``."""
        if item in inside:
            return
        inside.add(item)
        fresh.append(item)
        stack = [item]
        while stack:
            for source in self.predecessors[stack.pop()]:
                if source in inside:
                    continue
                if self.may[source]:
                    inside.add(source)
                    fresh.append(source)
                    stack.append(source)
                else:
                    ends[source] = None

    def _forward_to_heads(self, start: int, inside: set[int]) -> Iterable[int]:
        """Return the nodes at which forward paths from ``start`` end: heavy nodes, outputs, nodes without followers."""
        ends: dict[int, None] = {}
        seen = {start}
        stack = [start]
        outputs = set(self.heads)
        while stack:
            nid = stack.pop()
            followers = self.followers.get(nid, ())
            if not self.may[nid] or nid in outputs or not followers:
                ends[nid] = None
                continue
            for follower in followers:
                if follower not in seen and follower not in inside:
                    seen.add(follower)
                    stack.append(follower)
        if not ends:
            # All paths lead into the subgraph, so ``start`` itself belongs to it.
            ends[start] = None
        return ends

    def _decide(self, subgraph: set[int]) -> None:
        """Add each node of the subgraph to ``stored`` or to ``repeated``."""
        may, stored = self.may, self.stored
        stored.update(nid for nid in subgraph if not may[nid])
        undecided = {nid for nid in subgraph if may[nid] and nid not in self.repeated and nid not in stored}

        def ready(nid: int) -> bool:
            return all(not may[m] or m in stored for m in self.predecessors[nid])

        frontier = {nid for nid in undecided if ready(nid)}
        while frontier:
            for group in self._groups(frontier):
                if self._storing_pays(group, frontier):
                    stored.update(group)
                    undecided.difference_update(group)
                    frontier.difference_update(group)
                    for nid in group:
                        for follower in self.followers.get(nid, ()):
                            if follower in undecided and ready(follower):
                                frontier.add(follower)
                    break
            else:
                break
        self.repeated |= undecided

    def _groups(self, frontier: set[int]) -> list[list[int]]:
        """Return the frontier as connected components, in graph order; nodes that read one entry are connected."""
        position = self.tape.step_of
        leader: dict[int, int] = {nid: nid for nid in frontier}

        def lead(nid: int) -> int:
            while leader[nid] != nid:
                leader[nid] = nid = leader[leader[nid]]
            return nid

        first_member: dict[int, int] = {}
        for nid in frontier:
            for e in self.inputs[nid]:
                leader[lead(nid)] = lead(first_member.setdefault(e, nid))
        groups: dict[int, list[int]] = {}
        for nid in sorted(frontier, key=position.__getitem__):
            groups.setdefault(lead(nid), []).append(nid)
        return list(groups.values())

    def _storing_pays(self, group: list[int], frontier: set[int]) -> bool:
        """Return whether storing the group frees at least as many bytes as it adds."""
        outputs = {e for nid in group for e in self.tape.outputs[nid] if self.users.get(e)}
        inputs = {e for nid in group for e in self.inputs[nid]}
        needed_elsewhere = {e for e in inputs if self.users.get(e, set()) - frontier}
        allocated = sum(self.nbytes[e] for e in outputs | needed_elsewhere)
        released = sum(self.nbytes[e] for e in inputs - needed_elsewhere)
        return released >= allocated
