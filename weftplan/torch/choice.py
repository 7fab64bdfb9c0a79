"""Choices of one traced graph: which nodes to recompute for each budget."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from weftplan.device.amounts import amount
from weftplan.errors import BudgetError
from weftplan.planner import PlanOptions
from weftplan.planner.buffers import Buffers
from weftplan.planner.choose_order import choose_order, lazy_backward, lower_bound
from weftplan.planner.program import Program
from weftplan.planner.recompute import Price, Tape, block_sets, curve, repeat
from weftplan.planner.storage_assignment import Assignment
from weftplan.planner.strategies import assignment
from weftplan.torch.step_program import STATE, Joint, line_of

OPTIONS = PlanOptions(enable_inplace=False)
"""Plan options without in-place results, because PyTorch's functional graphs compute nothing in place."""
ORDER_WORK = 500_000
"""Work of the search for an order, about 0.1 s: 18 times as much lowers no other peak of the models in ``bench/``."""
WORTH_AN_ORDER = 0.98
"""The maximum of the new peak, as a share of that in PyTorch's order, for which choices are searched twice: this takes
another second for ten layers."""


@dataclass(frozen=True)
class Resident:
    """Bytes on the device that do not depend on the choice, by purpose."""

    inputs: int = 0
    """Parameters, buffers and arguments of the graph."""
    optimizer: int = 0
    gradients: int = 0
    """Gradients that exist before the step."""
    other: int = 0

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return self.inputs + self.optimizer + self.gradients + self.other


