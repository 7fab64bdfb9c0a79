"""A fast price of "repeat these nodes": peak bytes and seconds without building the rewritten graph.

The bytes are those alive when the steps that :func:`weftplan.planner.rewiring.repeat` would schedule run with
the in-place rules of :func:`weftplan.planner.inplace.assign`: the lower bound of the plan that the real planner would
make. Three facts replace its walk over the steps by sums over intervals. A test holds the result against the walk.

1. The steps are known without simulation. A twin runs just before the first backward step that needs it, directly or
   through other twins; twins with the same first step run in the order of their originals.
2. An output that is an identity of its input shares the input's memory in any case, so both are one *value*, alive
   from the step that makes it to the last step that reads any part of it.
3. Any other in-place merge happens exactly where a node is the only reader of a value at the value's last step. It
   saves the bytes of the output during that step: afterwards the input is gone anyway.

So the bytes alive are those of all values, each from its first to its last step, less the merges at their steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weftplan.planner.inplace import Assignment
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import IntArray, Program, scratch_of
from weftplan.planner.rewiring import repeatable

Pair = tuple[int, int, int, bool]
"""(input slot, input entry, output entry, may share while others still read)."""
Table = tuple[IntArray, IntArray, IntArray, IntArray]
"""Of pairs: position of the node, input entry, output entry, how many pairs of the node come before it."""
Merges = tuple[IntArray, IntArray, IntArray]
"""Of outputs that take an input's memory: input entry, output entry, step."""


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of a choice."""

    peak: int
    """Most bytes alive at once, summed over devices."""
    seconds: float
    """Modelled seconds of all twins."""
    twins: tuple[int, ...]
    """Nodes that are really repeated, in the order of their twins."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One choice, entry by entry. Entries of twins have the numbers of their originals plus the number of entries."""

    first: IntArray
    """Step that makes each entry with memory; -1 for others."""
    last: IntArray
    """The last step that reads it; the number of steps for outputs of the graph."""
    block: IntArray
    """Entries computed in place of each other have the same number; -1 without memory."""
    needed: IntArray
    """First step after the forward part that reads it (not a twin's); the number of steps when none does."""


def pressure(live: IntArray) -> IntArray:
    """Return the need of each step: live bytes of one device and the peaks of the others, for the worst device.

    The most of all steps is the peak: that is a sum over devices, each with a moment of its own, while the sum of
    live bytes may be less at every step. With one device the need is its live bytes.

    Args:
        live: bytes alive, (devices, steps).

    >>> pressure(np.array([[5, 9, 2], [8, 1, 3]]))
    array([17, 17, 12])
    """
    peaks = live.max(axis=1, initial=0)
    most: IntArray = (live + (peaks.sum() - peaks)[:, None]).max(axis=0)
    return most


