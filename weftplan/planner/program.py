"""The input of the planner's core: a graph in execution order with sizes, devices and derived facts.

A front end makes a :class:`Program`. Steps are positions in the execution order. A rewrite returns a new program and
does not change its input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from copy import copy
from dataclasses import InitVar, dataclass, field
from itertools import accumulate, chain, repeat
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.planner.program_checks import check_graph, check_items, check_kinds, check_program
from weftplan.support.tensor_types import DType, InplacePair, Shape, aligned

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Work:
    """The memory effects of a node. Nodes of one kind may share one object.

    Attributes:
        label: name of the operator in reports and in options that list operators.
        ignored: inputs whose values are not read, only their shapes.
        inplace: pairs of input and output that may share memory, the preferred first.
        writes: inputs that the node modifies, which must be variables.
        over: pairs whose output must be in the memory of its input, regardless of the options; the output may be
            smaller. An ``identity`` is a view; another pair is a write to a result, which must follow the earlier
            readers of that result.
        is_sum: whether the node adds its second input to its first; the maker of the second may then add in place.
        only_overwrites: whether the node cannot add to its destination (a copy between devices).
        may_repeat: whether the node may be recomputed: a second run gives the same result.
        asked_twice: whether the caller requests recomputation, regardless of the options.
        rules: values of ``PlanOptions.recompute`` whose fixed rule repeats the node.
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
"""Memory effects of a variable, a node that holds an array of the caller."""


@dataclass(eq=False, repr=False, kw_only=True)
class Graph:
    """A graph of numbered nodes in topological order.

    Entry ``k`` of node ``n`` has the id ``row[n] + k``. A variable, which holds an array of the caller, has one entry.
    The graph knows neither symbols nor operators: the front end describes the memory effects of each node in a
    :class:`Work`.
    """

    names: Sequence[str]
    works: Sequence[Work]
    inputs: list[list[int]]
    """Entries that each node reads."""
    controls: list[list[int]] = field(default_factory=list)
    """Control dependencies of each node: nodes that it must follow without reading them; none by default."""
    counts: InitVar[Sequence[int]] = ()
    """Number of outputs of each node; 1 for a variable, and for all nodes by default."""
    heads: InitVar[Iterable[int]]
    """Output entries of the graph."""
    effects: Sequence[int] = ()
    """Nodes with effects: rewrites keep them although no output depends on them."""
    origin: Sequence[int] = ()
    """Node of the front end's graph that each node is or recomputes; -1 for a copy that a rewrite added."""
    again: frozenset[int] = frozenset()
    """Nodes that recompute their origin."""
    base: Graph | None = None
    """Front end's graph of a rewritten graph; None for that graph itself, which avoids a reference cycle."""
    num_nodes: int = field(init=False)
    """Number of nodes, variables included."""
    num_entries: int = field(init=False)
    """Number of entries: one per variable, one per output (also hidden) of every other node."""
    row: list[int] = field(init=False)
    """First entry of each node, followed by the number of entries."""
    entry_node: list[int] = field(init=False)
    """Node that makes each entry."""
    is_variable: list[bool] = field(init=False)
    """Whether each node is a variable."""
    outputs: list[int] = field(init=False)
    """Output entries in the order of ``heads``, with duplicates."""

    def __post_init__(self, counts: Sequence[int], heads: Iterable[int]) -> None:
        """Number the entries, fill in defaults and check the numbers of a front end's graph."""
        if self.base is None:
            lists = {"inputs": self.inputs, "controls": self.controls, "effects": self.effects, "origin": self.origin}
            check_kinds("graph", Sequence, names=self.names, works=self.works, counts=counts, **lists)
            check_kinds("graph", Iterable, heads=heads)
            check_items("work of node", self.works, kind=Work)
        self.controls = self.controls or [[] for _ in self.works]
        counts, heads = counts or [1] * len(self.works), list(heads)
        self.origin = self.origin or range(len(self.works))
        if self.base is None:
            check_graph(self, counts=counts, heads=heads)
        self.num_nodes = len(self.works)
        self.row = [0, *accumulate(counts)]
        self.num_entries = self.row[-1]
        self.entry_node = list(chain.from_iterable(map(repeat, range(len(counts)), counts)))
        self.is_variable = [work is VARIABLE for work in self.works]
        self.outputs = heads

    def entry_name(self, eid: int) -> str:
        """Return the name of an entry: a variable's name, or ``<node>_<output>``."""
        nid = self.entry_node[eid]
        name = self.names[nid]
        return name if self.works[nid] is VARIABLE else f"{name}_{self.output_name(nid, eid - self.row[nid])}"

    def output_name(self, nid: int, index: int) -> str:
        """Return the name of output ``index`` of a node."""
        if self.base is not None and self.origin[nid] >= 0:
            return self.base.output_name(self.origin[nid], index)
        return "output" if self.row[nid + 1] - self.row[nid] == 1 else f"output{index}"

    def variables(self) -> list[int]:
        """Return the ids of the variables in ascending order."""
        return [nid for nid, is_variable in enumerate(self.is_variable) if is_variable]

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__}: {self.num_nodes} nodes, {self.num_entries} entries, {len(self.outputs)} outputs>"
        )


