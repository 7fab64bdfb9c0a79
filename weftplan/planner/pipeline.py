"""From a symbol to a planned graph: the passes in their order.

1. merge common sub-expressions; 2. add gradients; 3. place nodes on devices, with copies; 4. number the graph;
5. infer shapes and dtypes; 6. choose the order; 7. plan memory;
8. where asked for, repeat forward nodes in the backward part, or send results to the host, and plan again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import PlanError
from weftplan.ops.schema import DType, Req, Shape
from weftplan.planner import recompute, spill
from weftplan.planner.graph import IndexedGraph, IntArray, depth_first_order
from weftplan.planner.inplace import Assignment
from weftplan.planner.liveness import collect
from weftplan.planner.options import PlanOptions
from weftplan.planner.outcome import planned
from weftplan.planner.paddle import breadth_first
from weftplan.planner.passes.cse import eliminate
from weftplan.planner.passes.gradient import INHERITED, Gradients, add_gradients
from weftplan.planner.passes.infer import byte_sizes, complete_dtypes, complete_shapes
from weftplan.planner.passes.order import choose_order
from weftplan.planner.passes.place import place
from weftplan.planner.plan import Kind, PlannedGraph
from weftplan.planner.workspace import operator_choices, operator_workspaces
from weftplan.symbol.node import Entry, Node

GRAD_REQS = {"null": Req.NULL, "write": Req.WRITE, "add": Req.ADD}


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
    """
    chosen = PlanOptions.from_environment() if options is None else options
    like_mxnet = chosen.compat == "mxnet"
    default = Context("cpu", 0) if context is None else context
    heads: list[Entry] = list(getattr(symbol, "entries", symbol))
    if not heads:
        raise PlanError("there is nothing to plan: the symbol has no outputs")
    order, _ = depth_first_order(entry.node for entry in heads)
    arguments, states = _variables(order)
    reqs = _requests(grad_req, arguments)
    notes: list[str] = []

    if chosen.eliminate_common_expr:
        heads, removed = eliminate(heads, order)
        if removed:
            notes.append(f"merged {removed} node(s) that compute the same as others")
    wanted = [name for name in arguments if reqs[name] != Req.NULL]
    gradients = Gradients([], [])
    if wanted:
        gradients = add_gradients(
            heads,
            [arguments[name] for name in wanted],
            sum_cap=chosen.inplace_grad_sum_cap,
            accumulated={arguments[name] for name in wanted if reqs[name] == Req.ADD},
            mirror=mirror,
            like_mxnet=like_mxnet,
        )
    entries = [*heads, *gradients.entries]
    if group2ctx or variable_contexts:
        homes = {
            len(heads) + i: _home(arguments[name], default, group2ctx or {}, variable_contexts or {})
            for i, name in enumerate(wanted)
        }
        added = {len(heads) + i for i, name in enumerate(wanted) if reqs[name] == Req.ADD}
        entries, placed = place(entries, default, group2ctx or {}, variable_contexts or {}, homes, added)
        graph = IndexedGraph(entries)
        devices = [placed[node] for node in graph.nodes]
    else:
        graph = IndexedGraph(entries)
        devices = [default] * graph.num_nodes

    outputs = graph.outputs[: len(heads)].tolist()
    sizes = _infer(graph, outputs, gradients.heads, shapes, dtypes or {})
    elements, nbytes = byte_sizes(graph, *sizes)
    gradient_ids = graph.outputs[len(heads) :].tolist()
    boundary = max(int(graph.entry_node[e]) for e in outputs) + 1
    steps = np.flatnonzero(~graph.is_variable).tolist()
    forward = bisect_left(steps, boundary)
    contexts = tuple(dict.fromkeys(devices))
    number = {ctx: i for i, ctx in enumerate(contexts)}
    facts = collect(
        graph,
        steps,
        sizes[0],
        sizes[1],
        elements,
        nbytes,
        contexts,
        [number[ctx] for ctx in devices],
        gradient_ids,
        frozenset(e for e, name in zip(gradient_ids, wanted, strict=True) if reqs[name] == Req.ADD),
        operator_workspaces(graph, *sizes, operator_choices(graph, *sizes, devices, chosen.kernels)),
        {
            "arguments": _total(nbytes, (graph.row[graph.nid[n]] for n in arguments.values() if n in graph.nid)),
            "gradients": _total(nbytes, gradient_ids),
            "aux": _total(nbytes, (graph.row[graph.nid[n]] for n in states.values() if n in graph.nid)),
            "head_grads": _total(nbytes, (graph.row[graph.nid[n]] for n in gradients.heads if n in graph.nid)),
        },
    )
    if chosen.compat == "paddle":
        facts = replace(facts, order=breadth_first(facts, forward))
    outcome = planned(facts, forward, chosen)
    peak = outcome.memory.peak
    if chosen.reorder and peak:
        better = replace(facts, order=choose_order(facts, forward, chosen))
        if better.order is not facts.order:
            moved = planned(better, forward, chosen)
            if moved.memory.peak < peak:
                notes.append(f"another order of execution lowers the peak from {peak} to {moved.memory.peak} bytes")
                outcome = moved
    if mirror is None and recompute.wanted(chosen, facts):
        step = spill.apply if spill.wanted(chosen, outcome) else recompute.apply
        outcome = step(outcome, chosen, measured=seconds)
        notes.extend(outcome.notes)
    # Recomputation and spills make other graphs.
    facts, found = outcome.facts, outcome.found
    graph = facts.graph
    outputs = graph.outputs[: len(heads)].tolist()
    gradient_of = dict(zip(wanted, graph.outputs[len(heads) :].tolist(), strict=True))
    places = [facts.contexts[index] for index in facts.device]
    kernels = operator_choices(graph, facts.shapes, facts.dtypes, places, chosen.kernels)
    return PlannedGraph(
        graph=graph,
        order=facts.order,
        num_forward_nodes=outcome.num_forward,
        shapes=facts.shapes,
        dtypes=facts.dtypes,
        devices=places,
        requests=_entry_requests(found, {e: reqs[name] for name, e in gradient_of.items()}),
        skipped=frozenset(found.skipped),
        outputs=outputs,
        gradients=gradient_of,
        grad_req=reqs,
        head_grads=[graph.nid.get(variable, -1) for variable in gradients.heads] or [-1] * len(heads),
        arguments={name: graph.nid.get(node, -1) for name, node in arguments.items()},
        aux={name: graph.nid.get(node, -1) for name, node in states.items()},
        memory=replace(
            outcome.memory,
            outputs=tuple(outputs),
            num_forward=outcome.num_forward,
            notes=tuple(notes),
            kernels={graph.nodes[nid].name: choice.text for nid, choice in kernels.items() if choice.several},
        ),
        notes=tuple(notes),
        kernels=kernels,
    )


