"""A fast price of "repeat these nodes": peak bytes and seconds without building the rewritten graph.

:meth:`Tape.walk` walks the steps that :func:`weftplan.planner.recompute.rewrite.repeat` would schedule, with the
in-place rules of :func:`weftplan.planner.inplace.assign`, and counts bytes that are alive: the lower bound of the plan
that the real planner would make. Twin entries have the numbers of their originals plus :attr:`Tape.num_entries`.
:meth:`Tape.price` gives the same numbers, for long graphs by the array arithmetic of :mod:`.arrays`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from weftplan.planner.graph import IntArray
from weftplan.planner.inplace import Assignment
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import Program
from weftplan.planner.recompute.arrays import Arrays, Pair, Trace, expressible, pressure
from weftplan.planner.recompute.rewrite import repeatable
from weftplan.planner.workspace import with_added_outputs

WALKED = 150
"""Graphs of at most so many steps are walked; for longer ones array arithmetic is faster."""


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
        num_forward: how many steps of its order are the forward part.
        found: the assignment of its plan: which gradient sums are accumulated in place.
        options: the options of that plan.
        seconds: cost of every node.
    """

    def __init__(
        self, program: Program, num_forward: int, found: Assignment, options: PlanOptions, seconds: Sequence[float]
    ) -> None:
        self.program = program
        self.seconds = seconds
        self.forward = program.order[:num_forward]
        self.backward = program.order[num_forward:]
        self.repeatable = repeatable(program, num_forward)
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
        self.workspace: dict[int, int] = {}
        if options.workspaces:
            workspace = with_added_outputs(program.workspaces, graph, program.nbytes, (*program.added, *found.added))
            self.workspace = {nid: n for nid, n in workspace.items() if nid not in found.skipped}
        self.pairs = [self._pairs(nid) if options.enable_inplace else [] for nid in range(graph.num_nodes)]
        self.refs = self._forward_refs()
        self.arrays = Arrays(self) if len(program.order) > WALKED and expressible(self) else None
        # Forward results that each backward node reads, as the nodes that make them.
        self.sources = [[m for e in program.reads[nid] if (m := self.makers[e]) in self.place] for nid in self.backward]

    def _pairs(self, nid: int) -> list[Pair]:
        """In-place pairs of a node, but those whose output is added straight into a sum."""
        graph = self.program.graph
        inputs, first = graph.inputs[nid], graph.row[nid]
        return [
            (pair.input, inputs[pair.input], first + pair.output, pair.identity)
            for pair in self.program.pairs[nid]
            if not self.outside[first + pair.output]
        ]

    def _forward_refs(self) -> list[int]:
        """Per entry: reads by forward nodes, plus times it is an output."""
        refs = [0] * self.num_entries
        for nid in self.forward:
            for e in self.program.reads[nid]:
                refs[e] += 1
        for e in self.program.graph.outputs.tolist():
            refs[e] += 1
        return refs

    def price(self, chosen: Collection[int]) -> Price:
        """Peak and seconds when the nodes ``chosen`` are repeated."""
        return self.look(chosen)[0]

    def look(self, chosen: Collection[int]) -> tuple[Price, IntArray]:
        """The price, and what each step asks of its peak, scratch included (:func:`.arrays.pressure`)."""
        if self.arrays is None:
            price, profile, _ = self.walk(chosen)
            return price, profile
        peak, twins, profile = self.arrays.price(chosen)
        return Price(peak, sum(self.seconds[m] for m in twins), tuple(twins)), profile

    def trace(self, chosen: Collection[int]) -> Trace:
        """When every entry is alive."""
        return self.walk(chosen)[2]() if self.arrays is None else self.arrays.trace(chosen)

    def walk(self, chosen: Collection[int]) -> tuple[Price, IntArray, Callable[[], Trace]]:
        """:meth:`look` and :meth:`trace`, found by walking the steps one by one as the planner does."""
        program, makers, place, count = self.program, self.makers, self.place, self.num_entries
        reads_of, outside, pairs_of = program.reads, self.outside, self.pairs
        chosen = chosen if isinstance(chosen, (set, frozenset)) else frozenset(chosen)
        # 1. Twins in front of their first readers; what every step reads.
        steps: list[tuple[int, int, list[int]]] = [(nid, 0, reads_of[nid]) for nid in self.forward]
        refs = [*self.refs, *[0] * count]
        done: set[int] = set()
        twins: list[int] = []
        for nid, sources in zip(self.backward, self.sources, strict=True):
            reads = reads_of[nid]
            if sources and not chosen.isdisjoint(sources):
                todo = {m for m in sources if m in chosen and m not in done}
                if todo:
                    stack = list(todo)
                    while stack:
                        for e in reads_of[stack.pop()]:
                            m = makers[e]
                            if m in chosen and m not in done and m not in todo:
                                todo.add(m)
                                stack.append(m)
                    done |= todo
                    for m in sorted(todo, key=place.__getitem__) if len(todo) > 1 else todo:
                        own = [e + count if makers[e] in chosen else e for e in reads_of[m]]
                        for e in own:
                            refs[e] += 1
                        steps.append((m, count, own))
                        twins.append(m)
                reads = [e + count if makers[e] in chosen else e for e in reads]
            for e in reads:
                refs[e] += 1
            steps.append((nid, 0, reads))
        # 2. The walk of the planner.
        nbytes, workspace, device, outputs = program.nbytes, self.workspace, program.device, self.outputs
        block = [-1] * (2 * count)
        alive: list[list[int]] = []
        live: list[int] = []
        size: list[int] = []
        home: list[int] = []
        now = [0] * len(program.contexts)
        peak = [0] * len(program.contexts)
        for nid, shift, reads in steps:
            pairs = pairs_of[nid]
            if pairs:
                used: list[int] = []
                for slot, source, out, identity in pairs:
                    if (shift or nid not in place) and makers[source] in chosen:
                        source += count
                    b = block[source]
                    out += shift
                    if b < 0 or block[out] >= 0 or not refs[out] or slot in used:
                        continue
                    if live[b] == 1 or identity:
                        block[out] = b
                        live[b] += refs[out]
                        used.append(slot)
            here = device[nid]
            for e in outputs[nid]:
                out = e + shift
                if refs[out] and block[out] < 0 and not outside[e]:
                    block[out] = len(live)
                    live.append(refs[out])
                    size.append(nbytes[e])
                    home.append(here)
                    now[here] += nbytes[e]
            high = now[here] + workspace.get(nid, 0)
            if high > peak[here]:
                peak[here] = high
            alive.append(now.copy())
            alive[-1][here] = high
            for e in reads:
                b = block[e]
                if b >= 0:
                    live[b] -= 1
                    if not live[b]:
                        now[home[b]] -= size[b]
        price = Price(sum(peak), sum(self.seconds[m] for m in twins), tuple(twins))
        profile = pressure(np.array(alive, dtype=np.int64).reshape(-1, len(now)).T)
        return price, profile, lambda: self._trace(steps, block)

    def _trace(self, steps: list[tuple[int, int, list[int]]], block: list[int]) -> Trace:
        """Lifetimes of entries."""
        made, last = [-1] * len(block), [-1] * len(block)
        needed = [len(steps)] * len(block)
        for step, (nid, shift, reads) in enumerate(steps):
            for e in reads:
                if block[e] >= 0:
                    last[e] = step
                if step >= len(self.forward) and needed[e] > step:
                    needed[e] = step
            for e in self.outputs[nid]:
                if block[e + shift] >= 0:
                    made[e + shift] = last[e + shift] = step
        for e in self.program.graph.outputs.tolist():
            if block[e] >= 0:
                last[e] = len(steps)
        return Trace(*(np.array(column, dtype=np.int64) for column in (made, last, block, needed)))
