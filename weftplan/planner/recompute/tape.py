"""A fast price of "repeat these nodes": peak bytes and seconds without building the rewritten graph.

The bytes are those alive when the steps that :func:`weftplan.planner.recompute.rewrite.repeat` would schedule run with
the in-place rules of :func:`weftplan.planner.inplace.assign`: the lower bound of the plan that the real planner would
make. Twin entries have the numbers of their originals plus :attr:`Tape.num_entries`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from weftplan.planner.graph import IntArray
from weftplan.planner.inplace import Assignment
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import Program, scratch_of
from weftplan.planner.recompute.arrays import Arrays, Pair, Trace
from weftplan.planner.recompute.rewrite import repeatable


@dataclass(frozen=True, slots=True)
class Price:
    """What a choice costs."""

    peak: int
    """Most bytes alive at once, summed over devices."""
    seconds: float
    """Modelled seconds of all twins."""
    twins: tuple[int, ...]
    """Nodes that are really repeated, in the order of their twins."""


class Tape:
    """A training graph prepared for many prices.

    Args:
        program: the graph without recomputation.
        found: the assignment of its plan: which gradient sums are accumulated in place.
        options: the options of that plan.
        seconds: cost of every node.
    """

    def __init__(self, program: Program, *, found: Assignment, options: PlanOptions, seconds: Sequence[float]) -> None:
        self.program = program
        self.seconds = seconds
        self.forward = program.forward
        self.backward = program.backward
        self.repeatable = repeatable(program)
        graph = program.graph
        self.num_entries = graph.num_entries
        self.makers: list[int] = graph.entry_node.tolist()
        self.outputs = [range(graph.row[n], graph.row[n + 1]) for n in range(graph.num_nodes)]
        self.place = {nid: step for step, nid in enumerate(self.forward)}
        self.step_seconds = sum(seconds[nid] for nid in program.order if nid not in found.skipped)
        """Seconds of one step (forward and backward) without recomputation."""
        # Entries with no memory of their own: the caller's, and terms that are added straight into their sums.
        self.outside = bytearray(program.external)
        for e in found.added:
            self.outside[e] = 1
        counted = options.workspaces
        self.workspace = scratch_of(program, added=found.added, skipped=found.skipped) if counted else {}
        self.pairs = [self._pairs(nid) if options.enable_inplace else [] for nid in range(graph.num_nodes)]
        self._arrays = Arrays(
            program, self.forward, self.backward, outside=self.outside, workspace=self.workspace, pairs=self.pairs
        )

    def _pairs(self, nid: int) -> list[Pair]:
        """In-place pairs of a node, but those whose output is added straight into a sum.

        An identity shuts out the other pairs of its input and its output, so that the price of a node that declares
        such pairs may differ from its plan; no operator does.
        """
        graph = self.program.graph
        inputs, first = graph.inputs[nid], graph.row[nid]
        pairs = [pair for pair in self.program.pairs[nid] if not self.outside[first + pair.output]]
        kept: list[Pair] = []
        for pair in sorted(pairs, key=lambda pair: not pair.identity):
            out = first + pair.output
            if not any(same and (slot == pair.input or made == out) for slot, _, made, same in kept):
                kept.append((pair.input, inputs[pair.input], out, pair.identity))
        return kept

    def price(self, chosen: Collection[int]) -> Price:
        """Peak and seconds when the nodes ``chosen`` are repeated."""
        return self.look(chosen)[0]

    def look(self, chosen: Collection[int]) -> tuple[Price, IntArray]:
        """The price, and what each step asks of its peak, scratch included (:func:`.arrays.pressure`)."""
        peak, twins, profile = self._arrays.price(chosen)
        return Price(peak, sum(self.seconds[m] for m in twins), tuple(twins)), profile

    def trace(self, chosen: Collection[int]) -> Trace:
        """When every entry is alive."""
        return self._arrays.trace(chosen)
