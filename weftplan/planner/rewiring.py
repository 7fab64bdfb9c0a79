"""What rewrites of a graph share: nodes that read something else, nodes that are added, and the sizes that they keep.

A :class:`Rewrite` begins as a copy of a graph. A caller adds nodes and changes what others read; :meth:`Rewrite.done`
numbers what is still needed, depth first from the outputs, and carries over everything that was known. The given graph
stays as it is. One rewrite belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from weftplan.device.context import Context
from weftplan.planner.graph import Graph, Work
from weftplan.planner.liveness import PlacedGraph, reading, references


class Rewrite:
    """A graph in the making. Its nodes and entries keep the numbers that they have in the given one; new ones follow.

    Attributes:
        inputs: entries that each node reads, to be replaced (not changed) where a node is to read others.
        makers: the node that makes each entry.
    """

    def __init__(self, facts: PlacedGraph) -> None:
        graph = facts.graph
        self.inputs: list[list[int]] = list(graph.inputs)
        self._facts = facts
        self._names = list(graph.names)
        self._works = list(graph.works)
        self._controls = list(graph.controls)
        self._row = graph.row[:-1]
        self.makers: list[int] = graph.entry_node.tolist()
        self._like: list[int] = list(range(graph.num_entries))
        self._twin_of: dict[int, int] = {}
        self._copied_to: dict[int, Context] = {}

    def twin(self, nid: int, name: str, inputs: list[int]) -> tuple[int, int]:
        """Add a node that runs node ``nid`` a second time, on these inputs; (its number, its first entry)."""
        graph = self._facts.graph
        made = self._add(name, graph.works[nid], inputs, range(graph.row[nid], graph.row[nid + 1]))
        self._twin_of[made] = nid
        return made, self._row[made]

    def copy(self, source: int, name: str, work: Work, *, context: Context, like: int) -> tuple[int, int]:
        """Add a node that copies entry ``source`` to a device; (its number, its entry, of the size of ``like``)."""
        made = self._add(name, work, [source], range(like, like + 1))
        self._copied_to[made] = context
        return made, self._row[made]

    def _add(self, name: str, work: Work, inputs: list[int], like: range) -> int:
        made = len(self._works)
        self._names.append(name)
        self._works.append(work)
        self._controls.append([])
        self._row.append(len(self._like))
        self._like.extend(like)
        self.makers.extend([made] * len(like))
        self.inputs.append(inputs)
        return made

    def done(self, order: Iterable[int]) -> PlacedGraph:
        """The facts about the rewritten graph, whose steps are ``order``."""
        facts, old, like = self._facts, self._facts.graph, self._like
        ends = [*self._row[1:], len(like)]
        kept = self._depth_first(old.outputs.tolist())
        number = [-1] * len(self._works)
        entry = [-1] * len(like)
        source: list[int] = []
        for nid, was in enumerate(kept):
            number[was] = nid
            for e in range(self._row[was], ends[was]):
                entry[e] = len(source)
                source.append(like[e])
        # The node of the given graph whose work each node does; None for a copy.
        stands_for = [None if was in self._copied_to else self._twin_of.get(was, was) for was in kept]
        contexts = list(facts.contexts)
        device: list[int] = []
        for was, original in zip(kept, stands_for, strict=True):
            if original is None:
                context = self._copied_to[was]
                if context not in contexts:
                    contexts.append(context)
                device.append(contexts.index(context))
            else:
                device.append(facts.device[original])
        graph = Graph(
            names=[self._names[was] for was in kept],
            works=[self._works[was] for was in kept],
            inputs=[[entry[e] for e in self.inputs[was]] for was in kept],
            controls=[[number[n] for n in self._controls[was]] for was in kept],
            counts=[ends[was] - self._row[was] for was in kept],
            outputs=[entry[e] for e in old.outputs.tolist()],
            origin=[-1 if original is None else old.origin[original] for original in stands_for],
            again=frozenset(nid for nid, was in enumerate(kept) if was in self._twin_of or was in old.again),
            base=old.base,
        )
        reads = reading(graph)
        # A copy computes nothing in place, needs no scratch, and writes nothing that the caller brought.
        external = bytearray(
            facts.external[e] and stands_for[nid] is not None
            for e, nid in zip(source, graph.entry_node.tolist(), strict=True)
        )
        return replace(
            facts,
            graph=graph,
            order=[number[n] for n in order],
            contexts=tuple(contexts),
            device=device,
            shapes=[facts.shapes[e] for e in source],
            dtypes=[facts.dtypes[e] for e in source],
            elements=[facts.elements[e] for e in source],
            nbytes=[facts.nbytes[e] for e in source],
            reads=reads,
            refs=references(graph, reads),
            external=external,
            added=frozenset(e for e, was in enumerate(source) if external[e] and was in facts.added),
            pairs=[() if was is None else facts.pairs[was] for was in stands_for],
            workspaces={
                nid: facts.workspaces[was]
                for nid, was in enumerate(stands_for)
                if was is not None and was in facts.workspaces
            },
        )

    def _depth_first(self, heads: Sequence[int]) -> list[int]:
        """The nodes that entries ``heads`` need, each after what it needs: first its inputs, then its controls."""
        makers = self.makers
        kept: list[int] = []
        seen = bytearray(len(self._works))  # 1: on the path from a head; 2: in `kept`
        for head in heads:
            stack = [makers[head]]
            while stack:
                nid = stack[-1]
                if not seen[nid]:
                    seen[nid] = 1
                    stack.extend(n for n in reversed(self._controls[nid]) if not seen[n])
                    stack.extend(n for e in reversed(self.inputs[nid]) if not seen[n := makers[e]])
                else:
                    stack.pop()
                    if seen[nid] == 1:
                        seen[nid] = 2
                        kept.append(nid)
        return kept
