"""The intermediate representation between a symbol and a plan: translation, rewriting, and conversion back to nodes.

A :class:`Network` is a numbered graph with the caller's grad_req. A pass rewrites it through an :class:`Edit`: it adds
nodes and redirects entries to replacements; :meth:`Edit.done` builds the new network. Neither the original network nor
any node of the symbol is changed. Nodes supply operators and parameters; their own edges are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from weftplan.device.amounts import counted
from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops.core import registry
from weftplan.ops.core.schema import DType, Op, Params, Req, Shape
from weftplan.planner.memory_plan import PassReport
from weftplan.planner.program import Graph, Work
from weftplan.planner.rewiring import COPY_OUT, renumbered
from weftplan.planner.symbolic.indexed_graph import IndexedGraph, Kinds, indexed, work_of
from weftplan.symbol import placeholder
from weftplan.symbol.attribute import GRAD_REQS, read_grad_req
from weftplan.symbol.inference.solver import DTYPES, SHAPES
from weftplan.symbol.node import FOLDED, Entry, Node, NodeParams, Order, depth_first_order, split_variables
from weftplan.symbol.symbol import Symbol

ALIKE = ("__ctx_group__", "ctx_group", "__force_mirroring__", "force_mirroring")
"""Attributes that must be equal for two nodes to be fused: device group and forced recomputation."""
_ALIKE = frozenset(ALIKE)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A symbol's graph during the passes."""

    graph: IndexedGraph
    """The graph; its outputs are those of the symbol, then the gradients of :attr:`wanted`."""
    devices: Sequence[Context]
    """Device of each node."""
    num_outputs: int
    """Number of the symbol's outputs."""
    arguments: dict[str, int]
    """Argument name -> its node; -1 if the graph does not use it."""
    states: dict[str, int]
    """Auxiliary state name -> its node; -1 if the graph does not use it."""
    requests: dict[str, Req]
    """The grad_req of each argument."""
    wanted: tuple[str, ...] = ()
    """Arguments that have a gradient."""
    head_grads: tuple[int, ...] = ()
    """Variable ``_head_grad_<i>`` of each output; -1 if no gradient reads it."""
    shapes: Sequence[Shape] = ()
    """Shape of each entry; empty before inference."""
    dtypes: Sequence[DType] = ()
    """Dtype of each entry; empty before inference."""
    reports: tuple[PassReport, ...] = ()
    """Passes that have run."""

    @property
    def outputs(self) -> list[int]:
        """Entries of the symbol's outputs."""
        return self.graph.outputs[: self.num_outputs]

    @property
    def gradients(self) -> list[int]:
        """Entries of the gradients of :attr:`wanted`."""
        return self.graph.outputs[self.num_outputs :]

    @property
    def num_forward(self) -> int:
        """Number of leading nodes that are the forward part."""
        return max(map(self.graph.entry_node.__getitem__, self.graph.outputs[: self.num_outputs])) + 1

    def check(self) -> None:
        """Check that the fields are consistent; debug mode calls this after each pass.

        Raises:
            PlanError: two fields contradict each other.
        """
        graph, entries = self.graph, 0
        for nid, (inputs, controls) in enumerate(zip(graph.inputs, graph.controls, strict=True)):
            if any(not 0 <= e < graph.row[nid] for e in inputs) or any(not 0 <= dep < nid for dep in controls):
                raise PlanError(f"node {nid} ({graph.names[nid]!r}) needs something that comes after it")
            entries += graph.row[nid + 1] - graph.row[nid]
        if len(self.devices) != graph.num_nodes or entries != graph.num_entries:
            raise PlanError(f"{graph.num_nodes} nodes have {len(self.devices)} devices and {entries} entries")
        if len(self.shapes) not in (0, graph.num_entries):
            raise PlanError(f"{graph.num_entries} entries have {len(self.shapes)} shapes")
        if len(self.shapes) != len(self.dtypes) or len(self.gradients) != len(self.wanted):
            raise PlanError(f"{len(self.shapes)} shapes, {len(self.dtypes)} dtypes, {len(self.gradients)} gradients")


