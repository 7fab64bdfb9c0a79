"""The input of the planner's core: a graph in an order of execution, with sizes, devices and derived facts.

A front end makes a :class:`Program`. Steps are positions in the order of execution. Rewrites make new programs and
change none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import InitVar, dataclass, field
from itertools import accumulate, chain, repeat

import numpy as np
from numpy.typing import NDArray

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.support.tensor_types import DType, InplacePair, Shape, aligned

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Work:
    """The memory effects of a node. Nodes of one kind may share one object.

    Attributes:
        label: its name in reports, and in lists of names in the options.
        ignored: inputs whose shape alone matters.
        inplace: outputs that may be computed over inputs, in the order of trials.
        writes: inputs that it changes, which must be variables.
        over: outputs that must lie in the memory of an input, whatever the options say; they may be smaller. With
            ``identity`` a view; else a write to a result, which earlier readers of that result precede.
        is_sum: it adds its second input to its first, so that the maker of the second may do that in its place.
        only_overwrites: it cannot add to a destination (a copy between devices).
        may_repeat: it gives the same result when it runs a second time, and a graph may then do without the first.
        asked_twice: the caller wants it to be repeated, whatever the options say.
        rules: values of ``PlanOptions.recompute`` whose fixed rule repeats it.
    """

    label: str
    ignored: tuple[int, ...] = ()
    inplace: tuple[InplacePair, ...] = ()
    writes: tuple[int, ...] = ()
    over: tuple[InplacePair, ...] = ()
    is_sum: bool = False
    only_overwrites: bool = False
    may_repeat: bool = True
    asked_twice: bool = False
    rules: frozenset[str] = frozenset(("mxnet", "echo"))


VARIABLE = Work(label="variable", may_repeat=False, rules=frozenset())
"""The work of a node that holds what the caller gives."""


@dataclass(eq=False, repr=False, kw_only=True)
class Graph:
    """Nodes in numbers, each after what it needs.

    Entry ``k`` of node ``n`` has the id ``row[n] + k``; a variable, which holds what the caller gives, has one entry.
    The graph knows neither symbols nor operators: a front end says in one :class:`Work` per node what it may do.
    """

    names: Sequence[str]
    works: Sequence[Work]
    inputs: list[list[int]]
    """Entries that each node reads."""
    controls: list[list[int]] = field(default_factory=list)
    """Nodes that each node must follow although it reads nothing of them; none by default."""
    counts: InitVar[Sequence[int]] = ()
    """How many outputs each node has; 1 for a variable, and for all by default."""
    heads: InitVar[Iterable[int]]
    """Entries that the caller gets."""
    effects: Sequence[int] = ()
    """Nodes that run for their effect: rewrites keep them, although no output depends on them."""
    origin: Sequence[int] = ()
    """For a rewritten graph the node of the front end's graph that each node is, or runs again; -1 for a node that the
    rewrite added."""
    again: frozenset[int] = frozenset()
    """Nodes that run a second time what their origin is."""
    base: Graph | None = None
    """For a rewritten graph the front end's; None for the front end's itself, which would live on in a cycle."""
    num_nodes: int = field(init=False)
    """Number of nodes, variables included."""
    num_entries: int = field(init=False)
    """Number of entries: one per variable, one per output (also hidden) of every other node."""
    row: list[int] = field(init=False)
    """First entry of each node, and after them the number of entries."""
    entry_node: list[int] = field(init=False)
    """Node id that makes each entry."""
    is_variable: list[bool] = field(init=False)
    outputs: list[int] = field(init=False)
    """Entry ids of the heads, in the order given (duplicates kept)."""

    def __post_init__(self, counts: Sequence[int], heads: Iterable[int]) -> None:
        """Number the entries."""
        self.controls = self.controls or [[] for _ in self.works]
        counts = counts or [1] * len(self.works)
        self.num_nodes = len(self.works)
        self.row = [0, *accumulate(counts)]
        self.num_entries = self.row[-1]
        self.entry_node = list(chain.from_iterable(map(repeat, range(len(counts)), counts)))
        self.is_variable = [work is VARIABLE for work in self.works]
        self.outputs = list(heads)
        self.origin = self.origin or range(len(self.works))

    def entry_name(self, eid: int) -> str:
        """A variable's name, or ``<node>_<output>``."""
        nid = self.entry_node[eid]
        name = self.names[nid]
        return name if self.works[nid] is VARIABLE else f"{name}_{self.output_name(nid, eid - self.row[nid])}"

    def output_name(self, nid: int, index: int) -> str:
        """Return the name of output ``index`` of a node."""
        if self.base is not None and self.origin[nid] >= 0:
            return self.base.output_name(self.origin[nid], index)
        return "output" if self.row[nid + 1] - self.row[nid] == 1 else f"output{index}"

    def variables(self) -> list[int]:
        """Node ids of the variables, in order."""
        return [nid for nid, is_variable in enumerate(self.is_variable) if is_variable]

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {self.num_nodes} nodes, {self.num_entries} entries, {len(self.outputs)} outputs>"
        )


