"""The price of a choice in array arithmetic: what the planner's walk over the steps would find, without the walk.

Three facts replace the walk by sums over intervals. A test holds the result against the walk itself.

1. The steps are known without simulation. A twin runs just before the first backward step that needs it, directly or
   through other twins; twins with the same first step run in the order of their originals.
2. An output that is an identity of its input shares the input's memory in any case, so both are one *value*, alive
   from the step that makes it to the last step that reads any part of it.
3. Any other in-place merge happens exactly where a node is the only reader of a value at the value's last step. It
   saves the bytes of the output during that one step: afterwards the input is gone anyway.

So the bytes alive are those of all values, each from its first to its last step, less the merges at their steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weftplan.planner.graph import IntArray
from weftplan.planner.program import Program

Pair = tuple[int, int, int, bool]
"""(input slot, input entry, output entry, may share while others still read)."""


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
    """What each step asks of the peak: what is alive on one device and the peaks of the others, for the worst device.

    The most of all steps is the peak: that is a sum over devices, each with a moment of its own, while the sum of what
    is alive at a step may be less at every step. With one device it is what is alive.

    Args:
        live: bytes alive, (devices, steps).

    >>> pressure(np.array([[5, 9, 2], [8, 1, 3]]))
    array([17, 17, 12])
    """
    peaks = live.max(axis=1, initial=0)
    most: IntArray = (live + (peaks.sum() - peaks)[:, None]).max(axis=0)
    return most


@dataclass(slots=True)
class _Pairs:
    """In-place pairs of one part of the graph as arrays."""

    owner: IntArray
    """Position of the node in its part."""
    source: IntArray
    out: IntArray
    rank: IntArray
    """How many pairs of the node come before this one."""


class Arrays:
    """A graph prepared for prices in array arithmetic.

    Args:
        program: the graph.
        forward, backward: its nodes as they run.
        outside: per entry, whether it has no memory of its own.
        workspace: scratch bytes per node.
        pairs: in-place pairs per node, where an identity is the only pair of its input and of its output.
    """

    def __init__(
        self,
        program: Program,
        forward: Sequence[int],
        backward: Sequence[int],
        *,
        outside: Sequence[int],
        workspace: dict[int, int],
        pairs: Sequence[Sequence[Pair]],
    ) -> None:
        graph = program.graph
        maker = graph.entry_node
        self.count = graph.num_entries
        self.forward = np.array(forward, dtype=np.int64)
        self.backward = np.array(backward, dtype=np.int64)
        self.place = np.full(graph.num_nodes, -1, dtype=np.int64)
        self.place[self.forward] = np.arange(len(self.forward))
        self.made_at = self.place[maker]
        """Per entry: position of its maker in the forward part, -1 for others."""
        behind = np.full(graph.num_nodes, -1, dtype=np.int64)
        behind[self.backward] = np.arange(len(self.backward))
        self.made_behind = behind[maker]
        self.counted = np.array(outside, dtype=np.uint8) == 0
        self.nbytes = np.tile(np.array(program.nbytes, dtype=np.int64), 2)
        self.node_device = np.array(program.device, dtype=np.int64)
        self.device = np.tile(self.node_device[maker], 2)
        self.num_devices = len(program.contexts)
        self.outputs = graph.outputs
        self.scratch = np.zeros(graph.num_nodes, dtype=np.int64)
        self.scratch[list(workspace)] = list(workspace.values())
        self.forward_reads = _rows(program.reads, forward)
        self.backward_reads = _rows(program.reads, backward)
        self.first_reader = np.full(len(self.forward), len(self.backward), dtype=np.int64)
        step, entry = self.backward_reads
        known = self.made_at[entry] >= 0
        np.minimum.at(self.first_reader, self.made_at[entry[known]], step[known])
        self.readers: list[list[int]] = [[] for _ in forward]
        """Per forward position: later forward positions that read what it makes."""
        step, entry = self.forward_reads
        source = self.made_at[entry]
        for s, m in zip(step[source >= 0].tolist(), source[source >= 0].tolist(), strict=True):
            if not self.readers[m] or self.readers[m][-1] != s:
                self.readers[m].append(s)
        parts = (("forward", forward), ("backward", backward))
        self.identities = {part: self._pairs(pairs, nodes, identity=True) for part, nodes in parts}
        self.merges = {part: self._pairs(pairs, nodes, identity=False) for part, nodes in parts}

    def _pairs(self, pairs: Sequence[Sequence[Pair]], nodes: Sequence[int], *, identity: bool) -> _Pairs:
        rows: list[tuple[int, int, int, int]] = []
        for position, nid in enumerate(nodes):
            for rank, (_, source, out, same) in enumerate(pairs[nid]):
                if same == identity and self.counted[source]:
                    rows.append((position, source, out, rank))
        table: Any = np.array(rows, dtype=np.int64).reshape(-1, 4)
        return _Pairs(table[:, 0], table[:, 1], table[:, 2], table[:, 3])

    def price(self, chosen: Collection[int]) -> tuple[int, list[int], IntArray]:
        """(peak bytes summed over devices; twins in order; :func:`pressure` of the bytes alive with scratch)."""
        steps = self._steps(chosen)
        live = self._live(steps, *self._values(steps))
        node = np.empty(steps.total, dtype=np.int64)
        node[: len(self.forward)] = self.forward
        node[steps.at_twin] = self.forward[steps.twins]
        node[steps.at_backward] = self.backward
        live[self.node_device[node], np.arange(steps.total)] += self.scratch[node]
        peak = int(live.max(axis=1, initial=0).sum())
        return peak, self.forward[steps.twins].tolist(), pressure(live)

    def trace(self, chosen: Collection[int]) -> Trace:
        """The same entry by entry."""
        steps = self._steps(chosen)
        root, first, _, merged = self._values(steps)
        below = np.arange(2 * self.count)
        below[merged[1]] = root[merged[0]]
        below = _ends(below)
        step, entry = self._reads(steps)
        read = np.full(2 * self.count, -1, dtype=np.int64)
        np.maximum.at(read, entry, step)
        read[self.outputs] = steps.total
        held = (first >= 0) & (read >= 0)
        needed = np.full(2 * self.count, steps.total, dtype=np.int64)
        late = step >= len(self.forward)
        np.minimum.at(needed, entry[late], step[late])
        return Trace(np.where(held, first, -1), np.where(held, read, -1), np.where(held, below[root], -1), needed)

    # -- fact 1 ------------------------------------------------------------------------------------------------------

    def _steps(self, chosen: Collection[int]) -> _Steps:
        mask = np.zeros(len(self.forward), dtype=np.bool_)
        if chosen:
            mask[self.place[np.fromiter(chosen, dtype=np.int64, count=len(chosen))]] = True
        # First backward step that needs each twin: through its readers among the twins, later ones first.
        never = len(self.backward)
        trigger: list[int] = np.where(mask, self.first_reader, never).tolist()
        readers = self.readers
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
        return entry + np.where((at >= 0) & steps.mask[at], self.count, 0)

    def _reads(self, steps: _Steps) -> tuple[IntArray, IntArray]:
        """(step, entry) of all reads."""
        step, entry = self.forward_reads
        again = steps.mask[step]
        step_back, entry_back = self.backward_reads
        return (
            np.concatenate([step, steps.step_of_twin[step[again]], steps.at_backward[step_back]]),
            np.concatenate([entry, self._shifted(steps, entry[again]), self._shifted(steps, entry_back)]),
        )

    def _made(self, steps: _Steps) -> IntArray:
        """Per entry: the step that makes it; -1 where it is not made or has no memory."""
        made = np.full(2 * self.count, -1, dtype=np.int64)
        ours = self.made_at >= 0
        behind = self.made_behind >= 0
        made[: self.count][ours] = self.made_at[ours]
        made[: self.count][behind] = steps.at_backward[self.made_behind[behind]]
        made[self.count :][ours] = steps.step_of_twin[self.made_at[ours]]
        made[: self.count][~self.counted] = -1
        made[self.count :][~self.counted] = -1
        return made

    def _instances(self, steps: _Steps, table: dict[str, _Pairs]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """(step, source, out, rank) of the pairs of all nodes that run: forward, twins, backward."""
        ahead, behind = table["forward"], table["backward"]
        again = steps.mask[ahead.owner]
        return (
            np.concatenate([ahead.owner, steps.step_of_twin[ahead.owner[again]], steps.at_backward[behind.owner]]),
            np.concatenate(
                [ahead.source, self._shifted(steps, ahead.source[again]), self._shifted(steps, behind.source)]
            ),
            np.concatenate([ahead.out, ahead.out[again] + self.count, behind.out]),
            np.concatenate([ahead.rank, ahead.rank[again], behind.rank]),
        )

    def _values(self, steps: _Steps) -> tuple[IntArray, IntArray, IntArray, tuple[IntArray, IntArray, IntArray]]:
        """(value of each entry, first and last step of each value, (sources, outputs, steps) of merges)."""
        _, source, out, _ = self._instances(steps, self.identities)
        root = np.arange(2 * self.count)
        root[out] = source
        if len(out):
            root = _ends(root)
        step, entry = self._reads(steps)
        value = root[entry]
        last = np.full(2 * self.count, -1, dtype=np.int64)
        np.maximum.at(last, value, step)
        at_last = np.bincount(value[last[value] == step], minlength=2 * self.count)
        last[root[self.outputs]] = steps.total
        first = self._made(steps)
        merged = self._merges(steps, root, last, at_last, first)
        return root, first, last, merged

    def _merges(
        self, steps: _Steps, root: IntArray, last: IntArray, at_last: IntArray, first: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        step, source, out, rank = self._instances(steps, self.merges)
        value = root[source]
        # The output needs memory, and the node is the only reader of the value at its end.
        able = np.flatnonzero((last[out] >= 0) & (first[out] >= 0) & (last[value] == step) & (at_last[value] == 1))
        # Of several inputs that an output could replace, the first counts.
        able = able[np.lexsort((rank[able], out[able]))]
        able = able[np.concatenate([np.ones(min(len(able), 1), dtype=np.bool_), np.diff(out[able]) != 0])]
        # An input that two outputs could replace goes to the pair that comes first.
        able = able[np.lexsort((rank[able], value[able]))]
        able = able[np.concatenate([np.ones(min(len(able), 1), dtype=np.bool_), np.diff(value[able]) != 0])]
        return source[able], out[able], step[able]

    def _live(
        self,
        steps: _Steps,
        root: IntArray,
        first: IntArray,
        last: IntArray,
        merged: tuple[IntArray, IntArray, IntArray],
    ) -> IntArray:
        """Bytes alive per device and step, without scratch."""
        values = np.flatnonzero((last >= 0) & (first >= 0) & (root == np.arange(2 * self.count)))
        change = np.zeros((self.num_devices, steps.total + 1), dtype=np.int64)
        nbytes, device = self.nbytes[values], self.device[values]
        np.add.at(change, (device, first[values]), nbytes)
        np.subtract.at(change, (device, np.minimum(last[values] + 1, steps.total)), nbytes)
        live: IntArray = np.cumsum(change, axis=1)[:, : steps.total]
        _, out, step = merged
        np.subtract.at(live, (self.device[out], step), self.nbytes[out])
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


def _rows(reads: list[list[int]], nodes: Sequence[int]) -> tuple[IntArray, IntArray]:
    """(position of the node, entry) of everything that ``nodes`` read."""
    lengths = np.fromiter((len(reads[nid]) for nid in nodes), dtype=np.int64, count=len(nodes))
    flat = np.fromiter((e for nid in nodes for e in reads[nid]), dtype=np.int64, count=int(lengths.sum()))
    return np.repeat(np.arange(len(nodes)), lengths), flat


def _ends(follow: IntArray) -> IntArray:
    """Where chains of these links end, by pointer jumping."""
    while True:
        further = follow[follow]
        if np.array_equal(further, follow):
            return follow
        follow = further