@dataclass
class Plan:
    """The plan of one graph. Its budget and peaks are bytes on the device, :attr:`resident` included."""

    name: str
    budget: int | None
    plain: int
    """Peak without recomputation."""
    peak: int
    smallest: int
    """The smallest peak of all choices."""
    resident: Resident
    repeated: list[str]
    """Names of the nodes that run twice."""
    more_time: float
    """Modelled time of recomputation, as a fraction of a step."""
    saved: int
    """Bytes saved by the forward part for the backward part, without inputs."""
    at_peak: list[tuple[str, int]]
    """(node, bytes) of the largest results that are alive at the peak, the largest first."""
    unseen: dict[str, int]
    """Number of calls of each operator whose scratch is not measured."""
    seconds: float
    """Seconds to find all choices of the graph."""
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the plan as a few lines of text."""
        unseen = ", ".join(sorted(self.unseen)) if len(self.unseen) <= 6 else f"{len(self.unseen)} operators"
        budget = "no budget" if self.budget is None else f"budget {amount(self.budget)}"
        lines = [
            f"{self.name}: peak {amount(self.peak)} ({self.peak:,} bytes), {budget}",
            f"  without repetition {amount(self.plain)}, smallest found {amount(self.smallest)}",
            f"  results and scratch {amount(self.peak - self.resident.total)}; resident {amount(self.resident.total)}: "
            f"inputs and parameters {amount(self.resident.inputs)}, optimizer {amount(self.resident.optimizer)}, "
            f"gradients {amount(self.resident.gradients)}, other {amount(self.resident.other)}",
            f"  {len(self.repeated)} nodes run twice, {100 * self.more_time:.1f} % more modelled time; "
            f"kept for the backward part {amount(self.saved)}; planned in {self.seconds:.1f} s",
        ]
        if self.unseen:
            lines.append(f"  not counted until measured: scratch of {unseen}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


@dataclass(frozen=True)
class Choice:
    """Nodes that run twice, in an order of execution; ``program`` repeats none."""

    price: Price
    program: Program
    assigned: Assignment

    @property
    def peak(self) -> int:
        """Peak of live bytes."""
        return self.price.peak

    @property
    def seconds(self) -> float:
        """Modelled seconds of the second runs."""
        return self.price.seconds


class Choices:
    """The choices of one graph: from no recomputation to the smallest peak; peaks fall strictly, seconds rise.

    A choice runs in PyTorch's order, or in a searched order if that lowers the peak by more than 2 %: for some small
    budgets PyTorch's order is the better one.
    """

    def __init__(self, joint: Joint) -> None:
        began = time.perf_counter()
        self.joint = joint
        given = lazy_backward(joint.program())
        found: list[Choice] = []
        self.proved = False
        """Whether no order has a lower peak without recomputation."""
        for program in (given, self._searched(given)):
            if program is not None:
                assigned = assignment(program, OPTIONS)
                tape = Tape(program, assignment=assigned, options=OPTIONS, seconds=joint.seconds())
                self.step_seconds = tape.step_seconds
                found += [Choice(price, program, assigned) for price in curve(tape, seeds=block_sets(tape))]
        self.given = given
        self.points: list[Choice] = []
        for choice in sorted(found, key=lambda choice: (choice.seconds, choice.peak)):
            if not self.points or choice.peak < self.points[-1].peak:
                self.points.append(choice)
        self.seconds = time.perf_counter() - began

    def _searched(self, given: Program) -> Program | None:
        """Return the program in the order with the lowest peak; None if it is not worth a second search."""
        chosen = choose_order(given, OPTIONS, work=ORDER_WORK)
        peak = lower_bound(given, given.order, options=OPTIONS)
        is_worth = chosen.bound < WORTH_AN_ORDER * peak
        self.proved = chosen.proved and (is_worth or chosen.bound == peak)
        return given.in_order(chosen.nodes) if is_worth else None

    def within(self, budget: int | None, resident: Resident, *, name: str, smallest_else: bool = False) -> Choice:
        """Return the fastest choice that fits the budget together with the resident bytes.

        Raises:
            BudgetError: no choice fits, and ``smallest_else`` is False. If it is True, return the smallest choice.
        """
        if budget is None:
            return self.points[0]
        for point in self.points:
            if point.peak + resident.total <= budget:
                return point
        if smallest_else:
            return self.points[-1]
        smallest = self.points[-1].peak + resident.total
        raise BudgetError(
            f"{name} needs {self.points[0].peak + resident.total:,} bytes without repetition and {smallest:,} with the "
            f"most that was found, more than the budget of {budget:,}; the smallest budget that works is {smallest} "
            f"({resident.total:,} bytes of it are parameters, inputs, gradients and optimizer states, the rest is "
            f"largest at {self.at_peak(self.points[-1])[0]}): raise the budget to that or use a smaller batch",
            smallest=smallest,
        )

    def planned(self, point: Choice) -> tuple[Program, Buffers]:
        """Return the program that recomputes the nodes of a choice, and its buffers."""
        program = repeat(point.program, point.price.twins)
        assigned = point.assigned if program is point.program else assignment(program, OPTIONS)
        return program, Buffers(program, assigned, options=OPTIONS)

    def steps(self, point: Choice) -> list[int]:
        """Return the numbers of the steps of the joint graph that a choice recomputes."""
        return [nid - self.joint.given for nid in point.price.twins]

    def order(self, point: Choice) -> tuple[list[str], list[str]]:
        """Return the names of the nodes of both parts in order; a recomputed node has the name of its original."""
        program = repeat(point.program, point.price.twins)
        parts = (
            [self.joint.steps[program.graph.origin[nid] - self.joint.given] for nid in part]
            for part in (program.forward, program.backward)
        )
        forward, backward = ([step.node.name for step in part if step.label != STATE] for part in parts)
        return forward, backward

    def notes(self, point: Choice) -> list[str]:
        """Return how much the order of a choice saves, and whether an order may be better."""
        if self.points[0].program is self.given:
            return ["no other order of execution lowers the peak without repetition"] if self.proved else []
        if point.program is self.given:
            return []
        less = amount(lower_bound(self.given, self.given.order, options=OPTIONS) - self.points[0].peak)
        proof = ", and no order lowers it further" if self.proved else ""
        return [f"another order of execution lowers the peak without repetition by {less}{proof}"]

    def at_peak(self, point: Choice, most: int = 12) -> tuple[str, list[tuple[str, int]]]:
        """Return the node at the peak with its line, and (node, bytes) of the ``most`` largest results alive then."""
        program, buffers = self.planned(point)
        if not program.order:
            return "nothing", []
        step = int(np.argmax(buffers.live()[0]))
        names, nid = program.graph.names, program.order[step]
        alive = [
            (names[program.graph.entry_node[e]], program.nbytes[e])
            for e, group in enumerate(buffers.entry_group)
            if group >= 0 and buffers.entry_first[e] <= step < buffers.entry_last[e]
        ]
        if nid in buffers.workspace:
            alive.append((f"inside {names[nid]}", buffers.workspace[nid]))
        node = self.joint.steps[program.graph.origin[nid] - self.joint.given].node
        return f"{node.name!r}{line_of(node)}", sorted(alive, key=lambda item: -item[1])[:most]
