"""Graph rewrites: add nodes, redirect inputs, and derive the program of the new graph.

A :class:`Rewrite` begins as a copy of a graph. The caller adds nodes and changes the inputs of others.
:meth:`Rewrite.done` numbers the nodes that are still needed, depth first from the outputs, and carries over their
sizes, devices and other facts. The original graph is not changed. An ignored input (only its shape matters) still names
the original node: it keeps no memory alive and must not cause a recomputation or a copy.

* :func:`repeat`: backward nodes read twins ``<name>_mirror`` of forward nodes whose results are not kept. A twin reads
  the twins of its inputs if there are any, else the kept results. Twins run just before their first reader, in the
  order of their originals.
* :func:`spilled`: the forward part copies a result ``x`` to its offload target as ``x_spill``; backward nodes read
  ``x_fetch``, a copy of ``x_spill`` on the device. The positions of the copies bound the lifetime of ``x``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.planner.liveness import deferred
from weftplan.planner.program import Graph, Program, Work, overwritten, shared_roots


class Numbering(NamedTuple):
    """A mapping between old and new numbers of the kept nodes of a graph and of their entries."""

    kept: list[int]
    """Old number of each new node."""
    node: list[int]
    """New number of each old node; -1 if the node is left out."""
    entry: list[int]
    """New number of each old entry; -1 if its node is left out."""
    source: list[int]
    """Old number of each new entry."""


def renumbered(
    roots: Iterable[int],
    *,
    inputs: Sequence[Sequence[int]],
    controls: Sequence[Sequence[int]],
    row: Sequence[int],
    makers: Sequence[int],
    begun: int = 0,
) -> Numbering:
    """Number the nodes that ``roots`` need in depth-first post-order: inputs first, then control
    dependencies.

    Args:
        roots: nodes to keep.
        inputs, controls, row, makers: the arrays of a :class:`~weftplan.planner.program.Graph` (``makers`` is its
            ``entry_node``); its nodes may be in any order.
        begun: number of leading nodes that keep their numbers.
    """
    stays = list(range(begun))
    state = bytearray(len(inputs))  # 0: not visited, 1: on the stack, 2: numbered
    state[:begun] = b"\2" * begun
    for root in roots:
        stack = [root]
        while stack:
            nid = stack[-1]
            if state[nid]:
                stack.pop()
                if state[nid] == 1:
                    state[nid] = 2
                    stays.append(nid)
                continue
            state[nid] = 1
            for dep in reversed(controls[nid]):
                if not state[dep]:
                    stack.append(dep)
            for e in reversed(inputs[nid]):
                if not state[makers[e]]:
                    stack.append(makers[e])
    count = row[begun]
    node, entry = [*stays[:begun], *[-1] * (len(inputs) - begun)], [*range(count), *[-1] * (len(makers) - count)]
    source = list(range(count))
    for nid, was in enumerate(stays[begun:], begun):
        node[was] = nid
        start, end = row[was], row[was + 1]
        if end - start == 1:  # fast path: most nodes have one output
            entry[start] = count
            source.append(start)
        else:
            entry[start:end] = range(count, count + end - start)
            source += range(start, end)
        count += end - start
    return Numbering(stays, node, entry, source)


class Rewrite:
    """A modifiable copy of a graph. Nodes and entries keep their numbers; added ones get the next numbers.

    Attributes:
        inputs: list of the input entries of each node. To redirect a node, replace its list; do not modify it.
        makers: node that makes each entry.
    """

    def __init__(self, program: Program) -> None:
        graph = program.graph
        self.inputs: list[list[int]] = list(graph.inputs)
        self._program = program
        self._names = list(graph.names)
        self._works = list(graph.works)
        self._controls = list(graph.controls)
        self._row = graph.row[:-1]
        self.makers = list(graph.entry_node)
        self._like: list[int] = list(range(graph.num_entries))
        self._twin_of: dict[int, int] = {}
        self._copied_to: dict[int, Context] = {}

    def twin(self, nid: int, name: str, *, inputs: list[int]) -> int:
        """Add a node that recomputes node ``nid`` from ``inputs``; return its first entry."""
        graph = self._program.graph
        new = self._add(name, graph.works[nid], inputs, range(graph.row[nid], graph.row[nid + 1]))
        self._twin_of[new] = nid
        return self._row[new]

    def copy(self, source: int, name: str, *, work: Work, context: Context, like: int) -> int:
        """Add a node that copies entry ``source`` to a device; return its entry, of the shape and dtype of ``like``."""
        new = self._add(name, work, [source], range(like, like + 1))
        self._copied_to[new] = context
        return self._row[new]

    def _add(self, name: str, work: Work, inputs: list[int], like: range) -> int:
        """Add a node whose outputs have shapes and dtypes of the entries ``like``; return its number."""
        nid = len(self._works)
        self._names.append(name)
        self._works.append(work)
        self._controls.append([])
        self._row.append(len(self._like))
        self._like.extend(like)
        self.makers.extend([nid] * len(like))
        self.inputs.append(inputs)
        return nid

    def finish(self, order: Sequence[int], *, more_forward: int = 0) -> Program:
        """Return the rewritten program.

        Args:
            order: its execution order, in the numbers of this rewrite.
            more_forward: number of steps added to the forward part.

        Raises:
            PlanError: no output and no effect needs a node of ``order`` that is no repetition.
        """
        program, old, like = self._program, self._program.graph, self._like
        row, makers = [*self._row, len(like)], self.makers
        roots = [*(makers[e] for e in old.outputs), *old.effects]
        stays, number, entry, old_entries = renumbered(
            roots, inputs=self.inputs, controls=self._controls, row=row, makers=makers
        )
        source = [like[e] for e in old_entries]
        # An earlier repetition whose readers all read a later one is not needed any more.
        order = [n for n in order if number[n] >= 0 or n not in old.again]
        steps = [number[n] for n in order]
        if -1 in steps:
            missing = self._names[order[steps.index(-1)]]
            raise PlanError(f"no output and no effect needs step {missing!r}: leave it out or add it to the effects")
        # The node of the original graph that each node runs; None for a copy.
        stands_for = [None if was in self._copied_to else self._twin_of.get(was, was) for was in stays]
        targets = (self._copied_to[was] for was in stays if was in self._copied_to)
        contexts = tuple(dict.fromkeys((*program.contexts, *targets)))
        device = [
            contexts.index(self._copied_to[was]) if original is None else program.device[original]
            for was, original in zip(stays, stands_for, strict=True)
        ]
        graph = Graph(
            names=[self._names[was] for was in stays],
            works=[self._works[was] for was in stays],
            inputs=[[entry[e] for e in self.inputs[was]] for was in stays],
            controls=[[number[n] for n in self._controls[was]] for was in stays],
            counts=[row[was + 1] - row[was] for was in stays],
            heads=[entry[e] for e in old.outputs],
            effects=[number[nid] for nid in old.effects],
            origin=[-1 if original is None else old.origin[original] for original in stands_for],
            again=frozenset(nid for nid, was in enumerate(stays) if was in self._twin_of or was in old.again),
            base=old.base or old,
        )
        # A copy of a gradient is not itself written to an array of the caller.
        gradients = frozenset(
            e
            for e, (was, nid) in enumerate(zip(source, graph.entry_node, strict=True))
            if was in program.gradients and stands_for[nid] is not None
        )
        return Program(
            graph=graph,
            order=steps,
            num_forward=program.num_forward + more_forward,
            contexts=contexts,
            device=device,
            shapes=[program.shapes[e] for e in source],
            dtypes=[program.dtypes[e] for e in source],
            nbytes=[program.nbytes[e] for e in source],
            gradients=gradients,
            added=frozenset(e for e in gradients if source[e] in program.added),
            held={entry[e]: number[nid] for e, nid in program.held.items() if entry[e] >= 0 and number[nid] >= 0},
            tangents=frozenset(entry[e] for e in program.tangents if entry[e] >= 0),
            external_bytes=program.external_bytes,
            workspaces={
                nid: program.workspaces[was]
                for nid, was in enumerate(stands_for)
                if was is not None and was in program.workspaces
            },
        )


SUFFIX = "_mirror"


def repeatable(program: Program) -> list[int]:
    """Return the forward nodes that may be recomputed, in execution order.

    Excluded are nodes with ``may_repeat`` false (such as losses) and makers of graph outputs and held results, which
    stay alive anyway. Also excluded are nodes that write to a result in place, and readers of such a result, because
    a twin would read the changed value.
    """
    graph = program.graph
    required = {graph.entry_node[e] for e in (*graph.outputs, *program.held)}
    able = [nid for nid in program.forward if graph.works[nid].may_repeat and nid not in required]
    changed = overwritten(program)
    if not changed:
        return able
    root = shared_roots(program)
    pure = [nid for nid in able if all(pair.identity for pair in graph.works[nid].over)]
    return [nid for nid in pure if changed.isdisjoint(root[e] for e in program.reads[nid])]


def needed_twins(program: Program, chosen: Collection[int]) -> list[int]:
    """Return the nodes of ``chosen`` that a backward node needs directly or through other twins, in execution order."""
    reads = program.reads
    maker = program.graph.entry_node
    needed: set[int] = set()
    chosen = frozenset(chosen)
    for step in range(len(program.order) - 1, -1, -1):
        nid = program.order[step]
        if step >= program.num_forward or nid in needed:
            needed.update(source for e in reads[nid] if (source := int(maker[e])) in chosen)
    return [nid for nid in program.forward if nid in needed]


def repeat(program: Program, chosen: Collection[int]) -> Program:
    """Return the program whose backward part recomputes the nodes ``chosen``, which must be :func:`repeatable`.

    A node that no backward node needs gets no twin. Returns ``program`` itself if no node gets one.
    """
    twins = needed_twins(program, chosen)
    if not twins:
        return program
    graph = program.graph
    makers = graph.entry_node
    changed = Rewrite(program)
    first_reader: dict[int, int] = {}
    taken = {graph.names[nid] for nid in graph.again}  # names of earlier repetitions

    def redirected(nid: int) -> list[int]:
        """Return the inputs of a node, redirected to twins except in ignored slots."""
        ignored = graph.works[nid].ignored
        return [
            e
            if slot in ignored or (maker := makers[e]) not in first_reader
            else first_reader[maker] + e - graph.row[maker]
            for slot, e in enumerate(graph.inputs[nid])
        ]

    for nid in twins:
        name = graph.names[nid] + SUFFIX
        while name in taken:
            name += SUFFIX
        first_reader[nid] = changed.twin(nid, name, inputs=redirected(nid))
    for nid in program.backward:
        changed.inputs[nid] = redirected(nid)
    rank = {changed.makers[first_reader[nid]]: k for k, nid in enumerate(twins)}
    order = deferred(program.backward, rank, needs=lambda nid: [changed.makers[e] for e in changed.inputs[nid]])
    return changed.finish([*program.forward, *order])


OUT, BACK = "_spill", "_fetch"
COPY_OUT = Work(label="_CrossDeviceCopy", only_overwrites=True)
"""Memory effects of a copy to a target."""
COPY_BACK = Work(label="_CrossDeviceCopy", only_overwrites=True)
"""Memory effects of a copy back to the device."""


@dataclass(frozen=True, slots=True)
class Spill:
    """One offloaded result.

    Attributes:
        entry: the entry's number in the graph.
        out: step before which the copy to the target runs; at most the number of forward steps.
        back: step before which the copy back runs.
        target: device of the offloaded copy.
    """

    entry: int
    out: int
    back: int
    target: Context


def spilled(program: Program, spills: Sequence[Spill]) -> Program:
    """Return the program that offloads ``spills``; the copies to the targets belong to its forward part.

        forward      x = op(...)  ...  x_spill = copy of x, in its offload target
        backward     x_fetch = copy of x_spill, on the device  ...  readers of x read x_fetch

    The result occupies device memory until the copy to the target; the fetched copy occupies it from the copy back on.
    An ignored input still names the original node.
    """
    graph = program.graph
    changed = Rewrite(program)
    outs: dict[int, list[int]] = {}
    backs: dict[int, list[int]] = {}
    fetched: dict[int, int] = {}
    for spill in sorted(spills, key=lambda spill: spill.entry):
        e = spill.entry
        name, device = graph.entry_name(e), program.contexts[program.device[graph.entry_node[e]]]
        waiting = changed.copy(e, name + OUT, work=COPY_OUT, context=spill.target, like=e)
        fetched[e] = changed.copy(waiting, name + BACK, work=COPY_BACK, context=device, like=e)
        outs.setdefault(spill.out, []).append(changed.makers[waiting])
        backs.setdefault(spill.back, []).append(changed.makers[fetched[e]])
    for nid in program.backward:
        ignored = graph.works[nid].ignored
        changed.inputs[nid] = [e if slot in ignored else fetched.get(e, e) for slot, e in enumerate(graph.inputs[nid])]
    steps: list[int] = []
    for step, nid in enumerate(program.order):
        if step <= program.num_forward:
            steps.extend(outs.get(step, ()))
        steps.extend(backs.get(step, ()))
        steps.append(nid)
    return changed.finish(steps, more_forward=len(spills))
