"""From a symbol to a planned graph, in three parts: differentiate and place; size; plan and rewrite.

The first is ``differentiate.py``. The second infers shapes and dtypes and asks operators what they declare. The third
is the core's (``drafts.py``), which knows no symbol; what it rewrote becomes nodes again in ``realise.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from typing import Any

from weftplan.device.context import Context
from weftplan.errors import BudgetError
from weftplan.ops.core.implementations import Choice
from weftplan.ops.core.schema import DType, Req, Shape
from weftplan.planner.drafts import Drafts
from weftplan.planner.options import PlanOptions
from weftplan.planner.paddle import breadth_first
from weftplan.planner.planned_steps import PlannedSteps, planned_steps
from weftplan.planner.program import Program
from weftplan.planner.symbolic.cost import node_seconds
from weftplan.planner.symbolic.depthwise_blocks import with_depthwise_blocks
from weftplan.planner.symbolic.differentiate import Differentiated, differentiate
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.infer import byte_sizes, complete_graph
from weftplan.planner.symbolic.kernels import operator_choices
from weftplan.planner.symbolic.passes.report import dropped, notes_of
from weftplan.planner.symbolic.realise import realised
from weftplan.symbol.traversal import Order


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedGraph(PlannedSteps):
    """A graph ready to execute: order, shapes, devices, requests and memory."""

    graph: IndexedGraph
    """Heads: the forward outputs, then one gradient entry per argument in :attr:`gradients`."""
    grad_req: dict[str, Req]
    """Argument name -> NULL, WRITE or ADD; :attr:`gradients` has those that are not NULL."""
    head_grads: list[int]
    """Per output the node id of variable ``_head_grad_<i>``, or -1 when no gradient reads it."""
    arguments: dict[str, int]
    """Argument name -> node id of the variable, in ``list_arguments`` order; -1 when the graph does not use it."""
    aux: dict[str, int]
    """Auxiliary state name -> node id of the variable, in ``list_auxiliary_states`` order."""
    kernels: Mapping[int, Choice] = field(default_factory=dict)
    """Node id -> which implementation computes it; nodes that have but one and need no scratch may be absent."""

    def variables(self) -> dict[str, tuple[Shape, DType]]:
        """Shape and dtype of each argument and auxiliary state."""
        rows = {name: self.graph.row[nid] for name, nid in (self.arguments | self.aux).items()}
        return {name: (self.shapes[e], self.dtypes[e]) for name, e in rows.items()}


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
        seconds: measured times of nodes by name, for choosing what to recompute; other nodes are modelled.

    Raises:
        PlanError: the graph is cyclic or malformed, not differentiable, or an option is illegal.
        ShapeError, DTypeError: something conflicts or cannot be inferred.
        BindError: a group has no device.
        UnknownOperatorError: the graph needs operators that weftplan does not have; names all of them.
    """
    sized = size_symbol(
        symbol, shapes, dtypes, grad_req=grad_req, context=context, group2ctx=group2ctx,
        variable_contexts=variable_contexts, options=options,
    )  # fmt: skip
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
    order: Order | None = None,
) -> SizedGraph:
    """The first half of :func:`plan_symbol`, whose arguments it takes: everything but memory.

    ``grad_dtypes`` holds the dtypes of gradients that are not to have their argument's, ``order`` is the depth-first
    order of the symbol, when the caller has it.
    """
    differentiated = partial(
        differentiate, symbol, shapes=shapes, dtypes=dtypes or {}, grad_req=grad_req, grad_dtypes=grad_dtypes or {},
        context=context or Context("cpu", 0), group2ctx=group2ctx or {}, variable_contexts=variable_contexts or {},
        order=order,
    )  # fmt: skip
    return _size(differentiated, PlanOptions.from_environment() if options is None else options, shapes, dtypes or {})


def _size(
    differentiated: Callable[[PlanOptions], Differentiated],
    options: PlanOptions,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, Any],
) -> SizedGraph:
    found, program, choices = _sized(differentiated(options), shapes, dtypes, options=options)
    if options.compat == "paddle":
        program = program.in_order(breadth_first(program))

    def apart() -> SizedGraph:
        return _size(differentiated, options.replace(fusion=False), shapes, dtypes)

    return SizedGraph(found, program, options, choices, apart if found.joined else None)


