"""From a symbol to numbers, once, and from the numbers that the core has rewritten back to nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from weftplan.device.amounts import counted
from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops.core import registry
from weftplan.ops.core.schema import Req
from weftplan.planner.graph import Graph
from weftplan.planner.labels import Pass
from weftplan.planner.spill.rewrite import COPY_OUT
from weftplan.planner.symbolic.indexed_graph import IndexedGraph, indexed
from weftplan.planner.symbolic.network import Network
from weftplan.symbol import placeholder
from weftplan.symbol.attribute import GRAD_REQS, read_grad_req
from weftplan.symbol.node import FOLDED, Entry, Node
from weftplan.symbol.symbol import Symbol
from weftplan.symbol.traversal import Order, depth_first_order, split_variables

MARK = "__spill__"
"""Attribute of copies of results that wait on the host: ``out`` or ``back``."""


def translated(
    symbol: Symbol | Sequence[Entry], *, grad_req: str | Mapping[str, str], context: Context, order: Order | None = None
) -> Network:
    """Return the graph of a symbol (or of a sequence of entries), every node on the device ``context``.

    Raises:
        PlanError: the graph is cyclic or malformed, or the caller wants gradients of arguments that it does not have.
        UnknownOperatorError: the graph needs operators that weftplan does not have; names all of them.
    """
    heads = list(symbol.entries if isinstance(symbol, Symbol) else symbol)
    if not heads:
        raise PlanError("there is nothing to plan: the symbol has no outputs")
    if order is None:
        order = depth_first_order((entry[0] for entry in heads), PlanError)
    nodes, nid = order
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
    """(arguments, auxiliary states) by name, in MXNet's order."""
    named: set[str] = set()
    for node in order:
        if node.op is None:
            if node.name in named:
                raise PlanError(f"two different variables are called {node.name!r}: rename one of them")
            named.add(node.name)
    arguments, states = split_variables(order)
    return {node.name: node for node in arguments}, {node.name: node for node in states}


def _requests(grad_req: str | Mapping[str, str], arguments: Mapping[str, Node]) -> dict[str, Req]:
    if not isinstance(grad_req, str):
        unknown = [name for name in grad_req if name not in arguments and grad_req[name] != "null"]
        if unknown:
            raise PlanError(f"grad_req names {unknown[0]!r}, which is no argument; the arguments are {list(arguments)}")
    return {name: GRAD_REQS[text] for name, text in read_grad_req(grad_req, arguments, PlanError).items()}


def _folded(order: Sequence[Node]) -> list[Pass]:
    """Return the foldings that the given graph has gone through before."""
    values = [node for node in order if FOLDED in node.attrs]
    constants, layers = (sum(node.is_variable == wanted for node in values) for wanted in (True, False))
    passes = []
    if constants:
        changed = f"{counted(constants, 'result')} of parameters alone became parameters"
        passes.append(Pass("constants folded", changed, "convert.fold_constants"))
    if layers:
        changed = f"{counted(layers, 'node')} became part of the layers before them"
        passes.append(Pass("batch norm folded", changed, "convert.fold_batch_norm"))
    return passes


def realised(base: IndexedGraph, graph: Graph) -> IndexedGraph:
    """The nodes of ``graph``, which the core made of ``base`` (or which is ``base``)."""
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