BYTE = np.dtype(np.uint8)
"""Dtype of entries if only their bytes are known."""


@dataclass(slots=True, kw_only=True)
class Program:
    """A placed graph with sizes, in an execution order. Lists are indexed by node id or entry id.

    Raises:
        PlanError: a size is negative or too large, a list has the wrong length, a number refers to no node or entry, a
            node writes to an input that is not a variable, or must share memory that is too small.
    """

    graph: Graph
    order: list[int] = field(default_factory=list)
    """Operator nodes in execution order; by default in the order of their numbers."""
    num_forward: int = -1
    """Number of leading steps of :attr:`order` that are the forward part, by default all; the rest is the backward
    part."""
    nbytes: list[int]
    """Bytes of each entry, the only sizes that plans count."""
    contexts: tuple[Context, ...] = (Context("cpu", 0),)
    """Devices, indexed by :attr:`device`."""
    device: list[int] = field(default_factory=list)
    """Device of each node, as an index of :attr:`contexts`; by default the first."""
    gradients: frozenset[int] = frozenset()
    """Entries that are written or added to arrays of the caller."""
    added: frozenset[int] = frozenset()
    """Entries of :attr:`gradients` that are added to their arrays."""
    workspaces: dict[int, int] = field(default_factory=dict)
    """Declared scratch bytes of the nodes that have any."""
    external_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of the caller's arrays by purpose; by default all variables are arguments."""
    shapes: list[Shape] = field(default_factory=list)
    """Shape of each entry, for reports; by default one dimension of bytes."""
    dtypes: list[DType] = field(default_factory=list)
    """Dtype of each entry; by default :data:`BYTE`."""
    held: Mapping[int, int] = field(default_factory=dict)
    """Entries whose memory outlives their last reader: entry -> node at whose end the memory is free."""
    tangents: frozenset[int] = frozenset()
    """Variables that the caller provides when the backward part begins; empty: unknown."""
    holds: dict[int, list[int]] = field(init=False)
    """Entries held until the end of each node."""
    external: bytearray = field(init=False)
    """1 for each entry in memory of the caller: variables, gradients, and entries that must share their memory."""
    reads: list[list[int]] = field(init=False)
    """Entries whose values each node reads, one per slot, without ignored inputs."""
    refs: list[int] = field(init=False)
    """Number of uses of each entry: slots that read it, plus one if it is held, plus one per graph output."""
    pairs: list[Sequence[InplacePair]] = field(init=False)
    """Pairs of each node's ``Work.inplace`` that may share memory, the preferred first."""

    def __post_init__(self) -> None:
        """Fill in defaults, derive the remaining fields and check the works of the nodes."""
        graph = self.graph
        makers = graph.entry_node
        variable = graph.is_variable
        if graph.base is None:
            lists = {"nbytes": self.nbytes, "order": self.order, "device": self.device, "contexts": self.contexts}
            tables = {"workspaces": self.workspaces, "held": self.held, "external_bytes": self.external_bytes}
            check_kinds("program", Sequence, shapes=self.shapes, dtypes=self.dtypes, **lists)
            check_kinds("program", Mapping, **tables)
            check_kinds("program", Set, gradients=self.gradients, added=self.added, tangents=self.tangents)
            check_kinds("program", Integral, num_forward=self.num_forward)
            check_items("context", self.contexts, kind=Context)
        self.order = self.order or [nid for nid, is_variable in enumerate(variable) if not is_variable]
        self.num_forward = len(self.order) if self.num_forward < 0 else self.num_forward
        self.device = self.device or [0] * graph.num_nodes
        if graph.base is None:
            check_program(self)
        if not self.external_bytes:
            self.external_bytes = {"arguments": sum(self.nbytes[graph.row[nid]] for nid in graph.variables())}
        if not self.shapes:
            self.shapes, self.dtypes = [(size,) for size in self.nbytes], [BYTE] * len(self.nbytes)
        self.external = bytearray(map(variable.__getitem__, makers))
        for e in self.gradients:
            self.external[e] = 1
        sharing = [nid for nid, work in enumerate(graph.works) if work.over]
        for nid in sharing:
            for pair in graph.works[nid].over:
                self._check_shared(nid, pair)
                source, out = graph.inputs[nid][pair.input], graph.row[nid] + pair.output
                if self.external[source]:
                    self.external[out] = 1
                elif out in self.gradients:
                    raise PlanError(
                        f"gradient {graph.entry_name(out)!r} is written to an array of the caller, but must lie in the "
                        f"memory of a result: add a step that copies it"
                    )
        written = overwritten(self) if sharing else set[int]()
        changing = {e for e, root in enumerate(shared_roots(self)) if root in written} if written else written
        self.reads, self.pairs = [], self._allowed(makers, changing)
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
        """Check that an output that must share an input's memory fits it on the same device, and the input is read.

        Raises:
            PlanError: it cannot share that memory.
        """
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

    def _allowed(self, makers: Sequence[int], changing: Collection[int]) -> list[Sequence[InplacePair]]:
        """Return, per node, the pairs of input and output that may share memory in some execution order.

        The node must read the input. Both must have the same bytes and item size, be on one device, and be in planned
        memory. A pair of different dtypes is no identity, and neither is a pair whose input is in ``changing``, because
        a later node overwrites that memory. Whether the input is dead depends on the execution order, so
        :func:`~weftplan.planner.storage_assignment.assign` checks that.
        """
        external, nbytes, dtypes, device = self.external, self.nbytes, self.dtypes, self.device
        graph = self.graph
        pairs: list[Sequence[InplacePair]] = []
        for nid, (work, inputs, first_output) in enumerate(zip(graph.works, graph.inputs, graph.row, strict=False)):
            allowed: tuple[InplacePair, ...] = ()
            must = {pair.output for pair in work.over} if work.over else ()
            for pair in work.inplace:
                source, out = inputs[pair[0]], first_output + pair[1]
                if external[source] or external[out] or nbytes[source] != nbytes[out] or pair[0] in work.ignored:
                    continue
                if pair[1] in must:
                    continue
                if device[makers[source]] != device[nid]:
                    continue
                same_dtype = dtypes[source] is dtypes[out] or dtypes[source] == dtypes[out]
                if same_dtype and source not in changing:
                    allowed += (pair,)
                elif dtypes[source].itemsize == dtypes[out].itemsize:
                    allowed += (pair._replace(identity=False),)
            pairs.append(allowed)
        return pairs

    @property
    def forward(self) -> list[int]:
        """Nodes of the forward part in execution order."""
        return self.order[: self.num_forward]

    @property
    def backward(self) -> list[int]:
        """Nodes of the backward part in execution order."""
        return self.order[self.num_forward :]

    def in_order(self, order: list[int]) -> Program:
        """Return a copy with another execution order, or the program itself if the order is the same."""
        if order == self.order:
            return self
        ordered = copy(self)
        ordered.order = order
        return ordered


