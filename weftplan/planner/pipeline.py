"""From a symbol to a planned graph: the passes in their order.

1. merge common sub-expressions; 2. add gradients; 3. place nodes on devices, with copies; 4. number the graph;
5. infer shapes and dtypes; 6. choose the order; 7. plan memory;
8. where asked for, repeat forward nodes in the backward part, or send results to the host, and plan again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops import registry
from weftplan.ops.schema import DType, Req, Shape
from weftplan.planner import recompute, spill
from weftplan.planner.draft import Draft, plan_graph
from weftplan.planner.graph import IndexedGraph
from weftplan.planner.inplace import Assignment, Kind
from weftplan.planner.liveness import PlacedGraph, placed_graph
from weftplan.planner.memory_plan import PlannedGraph
from weftplan.planner.options import GRAD_REQS, PlanOptions, read_grad_req
from weftplan.planner.paddle import breadth_first
from weftplan.planner.passes.cse import eliminate
from weftplan.planner.passes.gradient import INHERITED, Gradients, add_gradients
from weftplan.planner.passes.infer import byte_sizes, complete_graph
from weftplan.planner.passes.order import choose_order
from weftplan.planner.passes.place import place
from weftplan.planner.workspace import operator_choices, operator_workspaces
from weftplan.symbol import placeholder
from weftplan.symbol.node import Entry, Node
from weftplan.symbol.traversal import depth_first_order, split_variables


def plan_symbol(
    symbol: Any,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, Any] | None = None,
    *,
    grad_req: str | Mapping[str, str] = "null",
    context: Context | None = None,
    group2ctx: Mapping[str, Context] | None = None,
    variable_contexts: Mapping[str, Context] | None = None,
    options: PlanOptions | None = None,
    mirror: Callable[[Node], bool] | None = None,
    seconds: Mapping[str, float] | None = None,
) -> PlannedGraph:
    """Plan a symbol (or a sequence of entries) without allocating anything.

    Args:
        symbol: a Symbol, or its entries.
        shapes: shapes of variables by name: enough of them that the rest can be inferred.
        dtypes: dtypes by name; what cannot be inferred is float32.
        grad_req: ``null``, ``write`` or ``add`` for every argument, or a dictionary by name (missing: null).
        context: the device, ``cpu(0)`` by default.
        group2ctx: device of each ``ctx_group`` attribute.
        variable_contexts: devices of the caller's arrays by variable name (with their gradients); wins over groups.
        options: how to plan; default: from the environment.
        mirror: forward nodes for which it is true are computed again for the backward part.
        seconds: measured times of nodes by name, for choosing what to recompute; other nodes are modelled.

    Raises:
        PlanError: the graph is cyclic or malformed, not differentiable, or an option is illegal.
        ShapeError, DTypeError: something conflicts or cannot be inferred.
        BindError: a group has no device.
        UnknownOperatorError: the graph needs operators that weftplan does not have; names all of them.
    """
    sized = size_symbol(
        symbol,
        shapes,
        dtypes,
        grad_req=grad_req,
        context=context,
        group2ctx=group2ctx,
        variable_contexts=variable_contexts,
        options=options,
        mirror=mirror,
    )
    return sized.plan(seconds=seconds)


def size_symbol(
    symbol: Any,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, Any] | None = None,
    *,
    grad_req: str | Mapping[str, str] = "null",
    grad_dtypes: Mapping[str, Any] | None = None,
    context: Context | None = None,
    group2ctx: Mapping[str, Context] | None = None,
    variable_contexts: Mapping[str, Context] | None = None,
    options: PlanOptions | None = None,
    mirror: Callable[[Node], bool] | None = None,
) -> SizedGraph:
    """The first half of :func:`plan_symbol`, whose arguments it takes: everything but memory.

    ``grad_dtypes`` holds the dtypes of gradients that are not to have their argument's.
    """
    chosen = PlanOptions.from_environment() if options is None else options
    heads: list[Entry] = list(getattr(symbol, "entries", symbol))
    if not heads:
        raise PlanError("there is nothing to plan: the symbol has no outputs")
    ends = _differentiate(heads, grad_req, chosen, mirror)
    for position, name in enumerate(ends.wanted):
        if grad_dtypes and name in grad_dtypes:
            ends.gradients[position] = _cast(ends.gradients[position], name, np.dtype(grad_dtypes[name]))
    default = Context("cpu", 0) if context is None else context
    graph, devices = _placed(ends, default, group2ctx or {}, variable_contexts or {})
    facts, num_forward = _collected(ends, graph, devices, shapes, dtypes or {}, chosen.kernels)
    if chosen.compat == "paddle":
        facts = replace(facts, order=breadth_first(facts, num_forward))
    return SizedGraph(ends, facts, num_forward, chosen, mirrored=mirror is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """A differentiated graph: where it begins and where it ends."""

    heads: list[Entry]
    gradients: list[Entry]
    head_grads: list[Node]
    wanted: list[str]
    """Arguments whose gradients these are."""
    arguments: dict[str, Node]
    states: dict[str, Node]
    requests: dict[str, Req]
    notes: tuple[str, ...]


class SizedGraph:
    """A symbol differentiated, placed and sized: what has to be known before memory is planned, under any budget.

    Attributes:
        facts: the graph with sizes, in the order in which it is written.
        num_forward: how many steps of it are the forward part.
        options: how to plan.
    """

    def __init__(
        self, ends: _Ends, facts: PlacedGraph, num_forward: int, options: PlanOptions, *, mirrored: bool = False
    ) -> None:
        self.facts = facts
        self.num_forward = num_forward
        self.options = options
        self._ends = ends
        self._mirrored = mirrored
        self._drafts: dict[PlanOptions, Draft] = {}

    def plan(self, options: PlanOptions | None = None, *, seconds: Mapping[str, float] | None = None) -> PlannedGraph:
        """The graph with its plan.

        Args:
            options: how to plan memory; default: as the graph was sized. What shapes the graph itself
                (:attr:`PlanOptions.eliminate_common_expr`, :attr:`PlanOptions.compat`, …) must be as it was there.
            seconds: measured times of nodes by name, for choosing what to recompute; other nodes are modelled.
        """
        chosen = self.options if options is None else options
        draft = self._draft(chosen)
        notes = [*self._ends.notes, *draft.notes]
        if not self._mirrored and recompute.wanted(chosen, self.facts):
            step = spill.apply if spill.wanted(chosen, draft) else recompute.apply
            fitted = step(replace(draft, notes=()), chosen, measured=seconds)
            notes.extend(fitted.notes)
            draft = fitted
        return self._finished(draft, chosen, tuple(notes))

    def _draft(self, options: PlanOptions) -> Draft:
        """The plan without recomputation; kept, since a budget asks for it again."""
        plain = options.replace(recompute="off", budget=None)
        found = self._drafts.get(plain)
        if found is None:
            found = self._drafts[plain] = self._ordered(plain)
        return found

    def _ordered(self, options: PlanOptions) -> Draft:
        facts, num_forward = self.facts, self.num_forward
        draft = plan_graph(facts, num_forward, options)
        peak = draft.memory.peak
        if not options.reorder or not peak:
            return draft
        better = replace(facts, order=choose_order(facts, num_forward, options))
        if better.order is facts.order:
            return draft
        moved = plan_graph(better, num_forward, options)
        if moved.memory.peak >= peak:
            return draft
        note = f"another order of execution lowers the peak from {peak} to {moved.memory.peak} bytes"
        return replace(moved, notes=(note,))

    def _finished(self, draft: Draft, options: PlanOptions, notes: tuple[str, ...]) -> PlannedGraph:
        # Recomputation and spills make other graphs.
        ends, facts, found = self._ends, draft.facts, draft.assignment
        graph = facts.graph
        outputs = graph.outputs[: len(ends.heads)].tolist()
        gradients = dict(zip(ends.wanted, graph.outputs[len(ends.heads) :].tolist(), strict=True))
        devices = [facts.contexts[index] for index in facts.device]
        kernels = operator_choices(graph, facts.shapes, facts.dtypes, devices, options.kernels)
        return PlannedGraph(
            graph=graph,
            order=facts.order,
            num_forward_nodes=draft.num_forward,
            shapes=facts.shapes,
            dtypes=facts.dtypes,
            devices=devices,
            requests=_entry_requests(found, {e: ends.requests[name] for name, e in gradients.items()}),
            skipped=frozenset(found.skipped),
            outputs=outputs,
            gradients=gradients,
            grad_req=ends.requests,
            head_grads=[graph.nid.get(variable, -1) for variable in ends.head_grads] or [-1] * len(outputs),
            arguments={name: graph.nid.get(node, -1) for name, node in ends.arguments.items()},
            aux={name: graph.nid.get(node, -1) for name, node in ends.states.items()},
            memory=replace(
                draft.memory,
                options=options,
                outputs=tuple(outputs),
                num_forward=draft.num_forward,
                notes=notes,
                kernels={graph.nodes[nid].name: choice.text for nid, choice in kernels.items() if choice.several},
            ),
            notes=notes,
            kernels=kernels,
        )


def _differentiate(
    heads: list[Entry],
    grad_req: str | Mapping[str, str],
    options: PlanOptions,
    mirror: Callable[[Node], bool] | None,
) -> _Ends:
    """Merge what computes the same, and add the gradients that somebody wants."""
    order, _ = depth_first_order((entry.node for entry in heads), PlanError)
    placeholder.require_known(order, "plan")
    arguments, states = _variables(order)
    requests = _requests(grad_req, arguments)
    notes: tuple[str, ...] = ()
    if options.eliminate_common_expr:
        heads, removed = eliminate(heads, order)
        if removed:
            notes = (f"merged {removed} node(s) that compute the same as others",)
    wanted = [name for name in arguments if requests[name] != Req.NULL]
    gradients = Gradients([], [])
    if wanted:
        gradients = add_gradients(
            heads,
            [arguments[name] for name in wanted],
            sum_cap=options.inplace_grad_sum_cap,
            accumulated={arguments[name] for name in wanted if requests[name] == Req.ADD},
            mirror=mirror,
            like_mxnet=options.compat == "mxnet",
        )
    return _Ends(
        heads=heads,
        gradients=gradients.entries,
        head_grads=gradients.heads,
        wanted=wanted,
        arguments=arguments,
        states=states,
        requests=requests,
        notes=notes,
    )


def _cast(gradient: Entry, name: str, dtype: DType) -> Entry:
    """The gradient of argument ``name`` in another dtype."""
    op = registry.get("Cast")
    attrs = {"dtype": dtype.name, **{key: gradient.node.attrs[key] for key in INHERITED if key in gradient.node.attrs}}
    params = registry.parse_params(op, {"dtype": dtype.name})
    return Entry(Node(op, f"{name}_grad_{dtype.name}", attrs=attrs, params=params, inputs=[gradient]))


def _placed(
    ends: _Ends,
    default: Context,
    group2ctx: Mapping[str, Context],
    variable_contexts: Mapping[str, Context],
) -> tuple[IndexedGraph, list[Context]]:
    """The numbered graph, with copies between devices, and the device of each node."""
    entries = [*ends.heads, *ends.gradients]
    if not group2ctx and not variable_contexts:
        graph = IndexedGraph(entries)
        return graph, [default] * graph.num_nodes
    first = len(ends.heads)
    homes = {
        first + i: _home(ends.arguments[name], default, group2ctx, variable_contexts)
        for i, name in enumerate(ends.wanted)
    }
    added = {first + i for i, name in enumerate(ends.wanted) if ends.requests[name] == Req.ADD}
    entries, where = place(entries, default, group2ctx, variable_contexts, homes, added)
    graph = IndexedGraph(entries)
    return graph, [where[node] for node in graph.nodes]


def _collected(
    ends: _Ends,
    graph: IndexedGraph,
    devices: Sequence[Context],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, Any],
    kernels: str,
) -> tuple[PlacedGraph, int]:
    """Sizes and what operators declare, and the number of forward steps."""
    outputs = graph.outputs[: len(ends.heads)].tolist()
    gradients = graph.outputs[len(ends.heads) :].tolist()
    sizes = complete_graph(graph, outputs, ends.head_grads, shapes, dtypes)
    elements, nbytes = byte_sizes(graph, *sizes)
    steps = np.flatnonzero(~graph.is_variable).tolist()
    contexts = tuple(dict.fromkeys(devices))
    number = {ctx: i for i, ctx in enumerate(contexts)}
    brought = {
        "arguments": [graph.row[graph.nid[n]] for n in ends.arguments.values() if n in graph.nid],
        "gradients": gradients,
        "aux": [graph.row[graph.nid[n]] for n in ends.states.values() if n in graph.nid],
        "head_grads": [graph.row[graph.nid[n]] for n in ends.head_grads if n in graph.nid],
    }
    facts = placed_graph(
        graph,
        steps,
        shapes=sizes[0],
        dtypes=sizes[1],
        elements=elements,
        nbytes=nbytes,
        contexts=contexts,
        device=[number[ctx] for ctx in devices],
        gradients=gradients,
        added=frozenset(e for e, name in zip(gradients, ends.wanted, strict=True) if ends.requests[name] == Req.ADD),
        workspaces=operator_workspaces(graph, *sizes, devices, operator_choices(graph, *sizes, devices, kernels)),
        external_bytes={purpose: int(nbytes[entries].sum()) for purpose, entries in brought.items()},
    )
    return facts, bisect_left(steps, max(int(graph.entry_node[e]) for e in outputs) + 1)


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


def _entry_requests(found: Assignment, gradients: Mapping[int, Req]) -> list[Req]:
    by_kind = {Kind.INPLACE: Req.INPLACE, Kind.ADDTO: Req.ADD, Kind.UNUSED: Req.NULL}
    table = [by_kind.get(kind, Req.WRITE) for kind in Kind]
    requests = [table[kind] for kind in found.kind]
    for eid, req in gradients.items():
        requests[eid] = req
    return requests