BYTE = np.dtype(np.uint8)
"""The dtype of entries whose bytes alone are known."""


@dataclass(slots=True, kw_only=True)
class Program:
    """A placed graph with sizes, in an execution order. Lists are indexed by node id or entry id.

    Raises:
        PlanError: a node writes to an input that is not a variable, or must share memory that is too small.
    """

    graph: Graph
    order: list[int] = field(default_factory=list)
    """Operator nodes as they run; by default in the order of their numbers."""
    num_forward: int = -1
    """How many steps of :attr:`order` are the forward part, by default all; the others are the backward part."""
    nbytes: list[int]
    """Per entry; plans count these bytes and no others."""
    contexts: tuple[Context, ...] = (Context("cpu", 0),)
    device: list[int] = field(default_factory=list)
    """Per node, an index of ``contexts``; by default the first."""
    gradients: frozenset[int] = frozenset()
    """Entries that are written, or added, to arrays of the caller's."""
    added: frozenset[int] = frozenset()
    """Those of them that are added."""
    workspaces: dict[int, int] = field(default_factory=dict)
    """Per node: declared scratch bytes (absent: none)."""
    external_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of the caller's arrays by purpose; by default all variables are arguments."""
    shapes: list[Shape] = field(default_factory=list)
    """Per entry, for reports; without them every entry is a row of bytes."""
    dtypes: list[DType] = field(default_factory=list)
    held: Mapping[int, int] = field(default_factory=dict)
    """Entries whose memory outlives their last reader: entry -> the node until whose end it is alive."""
    tangents: frozenset[int] = frozenset()
    """Variables that the caller provides when the backward part begins; empty: unknown."""
    holds: dict[int, list[int]] = field(init=False)
    """Per node: the entries that are held until its end."""
    external: bytearray = field(init=False)
    """Per entry: 1 when its memory is the caller's (variables, gradients, and entries that must lie in them)."""
    reads: list[list[int]] = field(init=False)
    """Per node: entries whose values it reads, one per slot (ignored inputs left out)."""
    refs: list[int] = field(init=False)
    """Per entry: slots that read it, plus times it is held or an output of the graph."""
    pairs: list[Sequence[InplacePair]] = field(init=False)
    """Per node: the pairs of its ``Work.inplace`` that may share memory, in the order of trials."""

    def __post_init__(self) -> None:
        """Work out what follows from the works of nodes, sizes and places."""
        graph = self.graph
        makers = graph.entry_node
        variable = graph.is_variable
        self.order = self.order or [nid for nid, is_variable in enumerate(variable) if not is_variable]
        self.num_forward = len(self.order) if self.num_forward < 0 else self.num_forward
        self.device = self.device or [0] * graph.num_nodes
        if not self.external_bytes:
            self.external_bytes = {"arguments": sum(self.nbytes[graph.row[nid]] for nid in graph.variables())}
        if not self.shapes:
            self.shapes, self.dtypes = [(size,) for size in self.nbytes], [BYTE] * len(self.nbytes)
        self.external = bytearray(map(variable.__getitem__, makers))
        for e in self.gradients:
            self.external[e] = 1
        for nid, work in enumerate(graph.works):
            for pair in work.over:
                self._check_shared(nid, pair)
                if self.external[graph.inputs[nid][pair.input]]:
                    self.external[graph.row[nid] + pair.output] = 1
        self.reads, self.pairs = [], self._allowed(makers)
        self.refs = [0] * graph.num_entries
        refs = self.refs
        for nid, (work, inputs) in enumerate(zip(graph.works, graph.inputs, strict=True)):
            ignored = work.ignored
            reads = [e for slot, e in enumerate(inputs) if slot not in ignored] if ignored else inputs
            self.reads.append(reads)
            for e in reads:
                refs[e] += 1
            for slot in work.writes:
                maker = makers[inputs[slot]]
                if not variable[maker]:
                    raise PlanError(
                        f"operator {work.label} ({graph.names[nid]!r}) writes to its input {slot}, which must be a "
                        f"variable but is an output of {graph.names[maker]!r}"
                    )
        for e in graph.outputs:
            self.refs[e] += 1
        self.holds = {}
        for e, nid in self.held.items():
            self.holds.setdefault(nid, []).append(e)
            self.refs[e] += 1

    def _check_shared(self, nid: int, pair: InplacePair) -> None:
        """An output that must lie in an input's memory fits, on the same device, and the input is read."""
        graph = self.graph
        source, out = graph.inputs[nid][pair.input], graph.row[nid] + pair.output
        maker = graph.entry_node[source]
        fits = self.nbytes[out] <= self.nbytes[source] and pair.input not in graph.works[nid].ignored
        if not fits or (self.device[maker] != self.device[nid] and not graph.is_variable[maker]):
            raise PlanError(
                f"{graph.entry_name(out)!r} ({self.nbytes[out]} bytes) must lie in the memory of "
                f"{graph.entry_name(source)!r} ({self.nbytes[source]} bytes), which must be read, on the same device "
                f"and at least as large"
            )

    def _allowed(self, makers: Sequence[int]) -> list[Sequence[InplacePair]]:
        """Per node the pairs of input and output that may share memory at all; the only place that says so.

        The node must read the input. Both must have as many elements, of one width, on one device, and neither may be
        the caller's. A pair of different dtypes is no identity. Whether the input is dead by then depends on the order
        of execution and is asked during the walk.
        """
        external, nbytes, dtypes, device = self.external, self.nbytes, self.dtypes, self.device
        graph = self.graph
        pairs: list[Sequence[InplacePair]] = []
        for nid, (work, inputs, first) in enumerate(zip(graph.works, graph.inputs, graph.row, strict=False)):
            allowed: tuple[InplacePair, ...] = ()
            must = {pair.output for pair in work.over} if work.over else ()
            for pair in work.inplace:
                source, out = inputs[pair[0]], first + pair[1]
                if external[source] or external[out] or nbytes[source] != nbytes[out] or pair[0] in work.ignored:
                    continue
                if pair[1] in must:
                    continue
                if device[makers[source]] != device[nid]:
                    continue
                if dtypes[source] is dtypes[out] or dtypes[source] == dtypes[out]:
                    allowed += (pair,)
                elif dtypes[source].itemsize == dtypes[out].itemsize:
                    allowed += (pair._replace(identity=False),)
            pairs.append(allowed)
        return pairs

    @property
    def forward(self) -> list[int]:
        """The nodes of the forward part, as they run."""
        return self.order[: self.num_forward]

    @property
    def backward(self) -> list[int]:
        """The nodes of the backward part, as they run."""
        return self.order[self.num_forward :]

    def in_order(self, order: list[int]) -> Program:
        """The same nodes in another order; the program itself if it is the same."""
        if order == self.order:
            return self
        ordered = copy(self)
        ordered.order = order
        return ordered


def scratch_of(program: Program, *, added: Collection[int], skipped: Collection[int]) -> dict[int, int]:
    """Return scratch bytes of each node that runs: those that it declares, then room for each output that is added to.

    Kernels only overwrite, so an output that must be *added* to its destination is computed in scratch first.

    Args:
        added: entries that are added to a partial sum, besides the gradients that are added to their arrays.
        skipped: nodes that do not run.
    """
    total = dict(program.workspaces)
    for eid in (*program.added, *added):
        nid = program.graph.entry_node[eid]
        total[nid] = total.get(nid, 0) + aligned(program.nbytes[eid])
    return {nid: nbytes for nid, nbytes in total.items() if nid not in skipped}
