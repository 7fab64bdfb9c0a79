"""A fast cost model of recomputation: peak bytes and seconds, computed without building the rewritten graph.

A *twin* is the second copy of a forward node, which the backward part runs. The model computes the peak of live bytes
for the schedule of :func:`weftplan.planner.rewiring.repeat` and the in-place rules of
:func:`weftplan.planner.storage_assignment.assign`. That peak is the lower bound of the plan that the planner would
make. Three facts let the model sum over intervals instead of simulating the steps; a test compares it with the
simulation.

1. The schedule is known without simulation. A twin runs just before the first backward step that needs it, directly or
   through other twins. Twins with the same first step run in the order of their originals.
2. An output that is an identity of its input always shares the input's memory. Both are one *value*, alive from the
   step that makes it to the last step that reads any part of it.
3. Any other in-place merge happens if and only if a node is the only reader of a value at the value's last step. It
   saves the bytes of the output during that step; after the step the input is dead in any case.

So the live bytes are those of all values, each from its first to its last step, minus the merges at their steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weftplan.planner.options import PlanOptions
from weftplan.planner.program import IntArray, Program, scratch_of
from weftplan.planner.rewiring import repeatable
from weftplan.planner.storage_assignment import Assignment

Pair = tuple[int, int, int, bool]
"""In-place pair: (input slot, input entry, output entry, whether the output is an identity of the input)."""
Table = tuple[IntArray, IntArray, IntArray, IntArray]
"""Columns of in-place pairs: position of the node, input entry, output entry, rank of the pair within its node."""
Merges = tuple[IntArray, IntArray, IntArray]
"""Columns of in-place merges: input entry, output entry that takes its memory, step."""


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of recomputing a set of nodes."""

    peak: int
    """Sum of the devices' peaks of live bytes."""
    seconds: float
    """Modelled seconds of all twins."""
    twins: tuple[int, ...]
    """Recomputed nodes in the order of their twins. A chosen node is missing if no backward step needs it."""


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Lifetimes of all entries when a set of nodes is recomputed.

    The entry of a twin has the number of the original entry plus the number of entries of the graph.
    """

    first: IntArray
    """Step that makes each entry; -1 if the entry has no memory of its own."""
    last: IntArray
    """Last step that reads each entry; the number of steps for an output of the graph, -1 without memory."""
    block: IntArray
    """Block of each entry, equal for entries that are computed in place of each other; -1 without memory."""
    needed: IntArray
    """First step after the forward part that reads each entry; the number of steps if there is none."""


def pressure(live: IntArray) -> IntArray:
    """Return the pressure of each step: the maximum over devices of its live bytes plus the other devices' peaks.

    The maximum over the steps is the peak of :class:`Price`. The sum of live bytes would not do: devices may reach
    their peaks at different steps, so this sum may stay below the peak. With one device the pressure is its live bytes.

    Args:
        live: bytes alive, (devices, steps).

    >>> pressure(np.array([[5, 9, 2], [8, 1, 3]]))
    array([17, 17, 12])
    """
    peaks = live.max(axis=1, initial=0)
    upper_bound: IntArray = (live + (peaks.sum() - peaks)[:, None]).max(axis=0)
    return upper_bound


class Tape:
    """A training graph without recomputation, preprocessed to compute many prices.

    Args:
        program: the graph.
        assignment: the in-place assignment of its plan; it lists the gradients that are added into their sums.
        options: the options of that plan.
        seconds: modelled seconds of each node.
    """

    def __init__(
        self, program: Program, *, assignment: Assignment, options: PlanOptions, seconds: Sequence[float]
    ) -> None:
        graph = program.graph
        self.program = program
        self.seconds = seconds
        self.forward = program.forward
        self.backward = program.backward
        self.repeatable = repeatable(program)
        self.num_entries = count = graph.num_entries
        self.makers = graph.entry_node
        self.outputs = [range(start, end) for start, end in pairwise(graph.row)]
        self.step_of = {nid: step for step, nid in enumerate(self.forward)}
        self._step_of = np.array([self.step_of.get(nid, -1) for nid in range(graph.num_nodes)], dtype=np.int64)
        self.step_seconds = sum(seconds[nid] for nid in program.order if nid not in assignment.skipped)
        """Seconds of one step (forward and backward) without recomputation."""
        # Entries without memory of their own: external entries, and terms that are added straight into their sums.
        self.outside = bytearray(program.external)
        for e in assignment.added:
            self.outside[e] = 1
        counted = options.workspaces
        self.workspace = scratch_of(program, added=assignment.added, skipped=assignment.skipped) if counted else {}
        self.pairs = [self._pairs(nid, offers=options.enable_inplace) for nid in range(graph.num_nodes)]
        self.nbytes = np.tile(np.array(program.nbytes, dtype=np.int64), 2)
        """Bytes of each entry: the entries of the graph, then those of twins."""
        self._nodes = np.array(program.order, dtype=np.int64)
        self.produced = np.array([e for nid in self.forward for e in self.outputs[nid]], dtype=np.int64)
        """Entries made by the forward part."""
        self.produced_at = self._step_of[self.makers]
        """Position of each entry's maker in the forward part; -1 for an entry that the forward part does not make."""
        behind = [(e, step) for step, nid in enumerate(self.backward) for e in self.outputs[nid]]
        self._produced_later, self._behind_at = np.array(behind, dtype=np.int64).reshape(-1, 2).T.copy()
        self._without_memory = np.flatnonzero(np.tile(np.array(self.outside, dtype=np.uint8), 2))
        self._node_device = np.array(program.device, dtype=np.int64)
        self._device = np.tile(self._node_device[graph.entry_node], 2)
        position = {nid: step for step, nid in enumerate(program.order)} if program.held else {}
        self._held = np.array(list(program.held), dtype=np.int64)
        self._held_at = np.array([position[nid] for nid in program.held.values()], dtype=np.int64)
        self._scratch = np.zeros(graph.num_nodes, dtype=np.int64)
        self._scratch[list(self.workspace)] = list(self.workspace.values())
        self._forward_reads = self._reads_of(self.forward)
        self._backward_reads = self._reads_of(self.backward)
        self.last_forward = np.full(count, -1, dtype=np.int64)
        """Last forward step that reads each entry; -1 if there is none."""
        step, entry = self._forward_reads
        np.maximum.at(self.last_forward, entry, step)
        self._readers: list[list[int]] = [[] for _ in self.forward]
        """Per forward position: the forward positions that read an output of its node."""
        source = self.produced_at[entry]
        for s, m in zip(step[source >= 0].tolist(), source[source >= 0].tolist(), strict=True):
            if not self._readers[m] or self._readers[m][-1] != s:
                self._readers[m].append(s)
        self._first_reader = np.full(len(self.forward), len(self.backward), dtype=np.int64)
        step, entry = self._backward_reads
        produced = self.produced_at[entry] >= 0
        np.minimum.at(self._first_reader, self.produced_at[entry[produced]], step[produced])
        self._identities = self._table(self.forward, identity=True), self._table(self.backward, identity=True)
        self._unlike_tables = self._table(self.forward, identity=False), self._table(self.backward, identity=False)

    def _pairs(self, nid: int, *, offers: bool) -> list[Pair]:
        """Return the mandatory pairs of a node, which act as identities, and its optional pairs if ``offers`` is true.

        Pairs whose output is added straight into a sum are left out.
        If an identity shared its input or its output with another pair of the node, the price could differ from the
        plan; no operator declares such pairs.
        """
        inputs, first_output = self.program.graph.inputs[nid], self.program.graph.row[nid]
        must = [pair._replace(identity=True) for pair in self.program.graph.works[nid].over]
        return [
            (pair.input, inputs[pair.input], first_output + pair.output, pair.identity)
            for pair in (*must, *(self.program.pairs[nid] if offers else ()))
            if not self.outside[first_output + pair.output]
        ]

    def _reads_of(self, nodes: Sequence[int]) -> tuple[IntArray, IntArray]:
        """Return the columns (position of the node, entry) of all reads of ``nodes``."""
        reads = [self.program.reads[nid] for nid in nodes]
        flat = np.array([e for row in reads for e in row], dtype=np.int64)
        return np.repeat(np.arange(len(nodes)), [len(row) for row in reads]), flat

    def _table(self, nodes: Sequence[int], *, identity: bool) -> Table:
        """Return the in-place pairs of ``nodes``: the identities if ``identity`` is true, else all other pairs."""
        rows = [
            (position, source, out, rank)
            for position, nid in enumerate(nodes)
            for rank, (_, source, out, same) in enumerate(self.pairs[nid])
            if same == identity and not self.outside[source]
        ]
        owner, source, out, rank = np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()
        return owner, source, out, rank

    def price(self, chosen: Collection[int]) -> Price:
        """Return the price of recomputing the nodes ``chosen``."""
        return self.look(chosen)[0]

    def look(self, chosen: Collection[int]) -> tuple[Price, IntArray]:
        """Return the price and the :func:`pressure` of each step; both include scratch."""
        steps = self._steps(chosen)
        live = self._live(steps)
        node = np.empty(steps.total, dtype=np.int64)
        twins = self._nodes[steps.twins]
        node[: len(self.forward)] = self._nodes[: len(self.forward)]
        node[steps.at_twin] = twins
        node[steps.at_backward] = self._nodes[len(self.forward) :]
        live[self._node_device[node], np.arange(steps.total)] += self._scratch[node]
        repeated = tuple(twins.tolist())
        peak = int(live.max(axis=1, initial=0).sum())
        return Price(peak, sum(self.seconds[m] for m in repeated), repeated), pressure(live)

    def trace(self, chosen: Collection[int]) -> Lifetimes:
        """Return the lifetimes of all entries when the nodes ``chosen`` are recomputed."""
        steps = self._steps(chosen)
        root, births, _, merged = self._values(steps)
        below = np.arange(2 * self.num_entries)
        below[merged[1]] = root[merged[0]]
        below = _ends(below)
        step, entry = self._reads(steps)
        read = np.full(2 * self.num_entries, -1, dtype=np.int64)
        np.maximum.at(read, entry, step)
        if len(self._held):
            np.maximum.at(read, self._held, self._held_until(steps))
        read[self.program.graph.outputs] = steps.total
        held = (births >= 0) & (read >= 0)
        needed = np.full(2 * self.num_entries, steps.total, dtype=np.int64)
        late = step >= len(self.forward)
        np.minimum.at(needed, entry[late], step[late])
        return Lifetimes(np.where(held, births, -1), np.where(held, read, -1), np.where(held, below[root], -1), needed)

    # -- fact 1 ------------------------------------------------------------------------------------------------------

    def _steps(self, chosen: Collection[int]) -> _Steps:
        """Return the schedule when the nodes ``chosen`` are recomputed."""
        mask = np.zeros(len(self.forward), dtype=np.bool_)
        if chosen:
            mask[self._step_of[np.fromiter(chosen, dtype=np.int64, count=len(chosen))]] = True
        # First backward step that needs each twin. Its readers among the twins come later in the forward order, so
        # walking it backwards finds their steps final.
        never = len(self.backward)
        trigger: list[int] = np.where(mask, self._first_reader, never).tolist()
        readers = self._readers
        for m in np.flatnonzero(mask)[::-1].tolist():
            for r in readers[m]:
                if trigger[r] < trigger[m]:
                    trigger[m] = trigger[r]
        when = np.array(trigger, dtype=np.int64)
        twins = np.flatnonzero(when < never)
        twins = twins[np.argsort(when[twins], kind="stable")]
        earlier_twins = np.cumsum(np.bincount(when[twins], minlength=never))
        count = len(self.forward)
        at_backward = count + np.arange(never) + earlier_twins
        at_twin = count + when[twins] + np.arange(len(twins))
        step_of_twin = np.full(count, -1, dtype=np.int64)
        step_of_twin[twins] = at_twin
        return _Steps(step_of_twin >= 0, twins, at_twin, at_backward, step_of_twin, count + never + len(twins))

    # -- facts 2 and 3 -----------------------------------------------------------------------------------------------

    def _shifted(self, steps: _Steps, entry: IntArray) -> IntArray:
        """Map entries to those that backward nodes and twins read: the twin's entry if the maker has a twin."""
        at = self.produced_at[entry]
        return entry + np.where((at >= 0) & steps.mask[at], self.num_entries, 0)

    def _reads(self, steps: _Steps) -> tuple[IntArray, IntArray]:
        """Return the columns (step, entry) of all reads."""
        step, entry = self._forward_reads
        repeated = steps.mask[step]
        step_back, entry_back = self._backward_reads
        return (
            np.concatenate([step, steps.step_of_twin[step[repeated]], steps.at_backward[step_back]]),
            np.concatenate([entry, self._shifted(steps, entry[repeated]), self._shifted(steps, entry_back)]),
        )

    def _held_until(self, steps: _Steps) -> IntArray:
        """Return, for each held entry, the last step during which it must stay alive."""
        ahead, at = len(self.forward), self._held_at
        return np.where(at < ahead, at, steps.at_backward[np.maximum(at - ahead, 0)] if self.backward else at)

    def _first_steps(self, steps: _Steps) -> IntArray:
        """Return the step that makes each entry; -1 if no step makes it or it has no memory of its own."""
        maker_step = np.full(2 * self.num_entries, -1, dtype=np.int64)
        at = self.produced_at[self.produced]
        maker_step[self.produced] = at
        maker_step[self.produced + self.num_entries] = steps.step_of_twin[at]
        maker_step[self._produced_later] = steps.at_backward[self._behind_at]
        maker_step[self._without_memory] = -1
        return maker_step

    def _instances(self, steps: _Steps, tables: tuple[Table, Table]) -> list[IntArray]:
        """Return the columns (step, input entry, output entry, rank) of the pairs of all scheduled nodes."""
        ahead, (owner, source, out, rank) = tables
        repeated = steps.mask[ahead[0]]
        owner_of_twin, source_of_twin, out_of_twin, rank_of_twin = (column[repeated] for column in ahead)
        twins = (
            steps.step_of_twin[owner_of_twin],
            self._shifted(steps, source_of_twin),
            out_of_twin + self.num_entries,
            rank_of_twin,
        )
        in_backward = steps.at_backward[owner], self._shifted(steps, source), out, rank
        return [np.concatenate(parts) for parts in zip(ahead, twins, in_backward, strict=True)]

    def _values(self, steps: _Steps) -> tuple[IntArray, IntArray, IntArray, Merges]:
        """Return (value of each entry, first step of each value, last step of each value, in-place merges)."""
        _, source, out, _ = self._instances(steps, self._identities)
        root = np.arange(2 * self.num_entries)
        root[out] = source
        root = _ends(root) if len(out) else root
        step, entry = self._reads(steps)
        value = root[entry]
        deaths = np.full(2 * self.num_entries, -1, dtype=np.int64)
        np.maximum.at(deaths, value, step)
        if len(self._held):
            value = np.concatenate([value, root[self._held]])
            step = np.concatenate([step, self._held_until(steps)])
            np.maximum.at(deaths, value, step)
        at_last = np.bincount(value[deaths[value] == step], minlength=2 * self.num_entries)
        deaths[root[self.program.graph.outputs]] = steps.total
        births = self._first_steps(steps)
        step, source, out, rank = self._instances(steps, self._unlike_tables)
        value = root[source]
        # Fact 3: the output needs memory, and the node is the only reader of the value at the value's last step.
        able = np.flatnonzero((deaths[out] >= 0) & (births[out] >= 0) & (deaths[value] == step) & (at_last[value] == 1))
        # An output takes the memory of its first usable input. An input that two outputs could take goes to the pair
        # with the lower rank.
        for key in (out, value):
            able = able[np.lexsort((rank[able], key[able]))]
            new = np.ones(len(able), dtype=np.bool_)
            np.not_equal(key[able[1:]], key[able[:-1]], out=new[1:])
            able = able[new]
        return root, births, deaths, (source[able], out[able], step[able])

    def _live(self, steps: _Steps) -> IntArray:
        """Return live bytes per (device, step), without scratch."""
        root, births, deaths, (_, out, step) = self._values(steps)
        values = np.flatnonzero((deaths >= 0) & (births >= 0) & (root == np.arange(2 * self.num_entries)))
        change = np.zeros((len(self.program.contexts), steps.total + 1), dtype=np.int64)
        nbytes, device = self.nbytes[values], self._device[values]
        np.add.at(change, (device, births[values]), nbytes)
        np.subtract.at(change, (device, np.minimum(deaths[values] + 1, steps.total)), nbytes)
        live: IntArray = np.cumsum(change, axis=1)[:, : steps.total]
        np.subtract.at(live, (self._device[out], step), self.nbytes[out])
        return live


@dataclass(frozen=True, slots=True)
class _Steps:
    """The schedule: forward part, then backward part with twins."""

    mask: NDArray[np.bool_]
    """Whether each forward position has a twin."""
    twins: IntArray
    """Forward positions in the order of their twins."""
    at_twin: IntArray
    """Step of each twin, in the order of ``twins``."""
    at_backward: IntArray
    """Step of each backward node."""
    step_of_twin: IntArray
    """Step of the twin of each forward position; -1 without a twin."""
    total: int
    """Number of steps."""


def _ends(follow: IntArray) -> IntArray:
    """Return the last node of the chain of links from each node, by pointer jumping."""
    while True:
        further = follow[follow]
        if np.array_equal(further, follow):
            return follow
        follow = further