def _total(nbytes: IntArray, entries: Iterable[int]) -> int:
    return int(nbytes[list(entries)].sum())


def _variables(order: Sequence[Node]) -> tuple[dict[str, Node], dict[str, Node]]:
    """(arguments, auxiliary states) by name, in MXNet's order."""
    written = {node.inputs[i].node for node in order if node.op is not None for i in node.op.aux}
    arguments: dict[str, Node] = {}
    states: dict[str, Node] = {}
    for node in order:
        if node.op is None:
            if node.name in arguments or node.name in states:
                raise PlanError(f"two different variables are called {node.name!r}: rename one of them")
            (states if node in written else arguments)[node.name] = node
    return arguments, states


def _requests(grad_req: str | Mapping[str, str], arguments: Mapping[str, Node]) -> dict[str, Req]:
    if isinstance(grad_req, str):
        given: Mapping[str, str] = dict.fromkeys(arguments, grad_req)
    else:
        given = grad_req
        unknown = [name for name in given if name not in arguments and given[name] != "null"]
        if unknown:
            raise PlanError(f"grad_req names {unknown[0]!r}, which is no argument; the arguments are {list(arguments)}")
    reqs = {}
    for name in arguments:
        text = given.get(name, "null")
        if text not in GRAD_REQS:
            raise PlanError(f"grad_req of {name!r} must be one of {', '.join(GRAD_REQS)}; got {text!r}")
        reqs[name] = GRAD_REQS[text]
    return reqs


def _home(
    variable: Node, default: Context, group2ctx: Mapping[str, Context], variable_contexts: Mapping[str, Context]
) -> Context:
    """Where the array of an argument's gradient is."""
    if variable.name in variable_contexts:
        return variable_contexts[variable.name]
    group = next((variable.attrs[key] for key in INHERITED if key in variable.attrs), None)
    return default if group is None else group2ctx.get(group, default)


def _infer(
    graph: IndexedGraph,
    heads: Sequence[int],
    head_grads: Sequence[Node],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, Any],
) -> tuple[list[Shape], list[DType]]:
    """Shapes and dtypes of all entries: those of the forward part, whose ``heads`` are given, then those of the rest.

    Head gradients are like their outputs.
    """
    # Nodes are numbered from the heads on, so the forward part is the first nodes.
    forward = max(int(graph.entry_node[e]) for e in heads) + 1
    if forward == graph.num_nodes:
        return complete_shapes(graph, shapes), complete_dtypes(graph, dtypes)
    forward_shapes = complete_shapes(graph, shapes, stop=forward)
    forward_dtypes = complete_dtypes(graph, dtypes, stop=forward)
    known_shapes: dict[Any, Any] = dict(shapes)
    known_dtypes: dict[Any, Any] = dict(dtypes)
    for e, variable in zip(heads, head_grads, strict=True):
        known_shapes[variable] = forward_shapes[e]
        known_dtypes[variable] = forward_dtypes[e]
    return (
        complete_shapes(graph, known_shapes, settled=forward_shapes),
        complete_dtypes(graph, known_dtypes, settled=forward_dtypes),
    )


def _entry_requests(found: Assignment, gradients: Mapping[int, Req]) -> list[Req]:
    by_kind = {Kind.INPLACE: Req.INPLACE, Kind.ADDTO: Req.ADD, Kind.UNUSED: Req.NULL}
    table = [by_kind.get(kind, Req.WRITE) for kind in Kind]
    requests = [table[kind] for kind in found.kind]
    for eid, req in gradients.items():
        requests[eid] = req
    return requests
