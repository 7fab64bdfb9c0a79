"""The echo rule (MXNET_MEMORY_OPT=1): repeat what lies between heavy operators, unless storing it is no dearer.

Forward nodes fall into subgraphs that end at operators which are never repeated (convolutions, products, embeddings).
In each subgraph, nodes are decided from the inputs up. A group of undecided nodes whose inputs are all kept is stored
after all when the bytes that storing it frees (inputs that no other node needs) are at least the bytes it adds (its
outputs, and inputs that others need anyway): a node that shrinks its input is better stored than repeated. What is
left undecided in the end is repeated. Which operators are heavy is for the front end to say (``Work.rules``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from weftplan.planner.recompute.tape import Tape


def chosen_echo(tape: Tape) -> frozenset[int]:
    """The nodes that the echo rule repeats, as far as they are repeatable at all."""
    return _Echo(tape).run() & frozenset(tape.repeatable)


class _Echo:
    """One run of the rule. A node is a forward node (variables included); ``stored`` holds what is decided."""

    def __init__(self, tape: Tape) -> None:
        program = tape.program
        graph = program.graph
        self.tape = tape
        self.nbytes = program.nbytes
        self.may = ["echo" in work.rules for work in graph.works]
        self.inputs = graph.inputs
        self.before = [[*(tape.makers[e] for e in ins), *graph.controls[n]] for n, ins in enumerate(graph.inputs)]
        self.users: dict[int, set[int]] = {}
        """Nodes, forward and backward, that read an entry's value when nothing is repeated."""
        for nid in program.order:
            for e in program.reads[nid]:
                self.users.setdefault(e, set()).add(nid)
        forward = set(tape.forward)
        self.readers = {e: [n for n in users if n in forward] for e, users in self.users.items()}
        self.followers: dict[int, list[int]] = {}
        for nid in tape.forward:
            for source in dict.fromkeys(self.before[nid]):
                self.followers.setdefault(source, []).append(nid)
        self.heads = list(dict.fromkeys(tape.makers[e] for e in graph.outputs if tape.makers[e] in forward))
        self.repeated: set[int] = set()
        self.stored: set[int] = set()

    def run(self) -> frozenset[int]:
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
        """(nodes decided together with ``item``; never-repeated nodes below them)."""
        inside: set[int] = set()
        ends: dict[int, None] = {}
        fresh: list[int] = []
        checked: set[int] = set()
        # Entries are checked as nodes come in; nodes that they bring in are walked immediately. The set only grows, so
        # its end does not depend on the order of the checks.
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
        """Add ``item`` and every repeatable node that it needs without a heavy node in between."""
        if item in inside:
            return
        inside.add(item)
        fresh.append(item)
        stack = [item]
        while stack:
            for source in self.before[stack.pop()]:
                if source in inside:
                    continue
                if self.may[source]:
                    inside.add(source)
                    fresh.append(source)
                    stack.append(source)
                else:
                    ends[source] = None

    def _forward_to_heads(self, start: int, inside: set[int]) -> Iterable[int]:
        """Where paths from ``start`` end: heavy nodes, outputs, and nodes without a follower."""
        ends: dict[int, None] = {}
        seen = {start}
        stack = [start]
        outputs = set(self.heads)
        while stack:
            nid = stack.pop()
            after = self.followers.get(nid, ())
            if not self.may[nid] or nid in outputs or not after:
                ends[nid] = None
                continue
            for follower in after:
                if follower not in seen and follower not in inside:
                    seen.add(follower)
                    stack.append(follower)
        if not ends:
            # Every path runs into the subgraph: the node itself belongs to it.
            ends[start] = None
        return ends

    def _decide(self, subgraph: set[int]) -> None:
        may, stored = self.may, self.stored
        stored.update(nid for nid in subgraph if not may[nid])
        undecided = {nid for nid in subgraph if may[nid] and nid not in self.repeated and nid not in stored}

        def ready(nid: int) -> bool:
            return all(not may[m] or m in stored for m in self.before[nid])

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
        """Nodes of the frontier connected by entries that they share, in graph order."""
        place = self.tape.place
        leader: dict[int, int] = {nid: nid for nid in frontier}

        def lead(nid: int) -> int:
            while leader[nid] != nid:
                leader[nid] = nid = leader[leader[nid]]
            return nid

        first: dict[int, int] = {}
        for nid in frontier:
            for e in self.inputs[nid]:
                leader[lead(nid)] = lead(first.setdefault(e, nid))
        groups: dict[int, list[int]] = {}
        for nid in sorted(frontier, key=place.__getitem__):
            groups.setdefault(lead(nid), []).append(nid)
        return list(groups.values())

    def _storing_pays(self, group: list[int], frontier: set[int]) -> bool:
        outputs = {e for nid in group for e in self.tape.outputs[nid] if self.users.get(e)}
        inputs = {e for nid in group for e in self.inputs[nid]}
        needed_elsewhere = {e for e in inputs if self.users.get(e, set()) - frontier}
        allocated = sum(self.nbytes[e] for e in outputs | needed_elsewhere)
        released = sum(self.nbytes[e] for e in inputs - needed_elsewhere)
        return released >= allocated
