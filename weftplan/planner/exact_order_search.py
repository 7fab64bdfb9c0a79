"""Search for the execution order with the lowest peak of live bytes, exact within a bounded amount of work.

`PartModel.search` lowers a threshold. It asks whether the segment that holds the peak has an order below it, and takes
that order, until the answer is no or the work is used up. A segment is the range between two nodes that are comparable
with all others. `_below` answers by a depth-first search over sets of executed nodes, with a table of visited sets. A
ready node that adds no live bytes and fits below the threshold runs immediately. This loses no order: as other nodes
run, the groups that end with that node only become more, so moving it to the front lowers the live bytes of each step
that it passes. Work is counted in touched groups, never in seconds, so equal programs get equal orders.

The model counts a group of entries that share memory in every order once, and lets an output overwrite a dying input by
any allowed pair. So the lower bound of an order is never below the model's peak of that order, except that gradient
sums in place (:func:`~weftplan.planner.storage_assignment.add_terms_inplace`) are not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from weftplan.planner.liveness import MAX_STEPS
from weftplan.planner.options import PlanOptions
from weftplan.planner.program import Program, scratch_of, shared_roots

MAX_WORK = 9_000_000
"""Touched groups after which a search ends without proof; at most about two seconds."""


@dataclass(frozen=True, slots=True)
class FoundOrder:
    """The best order of a search.

    Attributes:
        nodes: the nodes of the part in their new order.
        peak: live bytes of the model at the peak of this order.
        proved: whether no order of the part has a lower peak.
    """

    nodes: list[int]
    peak: int
    proved: bool


class PartModel:
    """Live bytes of one part of a program, the forward or the backward part, in any order of its nodes.

    Nodes and groups have local numbers. The model is fixed; `_Run` is the state of one execution.

    Attributes:
        is_exact: whether the lower bound of an order is never below the model's peak of that order.
    """

    def __init__(
        self, program: Program, part: Sequence[int], *, predecessors: Sequence[Sequence[int]], options: PlanOptions
    ) -> None:
        """Collect the groups that the nodes ``part`` touch; ``predecessors`` has the dependencies of every node."""
        graph, row = program.graph, program.graph.row
        self.part = part
        number = {nid: k for k, nid in enumerate(part)}
        self.needs = [[number[n] for n in dict.fromkeys(predecessors[nid]) if n in number] for nid in part]
        self.followers: list[list[int]] = [[] for _ in part]
        for k, needs in enumerate(self.needs):
            for n in needs:
                self.followers[n].append(k)
        root, self.is_exact = _roots(program, options)
        refs = [0] * graph.num_entries
        for e, count in enumerate(program.refs):
            refs[root[e]] += count
        planned = [not program.external[root[e]] and refs[root[e]] > 0 for e in range(graph.num_entries)]
        touchers: dict[int, set[int]] = {}
        for nid in program.order:
            for e in (*program.reads[nid], *range(row[nid], row[nid + 1]), *program.holds.get(nid, ())):
                if planned[e]:
                    touchers.setdefault(root[e], set()).add(nid)
        forever = {root[e] for e in graph.outputs}
        inside = [r for r, nodes in touchers.items() if not nodes.isdisjoint(number)]
        local = {r: g for g, r in enumerate(inside)}
        position = {nid: step for step, nid in enumerate(program.order)}
        end = position[part[-1]]
        self.size = [program.nbytes[r] for r in inside]
        self.touched: list[list[int]] = [[] for _ in part]
        self.readers_left = [0] * len(inside)
        """Nodes of the part that touch each group, plus one if it outlives the part."""
        for r, g in local.items():
            mine = [number[nid] for nid in touchers[r] if nid in number]
            for k in mine:
                self.touched[k].append(g)
            outlives = r in forever or max(map(position.__getitem__, touchers[r])) > end
            self.readers_left[g] = len(mine) + outlives
        start = position[part[0]]
        scratch = scratch_of(program, added=(), skipped=()) if options.workspaces else {}
        self.added: list[int] = []
        """Live bytes that each node adds when it begins: its outputs and its scratch."""
        self.born: list[int] = []
        """Bytes of the groups that begin with each node."""
        self.reusable: list[list[tuple[int, int]]] = []
        """Per output of each node that begins a group: bytes and input group, if this input may be overwritten."""
        for nid in part:
            owned = [e for e in range(row[nid], row[nid + 1]) if planned[e] and root[e] == e]
            self.born.append(sum(map(program.nbytes.__getitem__, owned)))
            self.added.append(self.born[-1] + scratch.get(nid, 0))
            pairs = program.pairs[nid] if options.enable_inplace else ()
            reads = list(map(root.__getitem__, program.reads[nid]))
            reusable: list[tuple[int, int]] = []
            for pair in pairs:
                source = root[graph.inputs[nid][pair.input]]
                out = row[nid] + pair.output
                if out in owned and source in local and reads.count(source) == 1:
                    reusable.append((program.nbytes[out], local[source]))
            self.reusable.append(reusable)
        makers = graph.entry_node
        alive = [r for r in touchers if position.get(makers[r], -1) < start]
        last_toucher = {r: max(map(position.__getitem__, touchers[r])) for r in alive}
        self.live = sum(program.nbytes[r] for r in alive if r in forever or last_toucher[r] >= start)
        """Live bytes before the part begins."""
        self.peak = max(peaks(self, range(len(part))))
        """Peak of the part in its order."""

    def search(self, max_work: int) -> FoundOrder:
        """Return the best order of a part that a search of at most about ``max_work`` touched groups finds.

        The search starts from the order of the part and never returns a higher peak. It does not change a part of more
        than `MAX_STEPS` nodes.
        """
        part = self.part
        order = list(range(len(part)))
        during = peaks(self, order)
        if len(part) > MAX_STEPS:
            return FoundOrder(list(part), max(during), proved=False)
        segments = _segments(self)
        work, proved = max_work, False
        while work > 0:
            peak = max(during)
            step = during.index(peak)
            ends = list(accumulate(map(len, segments)))
            at = next(k for k, end in enumerate(ends) if step < end)
            earlier = [node for segment in segments[:at] for node in segment]
            verdict, better, spent = _below(self, earlier, segments[at], limit=peak - 1, max_work=work)
            work -= spent
            if better is None:
                proved = verdict
                break
            segments[at] = better
            order = [node for segment in segments for node in segment]
            during = peaks(self, order)
        return FoundOrder([part[k] for k in order], max(during), proved and self.is_exact)


def _roots(program: Program, options: PlanOptions) -> tuple[list[int], bool]:
    """Return, per entry, the entry whose memory it shares in every order, and whether these are all such pairs.

    An entry shares memory by necessity, or as the identity of an input if that is its first pair.
    """
    graph, root, is_complete = program.graph, shared_roots(program), True
    # Entries are numbered in topological order, so the root of an input is final when its reader is visited.
    for nid in range(graph.num_nodes) if options.enable_inplace else ():
        start = graph.row[nid]
        for pair in graph.works[nid].over:
            root[start + pair.output] = root[graph.inputs[nid][pair.input]]
        for rank, pair in enumerate(program.pairs[nid]):
            if pair.identity and program.refs[start + pair.output]:
                if rank or graph.row[nid + 1] - start > 1 or graph.works[nid].label in options.inplace_blacklist:
                    is_complete = False
                else:
                    root[start] = root[graph.inputs[nid][pair.input]]
    return root, is_complete


class _Run:
    """The state of an execution of a part: executed nodes, live bytes, and the remaining touches of each group."""

    def __init__(self, model: PartModel) -> None:
        self.model = model
        self.readers_left = model.readers_left[:]
        self.live = model.live
        self.work = 0

    def cost(self, node: int) -> tuple[int, int]:
        """Return (live bytes that ``node`` leaves more, live bytes while it runs)."""
        model, readers_left, size = self.model, self.readers_left, self.model.size
        touched = model.touched[node]
        self.work += len(touched) + 1
        freed = 0
        for g in touched:
            if readers_left[g] == 1:
                freed += size[g]
        saved = 0
        if freed and model.reusable[node]:
            # Each input counts once; with several outputs this may save too much, so the model stays a lower bound.
            groups: dict[int, int] = {}
            for nbytes, g in model.reusable[node]:
                if readers_left[g] == 1:
                    groups[g] = nbytes
            saved = min(sum(groups.values()), model.born[node])
        return model.born[node] - freed, self.live + model.added[node] - saved

    def run(self, node: int, net: int) -> None:
        """Execute a node that adds ``net`` live bytes."""
        self.live += net
        for g in self.model.touched[node]:
            self.readers_left[g] -= 1

    def undo(self, node: int, net: int) -> None:
        """Undo the execution of a node."""
        self.live -= net
        for g in self.model.touched[node]:
            self.readers_left[g] += 1


def peaks(model: PartModel, order: Sequence[int]) -> list[int]:
    """Return the live bytes while each node of ``order`` (local numbers) runs."""
    state, during = _Run(model), []
    for node in order:
        net, live = state.cost(node)
        during.append(live)
        state.run(node, net)
    return during


def _segments(model: PartModel) -> list[list[int]]:
    """Divide the part after each node that is comparable with all others: it follows the same nodes in every order."""
    count = len(model.part)
    ancestors, descendants = [0] * count, [0] * count
    for node in range(count):
        for n in model.needs[node]:
            ancestors[node] |= ancestors[n] | 1 << n
    for node in reversed(range(count)):
        for n in model.followers[node]:
            descendants[node] |= descendants[n] | 1 << n
    segments: list[list[int]] = []
    covered = 0
    for node in range(count):
        needed = ancestors[node]
        if needed.bit_count() + descendants[node].bit_count() == count - 1:
            inside = needed & ~covered
            segments.append([n for n in range(count) if inside >> n & 1] + [node] if inside else [node])
            covered = needed | 1 << node
    remainder = [node for node in range(count) if not covered >> node & 1]
    return [*segments, remainder] if remainder else segments


def _below(
    model: PartModel, earlier: Sequence[int], segment: Sequence[int], *, limit: int, max_work: int
) -> tuple[bool, list[int] | None, int]:
    """Search for an order of ``segment``, after ``earlier``, in which at most ``limit`` bytes are live.

    Returns:
        (whether the question is decided, the order or None, touched groups).
    """
    state = _Run(model)
    for node in earlier:
        state.run(node, state.cost(node)[0])
    state.work = 0
    inside = set(segment)
    missing: Mapping[int, int] = {node: sum(n in inside for n in model.needs[node]) for node in segment}
    waiting = dict(missing)
    followers = {node: [n for n in model.followers[node] if n in inside] for node in segment}
    bit = {node: 1 << k for k, node in enumerate(segment)}
    ready = {node: None for node in segment if not waiting[node]}
    order: list[tuple[int, int]] = []
    executed = 0

    def execute(node: int, net: int) -> None:
        nonlocal executed
        state.run(node, net)
        order.append((node, net))
        executed |= bit[node]
        del ready[node]
        for n in followers[node]:
            waiting[n] -= 1
            if not waiting[n]:
                ready[n] = None

    def back_to(length: int) -> None:
        nonlocal executed
        while len(order) > length:
            node, net = order.pop()
            state.undo(node, net)
            executed &= ~bit[node]
            for n in followers[node]:
                if not waiting[n]:
                    del ready[n]
                waiting[n] += 1
            ready[node] = None

    def candidates() -> list[tuple[int, int, int]]:
        """Execute nodes that add no live bytes; return the others that fit as (net bytes, bytes, node), best last."""
        while True:
            fits = []
            for node in ready:
                net, during = state.cost(node)
                if during <= limit:
                    if net <= 0:
                        execute(node, net)
                        break
                    fits.append((net, during, node))
            else:
                return sorted(fits, reverse=True)

    seen: set[int] = set()
    # Per level: number of executed nodes, and the nodes to try next from there.
    levels = [(0, [(0, 0, -1)])]
    while len(order) < len(segment):
        length, fits = levels[-1]
        back_to(length)
        if not fits or state.work > max_work:
            levels.pop()
            if state.work > max_work or not levels:
                return not levels and state.work <= max_work, None, state.work
            continue
        net, _, node = fits.pop()
        if node >= 0:
            execute(node, net)
        choices = candidates()
        if executed not in seen:
            seen.add(executed)
            levels.append((len(order), choices))
    return True, [node for node, _ in order], state.work