@dataclass(eq=False)
class SizedGraph:
    """A symbol differentiated, placed and sized: what has to be known before memory is planned, under any budget."""

    differentiated: Differentiated
    program: Program
    """The graph with sizes, in the order in which it is written."""
    options: PlanOptions
    """How to plan."""
    choices: dict[int, Choice]
    """Who computes each node."""
    size_apart: Callable[[], SizedGraph] | None
    """Makes the same without joined nodes (:attr:`PlanOptions.fusion`); None where none are."""

    def plan(self, options: PlanOptions | None = None, *, seconds: Mapping[str, float] | None = None) -> PlannedGraph:
        """The graph with its plan; ``seconds`` as for :func:`plan_symbol`.

        The options are by default those with which the graph was sized. What shapes the graph itself
        (:attr:`PlanOptions.eliminate_common_expr`, :attr:`PlanOptions.compat`, …) must be as it was there.
        """
        chosen = self.options if options is None else options
        if chosen.peers:  # what computes is no home
            here = [str(context) for context in self.program.contexts]
            chosen = chosen.replace(peers=tuple(peer for peer in chosen.peers if peer not in here))
        if self.size_apart is None or not self._searches(chosen):
            return self._planned(chosen, seconds)
        if chosen.budget is None:
            both = self._planned(chosen, seconds), self._apart.plan(chosen, seconds=seconds)
            return min(both, key=lambda planned: planned.memory.peak)
        try:
            return self._apart.plan(chosen, seconds=seconds)
        except BudgetError as error:
            try:
                return self._planned(chosen, seconds)
            except BudgetError as other:
                raise min(error, other, key=lambda raised: raised.smallest or inf) from None

    def _planned(self, chosen: PlanOptions, seconds: Mapping[str, float] | None) -> PlannedGraph:
        """The plan of this graph, with the pairs of nodes that it has joined."""
        draft = self._drafts.plan(chosen, cost=partial(node_seconds, measured=seconds))
        found = self.differentiated
        graph = realised(found.graph, draft.program.graph)
        outputs = graph.outputs[: found.num_outputs]
        wanted = zip(found.wanted, graph.outputs[found.num_outputs :], strict=True)
        steps = planned_steps(draft, outputs, gradients={name: (eid, found.requests[name]) for name, eid in wanted})
        kernels, options = self.choices, self.options
        if graph is not found.graph or (chosen.kernels, chosen.autotune) != (options.kernels, options.autotune):
            kernels, _ = operator_choices(
                graph, shapes=steps.shapes, dtypes=steps.dtypes, devices=steps.devices, options=chosen
            )
        passes = tuple(found.passes)
        if chosen.drop_dead_outputs and chosen.compat != "mxnet":
            passes = (*passes, dropped(steps.memory, draft.program.nbytes))
        memory = replace(
            steps.memory,
            options=chosen,
            outputs=tuple(outputs),
            num_forward=draft.program.num_forward,
            notes=(*notes_of(found.passes), *draft.notes),
            passes=passes,
            kernels={graph.names[nid]: choice.text for nid, choice in kernels.items() if choice.several},
        )
        return PlannedGraph(
            **{**vars(steps), "graph": graph, "memory": memory},
            grad_req=found.requests,
            head_grads=[graph.nid.get(variable, -1) for variable in found.head_grads] or [-1] * len(outputs),
            arguments={name: graph.nid.get(node, -1) for name, node in found.arguments.items()},
            aux={name: graph.nid.get(node, -1) for name, node in found.states.items()},
            kernels=kernels,
        )

    def _searches(self, options: PlanOptions) -> bool:
        """True where something may be computed again: a joined node can only be repeated, or kept, whole."""
        if options.budget is None:
            return options.recompute != "off"
        return self._drafts.plain(options).memory.peak > options.budget

    @cached_property
    def _drafts(self) -> Drafts:
        return Drafts(self.program)

    @cached_property
    def _apart(self) -> SizedGraph:
        assert self.size_apart is not None
        return self.size_apart()


def _sized(
    found: Differentiated, shapes: Mapping[str, Shape], dtypes: Mapping[str, Any], *, options: PlanOptions
) -> tuple[Differentiated, Program, dict[int, Choice]]:
    """Return the graph with depthwise blocks fused, its sizes and workspaces, and the implementation of each node."""
    inferred, types = complete_graph(
        found.graph, found.outputs, head_grads=found.head_grads, shapes=shapes, dtypes=dtypes, begun=found.forward
    )
    if options.fusion and options.compat == "none":
        found, inferred, types = with_depthwise_blocks(found, shapes=inferred, dtypes=types, mode=options.kernels)
    graph, devices = found.graph, found.devices
    outputs, gradients = found.outputs, found.gradients
    nbytes = byte_sizes(graph, shapes=inferred, dtypes=types)
    choices, workspaces = operator_choices(graph, shapes=inferred, dtypes=types, devices=devices, options=options)
    steps = [nid for nid, given in enumerate(graph.is_variable) if not given]
    contexts = tuple(dict.fromkeys(devices))
    brought = {
        "arguments": [graph.row[graph.nid[n]] for n in found.arguments.values() if n in graph.nid],
        "gradients": gradients,
        "aux": [graph.row[graph.nid[n]] for n in found.states.values() if n in graph.nid],
        "head_grads": [graph.row[graph.nid[n]] for n in found.head_grads if n in graph.nid],
    }
    program = Program(
        graph=graph,
        order=steps,
        num_forward=bisect_left(steps, max(graph.entry_node[e] for e in outputs) + 1),
        shapes=inferred,
        dtypes=types,
        nbytes=nbytes,
        contexts=contexts,
        device=[contexts.index(ctx) for ctx in devices],
        gradients=frozenset(gradients),
        added=frozenset(e for e, name in zip(gradients, found.wanted, strict=True) if found.requests[name] == Req.ADD),
        workspaces=workspaces,
        external_bytes={purpose: sum(nbytes[e] for e in entries) for purpose, entries in brought.items()},
    )
    return found, program, choices