def scratch_of(program: Program, *, added: Collection[int], skipped: Collection[int]) -> dict[int, int]:
    """Return the scratch bytes of each node that runs: declared bytes plus a buffer for each added output.

    Kernels only overwrite, so an output that must be *added* to its destination is computed in scratch first.

    Args:
        program: the graph.
        added: entries that are added to a partial sum; ``program.added`` counts as well.
        skipped: nodes that do not run.
    """
    total = dict(program.workspaces)
    for eid in (*program.added, *added):
        nid = program.graph.entry_node[eid]
        total[nid] = total.get(nid, 0) + aligned(program.nbytes[eid])
    return {nid: nbytes for nid, nbytes in total.items() if nid not in skipped}


def shared_roots(program: Program) -> list[int]:
    """Return, per entry, the entry whose memory it must share (:attr:`Work.over`), by default the entry itself."""
    graph = program.graph
    root = list(range(graph.num_entries))
    for nid, work in enumerate(graph.works):
        for pair in work.over:
            root[graph.row[nid] + pair.output] = root[graph.inputs[nid][pair.input]]
    return root


def overwritten(program: Program) -> set[int]:
    """Return the roots (:func:`shared_roots`) of results that another node overwrites later."""
    root, inputs = shared_roots(program), program.graph.inputs
    writes = ((nid, pair) for nid, work in enumerate(program.graph.works) for pair in work.over if not pair.identity)
    return {root[inputs[nid][pair.input]] for nid, pair in writes}