class Edit:
    """A modifiable copy of a network. Nodes and entries keep their numbers; added ones get the next numbers.

    Callers always name original or added entries. :meth:`done` applies all replacements of :meth:`stand_for` to all
    nodes, so nodes can be added in any order.
    """

    def __init__(self, network: Network) -> None:
        graph = network.graph
        self.network = network
        self.nodes: list[Node] = list(graph.nodes)
        self.works = list(graph.works)
        self.inputs: list[list[int]] = list(graph.inputs)
        """List of the input entries of each node. To redirect a node, replace its list; do not modify it."""
        self.controls: list[list[int]] = list(graph.controls)
        """Control dependencies of each node."""
        self.row = graph.row[:-1]
        self.makers = list(graph.entry_node)
        self.devices = list(network.devices)
        self.heads = list(graph.outputs)
        self._kinds: Kinds = {}
        self._like: dict[int, Sequence[int]] = {}
        self._entries: dict[int, int] = {}
        self._nodes: dict[int, int | None] = {}

    def add(
        self,
        op: Op | None,
        name: str,
        *,
        inputs: Sequence[int] = (),
        main: int = -1,
        params: Params | None = None,
        attrs: dict[str, str] | None = None,
        controls: Iterable[int] = (),
        like: Sequence[int] | None = None,
        kind: tuple[Work, int] | None = None,
    ) -> int:
        """Add a node; return its first entry.

        Args:
            op: the operator; None for a variable.
            name: the node's name.
            inputs: its input entries.
            main: node from which it takes the device and the line of the user's code.
            params: parsed parameters; nodes with equal parameters should share one dictionary.
            attrs: attributes as text.
            controls: its control dependencies.
            like: entries with the shapes and dtypes of its outputs; by default the operator infers them.
            kind: its memory effects and number of outputs, if the caller knows them.
        """
        first_entry, nid = len(self.makers), len(self.nodes)
        created_at = self.nodes[main].created_at if main >= 0 else None
        node = Node(op, name, attrs=attrs, params={} if params is None else dict_of(params), created_at=created_at)
        work, count = work_of(node, self._kinds) if kind is None else kind
        self.nodes.append(node)
        self.works.append(work)
        self.inputs.append(list(inputs))
        self.controls.append(list(dict.fromkeys(controls)))
        self.row.append(first_entry)
        self.makers += [nid] * count
        self.devices.append(self.devices[max(main, 0)])
        if like is not None:
            self._like[nid] = like
        return first_entry

    def stand_for(self, entry: int, new: int) -> None:
        """Redirect all readers of ``entry`` to ``new``."""
        self._entries[entry] = new

    def node_stands_for(self, nid: int, new: int | None) -> None:
        """Redirect control dependencies on node ``nid`` to ``new``, or drop them if it is None."""
        self._nodes[nid] = new

    def at(self, entry: int) -> int:
        """Return the current replacement of an entry; the entry itself if it has none."""
        while entry in self._entries:
            entry = self._entries[entry]
        return entry

    def fuse(self, nids: Iterable[int], outputs: Mapping[int, int]) -> None:
        """Replace the nodes ``nids`` by one fused node; ``outputs`` maps their entries to those of the fused node."""
        for entry, output in outputs.items():
            self.stand_for(entry, output)
        new = self.makers[next(iter(outputs.values()))]
        for nid in nids:
            self.node_stands_for(nid, new)

    def finish(self, *, wanted: tuple[str, ...] | None = None, head_grads: tuple[int, ...] | None = None) -> Network:
        """Return the new network without dead nodes, numbered depth first from its outputs.

        ``changes`` are new values of fields of the network; nodes in them have the numbers of this edit.
        """
        inputs, controls = self.inputs, self.controls
        final = {entry: self.at(entry) for entry in self._entries}
        if final:
            keys = final.keys()
            inputs = [ins if keys.isdisjoint(ins) else [final.get(e, e) for e in ins] for ins in inputs]
        if self._nodes:
            waited = self._nodes.keys()
            controls = [deps if waited.isdisjoint(deps) else self._waits(deps) for deps in controls]
        heads = [final.get(head, head) for head in self.heads]
        row = [*self.row, len(self.makers)]
        # The forward part comes first. If it is unchanged, it keeps its numbers and is not visited.
        old, begun, count = self.network.graph, self.network.num_forward, self.network.num_outputs
        same = inputs[:begun] == old.inputs[:begun] and controls[:begun] == old.controls[:begun]
        begun = begun if same and heads[:count] == old.outputs[:count] else 0
        roots = map(self.makers.__getitem__, heads)
        stays, number, entry, source = renumbered(
            roots, inputs=inputs, controls=controls, row=row, makers=self.makers, begun=begun
        )
        graph = IndexedGraph(
            nodes=list(map(self.nodes.__getitem__, stays)),
            works=list(map(self.works.__getitem__, stays)),
            inputs=inputs[:begun] + [list(map(entry.__getitem__, inputs[was])) for was in stays[begun:]],
            controls=controls[:begun]
            + [list(map(number.__getitem__, deps)) if (deps := controls[was]) else [] for was in stays[begun:]],
            counts=[row[was + 1] - row[was] for was in stays],
            heads=map(entry.__getitem__, heads),
        )
        shapes, dtypes = self._sizes()
        number.append(-1)  # -1 stays
        network = replace(
            self.network,
            graph=graph,
            wanted=self.network.wanted if wanted is None else wanted,
            head_grads=self.network.head_grads if head_grads is None else head_grads,
        )
        return replace(
            network,
            shapes=list(map(shapes.__getitem__, source)) if shapes else (),
            dtypes=list(map(dtypes.__getitem__, source)) if dtypes else (),
            devices=list(map(self.devices.__getitem__, stays)),
            arguments={name: number[nid] for name, nid in network.arguments.items()},
            states={name: number[nid] for name, nid in network.states.items()},
            head_grads=tuple(map(number.__getitem__, network.head_grads)),
        )

    def _sizes(self) -> tuple[list[Shape], list[DType]]:
        """Return the shapes and dtypes of all entries, or empty lists before inference.

        Shapes and dtypes of added nodes are those of ``like``, for gradients those of the forward inputs, and for other
        nodes inferred by their operator.

        Raises:
            ShapeError, DTypeError: an output of a new node cannot be inferred.
        """
        shapes, dtypes, inputs = list(self.network.shapes), list(self.network.dtypes), self.inputs
        inferred: dict[tuple[object, ...], tuple[list[Shape], list[DType]]] = {}
        for nid in range(self.network.graph.num_nodes, len(self.nodes) if shapes else 0):
            node, op, like = self.nodes[nid], self.nodes[nid].op, self._like.get(nid)
            assert op is not None or like is not None
            if like is None and op is not None and op.backward_of is not None and self.controls[nid]:
                reads, positions = inputs[self.controls[nid][0]], op.grad_inputs
                like = [reads[position] for position in (positions(node.params) if callable(positions) else positions)]
            if like is not None:
                for e in like:
                    shapes.append(shapes[e])
                    dtypes.append(dtypes[e])
            elif op is not None:
                in_shapes: list[Shape | None] = [shapes[e] for e in inputs[nid]]
                in_dtypes: list[DType | None] = [dtypes[e] for e in inputs[nid]]
                key = (id(op), id(node.params), *in_shapes, *in_dtypes)
                outs = inferred.get(key)
                if outs is None:
                    outs = inferred[key] = SHAPES.outputs(op, node, in_shapes), DTYPES.outputs(op, node, in_dtypes)
                shapes += outs[0]
                dtypes += outs[1]
        return shapes, dtypes

    def _waits(self, deps: Iterable[int]) -> list[int]:
        """Return the replacements of control dependencies, without duplicates."""
        nodes: dict[int, None] = {}
        for dep in deps:
            waiting: int | None = dep
            while waiting is not None and waiting in self._nodes:
                waiting = self._nodes[waiting]
            if waiting is not None:
                nodes[waiting] = None
        return list(nodes)