class Tape:
    """A training graph, without recomputation, prepared for many prices.

    ``assignment`` is that of its plan, which lists gradient sums in place, ``options`` are
    those of that plan, and ``seconds`` is the cost of every node.
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
        self.place = {nid: step for step, nid in enumerate(self.forward)}
        self._place = np.array([self.place.get(nid, -1) for nid in range(graph.num_nodes)], dtype=np.int64)
        self.step_seconds = sum(seconds[nid] for nid in program.order if nid not in assignment.skipped)
        """Seconds of one step (forward and backward) without recomputation."""
        # Entries with no memory of their own: the caller's, and terms that are added straight into their sums.
        self.outside = bytearray(program.external)
        for e in assignment.added:
            self.outside[e] = 1
        counted = options.workspaces
        self.workspace = scratch_of(program, added=assignment.added, skipped=assignment.skipped) if counted else {}
        self.pairs = [self._pairs(nid, offers=options.enable_inplace) for nid in range(graph.num_nodes)]
        self.nbytes = np.tile(np.array(program.nbytes, dtype=np.int64), 2)
        """Bytes of each entry, those of twins after the others."""
        self._nodes = np.array(program.order, dtype=np.int64)
        self.made = np.array([e for nid in self.forward for e in self.outputs[nid]], dtype=np.int64)
        """Entries that the forward part makes."""
        self.made_at = self._place[self.makers]
        """Per entry: position of its maker in the forward part, -1 for others."""
        behind = [(e, step) for step, nid in enumerate(self.backward) for e in self.outputs[nid]]
        self._made_behind, self._behind_at = np.array(behind, dtype=np.int64).reshape(-1, 2).T.copy()
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
        """Last forward step that reads each entry, -1 for none."""
        step, entry = self._forward_reads
        np.maximum.at(self.last_forward, entry, step)
        self._readers: list[list[int]] = [[] for _ in self.forward]
        """Per forward position: later forward positions that read what it makes."""
        source = self.made_at[entry]
        for s, m in zip(step[source >= 0].tolist(), source[source >= 0].tolist(), strict=True):
            if not self._readers[m] or self._readers[m][-1] != s:
                self._readers[m].append(s)
        self._first_reader = np.full(len(self.forward), len(self.backward), dtype=np.int64)
        step, entry = self._backward_reads
        known = self.made_at[entry] >= 0
        np.minimum.at(self._first_reader, self.made_at[entry[known]], step[known])
        self._identities = self._table(self.forward, identity=True), self._table(self.backward, identity=True)
        self._others = self._table(self.forward, identity=False), self._table(self.backward, identity=False)

    def _pairs(self, nid: int, *, offers: bool) -> list[Pair]:
        """Mandatory pairs of a node, which act as identities, and its in-place ``offers``.

        Those whose output is added straight into a sum are left out.
        Where an identity shares its input or its output with another pair of the node, the price may differ from the
        plan; no operator declares such pairs.
        """
        inputs, first = self.program.graph.inputs[nid], self.program.graph.row[nid]
        must = [pair._replace(identity=True) for pair in self.program.graph.works[nid].over]
        return [
            (pair.input, inputs[pair.input], first + pair.output, pair.identity)
            for pair in (*must, *(self.program.pairs[nid] if offers else ()))
            if not self.outside[first + pair.output]
        ]

    def _reads_of(self, nodes: Sequence[int]) -> tuple[IntArray, IntArray]:
        """(position of the node, entry) of everything that ``nodes`` read."""
        reads = [self.program.reads[nid] for nid in nodes]
        flat = np.array([e for row in reads for e in row], dtype=np.int64)
        return np.repeat(np.arange(len(nodes)), [len(row) for row in reads]), flat

    def _table(self, nodes: Sequence[int], *, identity: bool) -> Table:
        """The in-place pairs of ``nodes`` that are identities, or the others."""
        rows = [
            (position, source, out, rank)
            for position, nid in enumerate(nodes)
            for rank, (_, source, out, same) in enumerate(self.pairs[nid])
            if same == identity and not self.outside[source]
        ]
        owner, source, out, rank = np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()
        return owner, source, out, rank

    def price(self, chosen: Collection[int]) -> Price:
        """Peak and seconds when the nodes ``chosen`` are repeated."""
        return self.look(chosen)[0]

    def look(self, chosen: Collection[int]) -> tuple[Price, IntArray]:
        """Return the price, and the need of each step, scratch included (:func:`pressure`)."""
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

    def trace(self, chosen: Collection[int]) -> Trace:
        """When every entry is alive."""
        steps = self._steps(chosen)
        root, first, _, merged = self._values(steps)
        below = np.arange(2 * self.num_entries)
        below[merged[1]] = root[merged[0]]
        below = _ends(below)
        step, entry = self._reads(steps)
        read = np.full(2 * self.num_entries, -1, dtype=np.int64)
        np.maximum.at(read, entry, step)
        if len(self._held):
            np.maximum.at(read, self._held, self._held_until(steps))
        read[self.program.graph.outputs] = steps.total
        held = (first >= 0) & (read >= 0)
        needed = np.full(2 * self.num_entries, steps.total, dtype=np.int64)
        late = step >= len(self.forward)
        np.minimum.at(needed, entry[late], step[late])
        return Trace(np.where(held, first, -1), np.where(held, read, -1), np.where(held, below[root], -1), needed)

    # -- fact 1 ------------------------------------------------------------------------------------------------------

    def _steps(self, chosen: Collection[int]) -> _Steps:
        mask = np.zeros(len(self.forward), dtype=np.bool_)
        if chosen:
            mask[self._place[np.fromiter(chosen, dtype=np.int64, count=len(chosen))]] = True
        # First backward step that needs each twin: through its readers among the twins, later twins first.
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
        before = np.cumsum(np.bincount(when[twins], minlength=never))
        count = len(self.forward)
        at_backward = count + np.arange(never) + before
        at_twin = count + when[twins] + np.arange(len(twins))
        step_of_twin = np.full(count, -1, dtype=np.int64)
        step_of_twin[twins] = at_twin
        return _Steps(step_of_twin >= 0, twins, at_twin, at_backward, step_of_twin, count + never + len(twins))

    # -- facts 2 and 3 -----------------------------------------------------------------------------------------------

    def _shifted(self, steps: _Steps, entry: IntArray) -> IntArray:
        """Entries as backward nodes and twins read them: those of twins where these exist."""
        at = self.made_at[entry]
        return entry + np.where((at >= 0) & steps.mask[at], self.num_entries, 0)

    def _reads(self, steps: _Steps) -> tuple[IntArray, IntArray]:
        """(step, entry) of all reads."""
        step, entry = self._forward_reads
        repeated = steps.mask[step]
        step_back, entry_back = self._backward_reads
        return (
            np.concatenate([step, steps.step_of_twin[step[repeated]], steps.at_backward[step_back]]),
            np.concatenate([entry, self._shifted(steps, entry[repeated]), self._shifted(steps, entry_back)]),
        )

    def _held_until(self, steps: _Steps) -> IntArray:
        """The step until whose end each held entry is alive."""
        ahead, at = len(self.forward), self._held_at
        return np.where(at < ahead, at, steps.at_backward[np.maximum(at - ahead, 0)] if self.backward else at)

    def _made(self, steps: _Steps) -> IntArray:
        """Per entry: the step that makes it; -1 if it is not made or has no memory."""
        maker_step = np.full(2 * self.num_entries, -1, dtype=np.int64)
        at = self.made_at[self.made]
        maker_step[self.made] = at
        maker_step[self.made + self.num_entries] = steps.step_of_twin[at]
        maker_step[self._made_behind] = steps.at_backward[self._behind_at]
        maker_step[self._without_memory] = -1
        return maker_step

    def _instances(self, steps: _Steps, tables: tuple[Table, Table]) -> list[IntArray]:
        """(step, input entry, output entry, rank) of the pairs of all nodes that run."""
        ahead, (owner, source, out, rank) = tables
        repeated = steps.mask[ahead[0]]
        owner_of_twin, source_of_twin, out_of_twin, rank_of_twin = (column[repeated] for column in ahead)
        twins = (
            steps.step_of_twin[owner_of_twin],
            self._shifted(steps, source_of_twin),
            out_of_twin + self.num_entries,
            rank_of_twin,
        )
        back = steps.at_backward[owner], self._shifted(steps, source), out, rank
        return [np.concatenate(parts) for parts in zip(ahead, twins, back, strict=True)]

    def _values(self, steps: _Steps) -> tuple[IntArray, IntArray, IntArray, Merges]:
        """(value of each entry, first and last step of each value, merges)."""
        _, source, out, _ = self._instances(steps, self._identities)
        root = np.arange(2 * self.num_entries)
        root[out] = source
        root = _ends(root) if len(out) else root
        step, entry = self._reads(steps)
        value = root[entry]
        last = np.full(2 * self.num_entries, -1, dtype=np.int64)
        np.maximum.at(last, value, step)
        if len(self._held):
            value = np.concatenate([value, root[self._held]])
            step = np.concatenate([step, self._held_until(steps)])
            np.maximum.at(last, value, step)
        at_last = np.bincount(value[last[value] == step], minlength=2 * self.num_entries)
        last[root[self.program.graph.outputs]] = steps.total
        first = self._made(steps)
        step, source, out, rank = self._instances(steps, self._others)
        value = root[source]
        # The output needs memory, and the node is the only reader of the value at its end.
        able = np.flatnonzero((last[out] >= 0) & (first[out] >= 0) & (last[value] == step) & (at_last[value] == 1))
        # Of several inputs that an output could replace, the first counts; an input that two outputs could replace goes
        # to the pair that comes first.
        for key in (out, value):
            able = able[np.lexsort((rank[able], key[able]))]
            new = np.ones(len(able), dtype=np.bool_)
            np.not_equal(key[able[1:]], key[able[:-1]], out=new[1:])
            able = able[new]
        return root, first, last, (source[able], out[able], step[able])

    def _live(self, steps: _Steps) -> IntArray:
        """Bytes alive per device and step, without scratch."""
        root, first, last, (_, out, step) = self._values(steps)
        values = np.flatnonzero((last >= 0) & (first >= 0) & (root == np.arange(2 * self.num_entries)))
        change = np.zeros((len(self.program.contexts), steps.total + 1), dtype=np.int64)
        nbytes, device = self.nbytes[values], self._device[values]
        np.add.at(change, (device, first[values]), nbytes)
        np.subtract.at(change, (device, np.minimum(last[values] + 1, steps.total)), nbytes)
        live: IntArray = np.cumsum(change, axis=1)[:, : steps.total]
        np.subtract.at(live, (self._device[out], step), self.nbytes[out])
        return live


@dataclass(frozen=True, slots=True)
class _Steps:
    """Where everything runs."""

    mask: NDArray[np.bool_]
    """Forward positions that are repeated."""
    twins: IntArray
    """Forward positions in the order of their twins."""
    at_twin: IntArray
    at_backward: IntArray
    step_of_twin: IntArray
    """Per forward position; -1 where nothing is repeated."""
    total: int


def _ends(follow: IntArray) -> IntArray:
    """Where chains of these links end, by pointer jumping."""
    while True:
        further = follow[follow]
        if np.array_equal(further, follow):
            return follow
        follow = further
