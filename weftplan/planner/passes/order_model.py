"""What an execution order costs: bytes alive while each node runs, as sets of nodes that have run.

The model counts what the planner's walk counts (see :mod:`weftplan.planner.inplace`), but per *set* of nodes that have
run, so that orders can be compared without planning them. Two facts make that possible. Outputs that are identities of
an input always share its storage, so they are one *value* with it. Any other in-place merge takes the place of a value
that dies at the same node, so it changes only what is alive *while* the node runs, not afterwards.

Bytes are summed over devices; with several devices the planner's figure, a sum of peaks, is at least this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weftplan.planner.liveness import Facts
from weftplan.planner.options import PlanOptions
from weftplan.planner.workspace import with_added_outputs


class OrderModel:
    """Values, their makers and readers, and what each node needs; lists are indexed by node id or value id."""

    def __init__(self, facts: Facts, before: Sequence[Sequence[int]], options: PlanOptions) -> None:
        """Read ``facts``; ``before`` names the operator nodes that each node must follow."""
        graph, row, reads = facts.graph, facts.graph.row, facts.reads
        makers: list[int] = graph.entry_node.tolist()
        outputs = set(graph.outputs.tolist())
        self.before = before
        self.workspace: dict[int, int] = {}
        if options.workspaces:
            self.workspace = with_added_outputs(facts.workspaces, graph, facts.nbytes, tuple(facts.added))
        self.size: list[int] = []
        self.maker: list[int] = []
        self.readers: list[list[int]] = []
        """Per value: the nodes that read it, in the given order."""
        self.forever: list[bool] = []
        self.news: list[int] = [0] * graph.num_nodes
        """Per node: bytes of the values it makes."""
        self.made: list[list[int]] = [[] for _ in range(graph.num_nodes)]
        self.used: list[list[int]] = [[] for _ in range(graph.num_nodes)]
        """Per node: the values it reads, each once."""
        self.merges: list[list[tuple[int, int, int]]] = [[] for _ in range(graph.num_nodes)]
        """Per node: (value read, output entry, bytes) of merges that are allowed when the value dies here."""
        value_of = [-1] * graph.num_entries
        for nid in facts.order:
            slots: dict[int, int] = {}
            for e in reads[nid]:
                if value_of[e] >= 0:
                    slots[value_of[e]] = slots.get(value_of[e], 0) + 1
            for v in slots:
                self.readers[v].append(nid)
            self.used[nid] = list(slots)
            taken: set[int] = set()
            for pair in facts.pairs[nid] if options.enable_inplace else ():
                source, out = graph.inputs[nid][pair.input], row[nid] + pair.output
                v = value_of[source]
                if (
                    v < 0
                    or facts.external[out]
                    or not facts.refs[out]
                    or value_of[out] >= 0
                    or facts.elements[out] != facts.elements[source]
                    or facts.device[makers[source]] != facts.device[nid]
                    or facts.dtypes[out].itemsize != facts.dtypes[source].itemsize
                ):
                    continue
                if pair.identity and facts.dtypes[out] == facts.dtypes[source] and pair.input not in taken:
                    taken.add(pair.input)
                    value_of[out] = v
                    self.forever[v] |= out in outputs
                elif slots.get(v) == 1:
                    self.merges[nid].append((v, out, facts.nbytes[out]))
            for e in range(row[nid], row[nid + 1]):
                if value_of[e] >= 0 or facts.external[e] or not facts.refs[e] or not facts.nbytes[e]:
                    continue
                value_of[e] = len(self.size)
                self.size.append(facts.nbytes[e])
                self.maker.append(nid)
                self.readers.append([])
                self.forever.append(e in outputs)
                self.made[nid].append(value_of[e])
                self.news[nid] += facts.nbytes[e]
            self.merges[nid] = [merge for merge in self.merges[nid] if value_of[merge[1]] in self.made[nid]]

    def profile(self, order: Sequence[int]) -> tuple[list[int], list[int]]:
        """(bytes alive before each step, bytes alive during it) when all nodes run in ``order``."""
        left = [len(readers) + forever for readers, forever in zip(self.readers, self.forever, strict=True)]
        alive = 0
        held, during = [], []
        for nid in order:
            dying = {v for v in self.used[nid] if left[v] == 1}
            held.append(alive)
            during.append(alive + self.news[nid] - saved(self.merges[nid], dying) + self.workspace.get(nid, 0))
            for v in self.used[nid]:
                left[v] -= 1
            alive += self.news[nid] - sum(self.size[v] for v in dying)
        return held, during


def saved(merges: Sequence[tuple[int, int, int]], dying: set[int]) -> int:
    """Bytes that in-place merges save while a node runs at which the values ``dying`` die."""
    if not merges or not dying:
        return 0
    taken: set[int] = set()
    merged: set[int] = set()
    total = 0
    for v, out, nbytes in merges:
        if v in dying and v not in taken and out not in merged:
            taken.add(v)
            merged.add(out)
            total += nbytes
    return total


@dataclass(slots=True)
class Block:
    """Consecutive nodes of an order that may be permuted among themselves. Nodes and sets are local: bit ``i``.

    ``kept`` values stay alive to the end of the block: outputs, and what later nodes read.
    """

    nodes: list[int]
    base: int
    """Bytes alive before the block."""
    needs: list[int]
    """Per node: the set that must run before it."""
    news: list[int]
    workspace: list[int]
    reads: list[list[tuple[int, int, int]]]
    """Per node: (value, set of its readers, bytes) of the values that die in the block."""
    merges: list[list[tuple[int, int, int]]]
    constant: int
    """Bytes alive before the block that do not die in it."""

    @classmethod
    def of(cls, model: OrderModel, order: Sequence[int], start: int, end: int, base: int) -> Block:
        """The block of steps ``start`` to ``end``, before which ``base`` bytes are alive."""
        nodes = list(order[start:end])
        bit = {nid: 1 << i for i, nid in enumerate(nodes)}
        done: set[int] | None = None
        needs = []
        for nid in nodes:
            mask = 0
            for other in model.before[nid]:
                mask |= bit.get(other, 0)
            needs.append(mask)
        local: dict[int, int] = {}
        for nid in nodes:
            for v in model.used[nid]:
                local.setdefault(v, 0)
                local[v] |= bit[nid]
        dies: dict[int, int] = {}
        for v, mask in local.items():
            outside = len(model.readers[v]) - mask.bit_count()
            if outside and not model.forever[v]:
                done = set(order[:start]) if done is None else done
                outside = sum(1 for r in model.readers[v] if r not in bit and r not in done)
            if not outside and not model.forever[v]:
                dies[v] = mask
        return cls(
            nodes,
            base,
            needs,
            [model.news[nid] for nid in nodes],
            [model.workspace.get(nid, 0) for nid in nodes],
            [[(v, dies[v], model.size[v]) for v in model.used[nid] if v in dies] for nid in nodes],
            [[merge for merge in model.merges[nid] if merge[0] in dies] for nid in nodes],
            base - sum(model.size[v] for v in dies if model.maker[v] not in bit),
        )

    def step(self, done: int, alive: int, i: int) -> tuple[int, int]:
        """(bytes while node ``i`` runs, bytes afterwards) from ``alive`` bytes after the set ``done``."""
        mine = 1 << i
        freed = 0
        dying: set[int] = set()
        for v, readers, nbytes in self.reads[i]:
            if readers & ~done == mine:
                freed += nbytes
                dying.add(v)
        grown = alive + self.news[i]
        merged = saved(self.merges[i], dying) if dying else 0
        return grown - merged + self.workspace[i], grown - freed

    def peak(self, order: Sequence[int]) -> int:
        """Most bytes alive while local nodes run in ``order``."""
        done, alive, highest = 0, self.base, 0
        for i in order:
            during, alive = self.step(done, alive, i)
            highest = max(highest, during)
            done |= 1 << i
        return highest