def dict_of(params: Params) -> NodeParams:
    """Return parameters as a dictionary; a dictionary is not copied, because nodes with equal parameters share it."""
    return params if isinstance(params, dict) else dict(params)


def alike(a: Node, b: Node) -> bool:
    """Return whether two nodes may be fused: their attributes `ALIKE` are equal."""
    plain = _ALIKE.isdisjoint(a.attrs) and _ALIKE.isdisjoint(b.attrs)  # fast path: most nodes have none of them
    return plain or all(a.attrs.get(key) == b.attrs.get(key) for key in ALIKE)


def shared(node: Node) -> dict[str, str]:
    """Return the attributes `ALIKE` of a node, which a fused node takes over."""
    return {key: node.attrs[key] for key in ALIKE if key in node.attrs}


MARK = "__spill__"
"""Attribute of the copies of offloaded results: ``out`` or ``back``."""


def translated(
    symbol: Symbol | Sequence[Entry], *, grad_req: str | Mapping[str, str], context: Context, order: Order | None = None
) -> Network:
    """Return the network of a symbol (or of a sequence of entries), with every node on the device ``context``.

    Raises:
        PlanError: the graph is cyclic or malformed, or ``grad_req`` names an argument that it does not have.
        UnknownOperatorError: the graph needs operators that weftplan does not have; the message names all of them.
    """
    heads: list[Entry] = list(symbol.entries if isinstance(symbol, Symbol) else symbol)
    if not heads:
        raise PlanError("there is nothing to plan: the symbol has no outputs")
    if order is None:
        order = depth_first_order((entry[0] for entry in heads), PlanError)
    nodes, nid = order
    if [node for node in nodes if node.op is not None and node.op.single]:
        placeholder.require_known(nodes, "plan")
    arguments, states = _variables(nodes)
    graph = indexed(heads, (list(nodes), nid))
    return Network(
        graph=graph,
        devices=[context] * graph.num_nodes,
        num_outputs=len(heads),
        arguments={name: nid[node] for name, node in arguments.items()},
        states={name: nid[node] for name, node in states.items()},
        requests=_requests(grad_req, arguments),
        reports=tuple(_folded(nodes)),
    )


