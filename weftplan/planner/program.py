"""The input of the planner's core: a graph in an order of execution, with sizes, places and what follows from them.

A front end makes a :class:`Program` with :func:`program_of`. Steps are positions in the order of execution.
Rewrites make new programs and change none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops.schema import DType, InplacePair, Shape, aligned
from weftplan.planner.graph import Graph, IntArray


@dataclass(slots=True, kw_only=True)
class Program:
    """A placed graph with sizes, in an execution order. Lists are indexed by node id or entry id."""

    graph: Graph
    order: list[int]
    """Operator nodes as they run."""
    num_forward: int
    """How many steps of :attr:`order` are the forward part; the others are the backward part."""
    shapes: list[Shape]
    dtypes: list[DType]
    elements: list[int]
    nbytes: list[int]
    contexts: tuple[Context, ...]
    device: list[int]
    """Per node, an index of ``contexts``."""
    external: bytearray
    """Per entry: 1 when its memory is the caller's (variables, gradients)."""
    added: frozenset[int]
    """Gradient entries that are added to their arrays."""
    reads: list[list[int]]
    """Per node: entries whose values it reads, one per slot (ignored inputs left out)."""
    refs: list[int]
    """Per entry: slots that read it, plus times it is an output of the graph."""
    pairs: list[Sequence[InplacePair]]
    """Per node: what :func:`allowed_pairs` leaves of what its operator declares, in the order in which it is tried."""
    workspaces: dict[int, int]
    """Per node: declared scratch bytes (absent: none)."""
    external_bytes: dict[str, int]
    """Bytes of the caller's arrays by purpose."""

    @property
    def forward(self) -> list[int]:
        """The nodes of the forward part, as they run."""
        return self.order[: self.num_forward]

    @property
    def backward(self) -> list[int]:
        """The nodes of the backward part, as they run."""
        return self.order[self.num_forward :]


def program_of(
    graph: Graph,
    order: list[int],
    *,
    num_forward: int,
    shapes: list[Shape],
    dtypes: list[DType],
    elements: IntArray,
    nbytes: IntArray,
    contexts: tuple[Context, ...],
    device: list[int],
    gradients: Sequence[int],
    added: frozenset[int],
    workspaces: dict[int, int],
    external_bytes: dict[str, int],
) -> Program:
    """Work out what follows from the works of nodes, sizes and places.

    Raises:
        PlanError: a node writes to an input that is not a variable.
    """
    external = bytearray(graph.num_entries)
    external_view = np.frombuffer(external, dtype=np.uint8)
    external_view[graph.row_ptr[:-1][graph.is_variable]] = 1
    external_view[list(gradients)] = 1
    sizes: list[int] = elements.tolist()
    makers: list[int] = graph.entry_node.tolist()
    pairs: list[Sequence[InplacePair]] = []
    alone = len(contexts) == 1
    for nid, work in enumerate(graph.works):
        inputs = graph.inputs[nid]
        if work.writes:
            _check_states(graph, nid)
        if not work.inplace:
            pairs.append(())
            continue
        pairs.append(
            allowed_pairs(
                [pair for pair in work.inplace if pair.input not in work.ignored] if work.ignored else work.inplace,
                inputs,
                graph.row[nid],
                sizes=sizes,
                dtypes=dtypes,
                external=external,
                here=[True] * len(inputs) if alone else [device[makers[e]] == device[nid] for e in inputs],
            )
        )
    reads = reading(graph)
    return Program(
        graph=graph,
        order=order,
        num_forward=num_forward,
        shapes=shapes,
        dtypes=dtypes,
        elements=sizes,
        nbytes=nbytes.tolist(),
        contexts=contexts,
        device=device,
        external=external,
        added=added,
        reads=reads,
        refs=references(graph, reads),
        pairs=pairs,
        workspaces=workspaces,
        external_bytes=external_bytes,
    )


def allowed_pairs(
    declared: Sequence[InplacePair],
    inputs: Sequence[int],
    first_output: int,
    *,
    sizes: Sequence[int],
    dtypes: Sequence[DType],
    external: Sequence[int],
    here: Sequence[bool],
) -> tuple[InplacePair, ...]:
    """The pairs of input and output of one node that may share memory at all; the only place that says so.

    Both must have as many elements, of one width, on one device, and neither may be the caller's. A pair of different
    dtypes is no identity. Whether the input is dead by then depends on the order of execution and is asked by whoever
    walks it.

    Args:
        declared: what the operator allows, of inputs whose values it reads.
        inputs: entries that the node reads, by slot.
        first_output: its first entry; the others follow.
        sizes, dtypes, external: per entry: elements, dtype, and whether its memory is the caller's.
        here: per slot, whether the input is made on the node's device.
    """
    allowed = []
    for pair in declared:
        source, out = inputs[pair.input], first_output + pair.output
        if external[source] or external[out] or sizes[source] != sizes[out] or not here[pair.input]:
            continue
        if dtypes[source] == dtypes[out]:
            allowed.append(pair)
        elif dtypes[source].itemsize == dtypes[out].itemsize:
            allowed.append(pair._replace(identity=False))
    return tuple(allowed)


def reading(graph: Graph) -> list[list[int]]:
    """Per node: entries whose values it reads, one per slot."""
    return [
        [e for slot, e in enumerate(inputs) if slot not in work.ignored] if work.ignored else inputs
        for work, inputs in zip(graph.works, graph.inputs, strict=True)
    ]


def references(graph: Graph, reads: Sequence[Sequence[int]]) -> list[int]:
    """Per entry: how many slots read it (``reads`` of each node), plus how many times it is an output."""
    refs = [0] * graph.num_entries
    for read in reads:
        for e in read:
            refs[e] += 1
    for e in graph.outputs.tolist():
        refs[e] += 1
    return refs


def scratch_of(program: Program, *, added: Collection[int], skipped: Collection[int]) -> dict[int, int]:
    """Scratch bytes of each node that runs: what it declares, and behind that room for each output that is added to.

    Kernels only overwrite, so an output that must be *added* to its destination is computed in scratch first.

    Args:
        program: the graph.
        added: entries that are added to a partial sum, besides the gradients that are added to their arrays.
        skipped: nodes that do not run.
    """
    total = dict(program.workspaces)
    for eid in (*program.added, *added):
        nid = int(program.graph.entry_node[eid])
        total[nid] = total.get(nid, 0) + aligned(program.nbytes[eid])
    return {nid: nbytes for nid, nbytes in total.items() if nid not in skipped}


def _check_states(graph: Graph, nid: int) -> None:
    work = graph.works[nid]
    for slot in work.writes:
        maker = int(graph.entry_node[graph.inputs[nid][slot]])
        if not graph.is_variable[maker]:
            raise PlanError(
                f"operator {work.label} ({graph.names[nid]!r}) writes to its input {slot}, which must be a variable "
                f"but is an output of {graph.names[maker]!r}"
            )
