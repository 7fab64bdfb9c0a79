"""The first third of the pipeline: a symbol becomes a graph with gradients, in numbers, with every node on a device.

1. merge common sub-expressions; 2. add gradients; 3. join nodes that follow one another; 4. place nodes on devices,
with copies; 5. gather gradients of shared weights; 6. number the graph. No given node is changed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops.core import registry
from weftplan.ops.core.schema import DType, Req, Shape
from weftplan.planner.labels import Pass
from weftplan.planner.options import PlanOptions
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.passes.common_subexpressions import eliminate
from weftplan.planner.symbolic.passes.fuse_relu import join
from weftplan.planner.symbolic.passes.placement import place
from weftplan.planner.symbolic.passes.report import folded, gathered_gradients, joined_layers, merged
from weftplan.planner.symbolic.passes.weight_gradient_batches import Forward, gather
from weftplan.symbol import placeholder
from weftplan.symbol.gradient import GRAD_REQS, INHERITED, Gradients, add_gradients, read_grad_req
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import Order, depth_first_order, split_variables


@dataclass(frozen=True, slots=True, kw_only=True)
class Differentiated:
    """A numbered graph with gradients and places, and what is whose."""

    graph: IndexedGraph
    """Heads: the outputs of the symbol, then the gradients of :attr:`wanted`."""
    devices: list[Context]
    """Of each node."""
    num_outputs: int
    head_grads: list[Node]
    wanted: list[str]
    """Arguments that have a gradient."""
    arguments: dict[str, Node]
    states: dict[str, Node]
    requests: dict[str, Req]
    """What the caller wants of the gradient of each argument."""
    joined: int
    """Pairs of nodes that became one."""
    passes: list[Pass]
    """Those that ran so far, in their order: who runs another one adds it."""
    given: Container[Node]
    """The nodes of the symbol: all others in the graph are new, and nobody else has them."""
    forward: tuple[list[Shape], list[DType]] | None
    """Shapes and dtypes of the entries of the forward part, where they are found already."""

    @property
    def outputs(self) -> list[int]:
        """Entries of the symbol's outputs."""
        return self.graph.outputs[: self.num_outputs]

    @property
    def gradients(self) -> list[int]:
        """Entries of the gradients of :attr:`wanted`."""
        return self.graph.outputs[self.num_outputs :]


def differentiate(
    symbol: Any,
    options: PlanOptions,
    *,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, Any],
    grad_req: str | Mapping[str, str],
    grad_dtypes: Mapping[str, Any],
    context: Context,
    group2ctx: Mapping[str, Context],
    variable_contexts: Mapping[str, Context],
    order: Order | None = None,
) -> Differentiated:
    """Merge what computes the same, add the gradients that somebody wants, and put every node on a device.

    The arguments are those of :func:`weftplan.planner.symbolic.pipeline.size_symbol`.
    """
    heads: list[Entry] = list(getattr(symbol, "entries", symbol))
    if not heads:
        raise PlanError("there is nothing to plan: the symbol has no outputs")
    if order is None:
        order = depth_first_order((entry[0] for entry in heads), PlanError)
    forward: Order | None = order
    nodes = order[0]
    placeholder.require_known(nodes, "plan")
    arguments, states = _variables(nodes)
    requests = _requests(grad_req, arguments)
    passes = folded(nodes)
    if options.eliminate_common_expr:
        heads, removed = eliminate(heads, nodes)
        if removed:
            forward = None
        passes.append(merged(removed))
    wanted = [name for name in arguments if requests[name] != Req.NULL]
    gradients = Gradients([], [], order[1])
    if wanted:
        gradients = add_gradients(
            heads,
            [arguments[name] for name in wanted],
            sum_cap=options.inplace_grad_sum_cap,
            accumulated={arguments[name] for name in wanted if requests[name] == Req.ADD},
            like_mxnet=options.compat == "mxnet",
            order=forward,
        )
    entries = [*heads, *gradients.entries]
    for position, name in enumerate(wanted, len(heads)):
        if name in grad_dtypes:
            entries[position] = _cast(entries[position], name, np.dtype(grad_dtypes[name]))
    joined = 0
    found: Order | None = None
    if options.fusion and options.compat == "none" and context.is_host and not group2ctx:
        found = depth_first_order((entry[0] for entry in entries), PlanError, forward)
        entries, joined, after = join(entries, found[0], gradients.given)
        if joined:
            found = after
        passes.append(joined_layers(joined))
    where: dict[Node, Context] = {}
    if group2ctx or variable_contexts:
        found = None
        homes = {
            position: _home(arguments[name], context, group2ctx, variable_contexts)
            for position, name in enumerate(wanted, len(heads))
        }
        added = {position for position, name in enumerate(wanted, len(heads)) if requests[name] == Req.ADD}
        entries, where = place(
            entries, context, group2ctx=group2ctx, variable_contexts=variable_contexts, wanted=homes, added=added
        )
    like: tuple[IndexedGraph, list[int]] | None = None
    sized: tuple[list[Shape], list[DType]] | None = None
    if options.fusion and options.compat == "none" and options.drop_dead_outputs:
        if found is None:
            found = depth_first_order((entry[0] for entry in entries), PlanError)
        count = max(found[1][entry[0]] for entry in entries[: len(heads)]) + 1
        part = Forward(outputs=entries[: len(heads)], nodes=found[0][:count], shapes=shapes, dtypes=dtypes)
        gathering = gather(entries, found[0], forward=part, device=lambda node: where.get(node, context))
        passes.append(gathered_gradients(gathering.layers))
        if gathering.layers:
            entries, before = gathering.entries, len(found[0])
            found = depth_first_order((entry[0] for entry in entries), PlanError, (part.nodes, part.graph.nid))
            joined += before - len(found[0])
            like, sized = (part.graph, [*range(count), *[-1] * (len(found[0]) - count)]), part.facts
            if where:
                where.update((node, where[last]) for node, last in gathering.made.items())
    graph = IndexedGraph(entries, found, like=like)
    return Differentiated(
        graph=graph,
        devices=[where[node] for node in graph.nodes] if where else [context] * graph.num_nodes,
        num_outputs=len(heads),
        head_grads=gradients.heads,
        wanted=wanted,
        arguments=arguments,
        states=states,
        requests=requests,
        joined=joined,
        passes=passes,
        given=order[1],
        forward=sized,
    )


def _cast(gradient: Entry, name: str, dtype: DType) -> Entry:
    """The gradient of argument ``name`` in another dtype."""
    op = registry.get("Cast")
    attrs = {"dtype": dtype.name, **{key: gradient.node.attrs[key] for key in INHERITED if key in gradient.node.attrs}}
    params = registry.parse_params(op, {"dtype": dtype.name})
    return Entry(Node(op, f"{name}_grad_{dtype.name}", attrs=attrs, params=params, inputs=[gradient]))


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


def _home(
    variable: Node, default: Context, group2ctx: Mapping[str, Context], variable_contexts: Mapping[str, Context]
) -> Context:
    """Where the array of an argument's gradient is."""
    if variable.name in variable_contexts:
        return variable_contexts[variable.name]
    group = next((variable.attrs[key] for key in INHERITED if key in variable.attrs), None)
    return default if group is None else group2ctx.get(group, default)