def _variables(order: Sequence[Node]) -> tuple[dict[str, Node], dict[str, Node]]:
    """Return (arguments, auxiliary states) by name, in MXNet's order.

    Raises:
        PlanError: two variables have the same name.
    """
    named: set[str] = set()
    for node in order:
        if node.op is None:
            if node.name in named:
                raise PlanError(f"two different variables are called {node.name!r}: rename one of them")
            named.add(node.name)
    arguments, states = split_variables(order)
    return {node.name: node for node in arguments}, {node.name: node for node in states}


def _requests(grad_req: str | Mapping[str, str], arguments: Mapping[str, Node]) -> dict[str, Req]:
    """Return the grad_req of each argument.

    Raises:
        PlanError: a name is no argument, or a value is illegal.
    """
    if not isinstance(grad_req, str):
        unknown = [name for name in grad_req if name not in arguments and grad_req[name] != "null"]
        if unknown:
            raise PlanError(f"grad_req names {unknown[0]!r}, which is no argument; the arguments are {list(arguments)}")
    return {name: GRAD_REQS[text] for name, text in read_grad_req(grad_req, arguments, PlanError).items()}


def _folded(order: Sequence[Node]) -> list[PassReport]:
    """Return records of the foldings that the graph has undergone before planning."""
    values = [node for node in order if FOLDED in node.attrs]
    constants, layers = (sum(node.is_variable == is_constant for node in values) for is_constant in (True, False))
    passes = []
    if constants:
        changed = f"{counted(constants, 'result')} of parameters alone became parameters"
        passes.append(PassReport("constants folded", changed, "convert.fold_constants"))
    if layers:
        changed = f"{counted(layers, 'node')} became part of the layers before them"
        passes.append(PassReport("batch norm folded", changed, "convert.fold_batch_norm"))
    return passes


def realised(base: IndexedGraph, graph: Graph) -> IndexedGraph:
    """Return ``graph``, a rewrite of ``base`` by the planner's core, with node objects; ``base`` if unchanged."""
    if graph is base:
        return base
    copy_op = registry.get("_CrossDeviceCopy")
    copy_params = registry.parse_params(copy_op, {})
    nodes: list[Node] = []
    for nid, origin in enumerate(graph.origin):
        name = graph.names[nid]
        if origin < 0:
            mark = {MARK: "out" if graph.works[nid] is COPY_OUT else "back"}
            nodes.append(Node(copy_op, name, attrs=mark, params=copy_params))
            continue
        node = base.nodes[origin]
        if nid in graph.again:
            node = Node(node.op, name, attrs=node.attrs, params=node.params, created_at=node.created_at, mirror_of=node)
        nodes.append(node)
    row = graph.row
    return IndexedGraph(
        nodes=nodes,
        works=graph.works,
        inputs=graph.inputs,
        controls=graph.controls,
        counts=[end - begin for begin, end in pairwise(row)],
        heads=graph.outputs,
        names=graph.names,
        again=graph.again,
    )
