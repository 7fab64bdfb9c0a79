"""Choices of one traced graph: which nodes to recompute for each budget."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from weftplan.device.amounts import amount
from weftplan.errors import BudgetError
from weftplan.planner import PlanOptions
from weftplan.planner.buffers import Buffers
from weftplan.planner.choose_order import lazy_backward
from weftplan.planner.program import Program
from weftplan.planner.recompute import Price, Tape, block_sets, curve, repeat
from weftplan.planner.strategies import assignment
from weftplan.torch.step_program import Joint, line_of

OPTIONS = PlanOptions(enable_inplace=False)
"""Plan options without in-place results, because PyTorch's functional graphs compute nothing in place."""


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


class Choices:
    """The choices of one graph: from no recomputation to the smallest peak; peaks fall strictly, seconds rise."""

    def __init__(self, joint: Joint) -> None:
        began = time.perf_counter()
        self.joint = joint
        self.program: Program = lazy_backward(joint.program())
        self.inputs: int = self.program.external_bytes["arguments"]
        self._assigned = assignment(self.program, OPTIONS)
        self.tape = Tape(self.program, assignment=self._assigned, options=OPTIONS, seconds=joint.seconds())
        self.points: list[Price] = curve(self.tape, seeds=block_sets(self.tape))
        self.seconds = time.perf_counter() - began

    def within(self, budget: int | None, resident: Resident, *, name: str, smallest_else: bool = False) -> Price:
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

    def planned(self, point: Price) -> tuple[Program, Buffers]:
        """Return the program that recomputes the nodes of a choice, and its buffers."""
        program = repeat(self.program, point.twins)
        assigned = self._assigned if program is self.program else assignment(program, OPTIONS)
        return program, Buffers(program, assigned, options=OPTIONS)

    def steps(self, point: Price) -> list[int]:
        """Return the numbers of the steps of the joint graph that a choice recomputes."""
        return [nid - self.joint.given for nid in point.twins]

    def backward_order(self, point: Price) -> list[str]:
        """Return the names of the backward part's nodes in order; a recomputed node has the name of its original."""
        program = repeat(self.program, point.twins)
        return [self.joint.steps[program.graph.origin[nid] - self.joint.given].node.name for nid in program.backward]

    def at_peak(self, point: Price, most: int = 12) -> tuple[str, list[tuple[str, int]]]:
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
