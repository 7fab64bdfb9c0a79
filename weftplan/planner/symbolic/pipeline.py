"""From a symbol to a planned graph, in three parts: differentiate and place; size; plan and rewrite.

The first is ``differentiate.py``. The second infers shapes and dtypes and asks operators what they declare. The third
is the core's (``drafts.py``), which knows no symbol; what it rewrote becomes nodes again in ``realise.py``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from typing import Any

from weftplan.device.context import Context
from weftplan.errors import BudgetError
from weftplan.ops.core.implementations import Choice
from weftplan.ops.core.schema import DType, Req, Shape
from weftplan.ops.fusion.depthwise_block import BLOCK
from weftplan.planner.drafts import Drafts
from weftplan.planner.options import PlanOptions
from weftplan.planner.paddle import breadth_first
from weftplan.planner.planned_steps import PlannedSteps, planned_steps
from weftplan.planner.program import Program
from weftplan.planner.recompute import Cost
from weftplan.planner.strategies import Draft
from weftplan.planner.symbolic.chaining import with_chains, with_depthwise_blocks
from weftplan.planner.symbolic.cost import node_seconds
from weftplan.planner.symbolic.differentiate import Differentiated, differentiate
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.infer import byte_sizes, complete_graph
from weftplan.planner.symbolic.kernels import operator_choices
from weftplan.planner.symbolic.passes.report import dropped, notes_of
from weftplan.planner.symbolic.realise import realised
from weftplan.symbol.traversal import Order

RULES = ("mxnet", "echo")
"""Values of :attr:`PlanOptions.recompute` that name operators to repeat."""
RULE_SHARE = 0.025
"""In a graph with fused blocks such a rule spends at most this part of a step's modelled time on repeating, beside the
results that are made again: MobileNet then keeps 0.95 of its speed and more."""
WORTH_A_FORM = 0.99
"""Another form of a graph is used if its plan is below this part of the smallest plan so far."""


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
    size = partial(_size, differentiated, shapes=shapes, dtypes=dtypes or {})
    options = PlanOptions.from_environment() if options is None else options
    sized = size(options)
    if sized.differentiated.has(BLOCK):
        sized.variants.append(partial(size, options, rematerializes=True))
    if sized.differentiated.joined:
        sized.variants.append(partial(size, options.replace(fusion=False)))
    return sized


def _size(
    differentiated: Callable[[PlanOptions], Differentiated],
    options: PlanOptions,
    *,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, Any],
    rematerializes: bool = False,
) -> SizedGraph:
    found, program, choices = _sized(
        differentiated(options), shapes, dtypes, options=options, rematerializes=rematerializes
    )
    if options.compat == "paddle":
        program = program.in_order(breadth_first(program))
    return SizedGraph(found, program, options, choices, rematerializes)


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
    rematerializes: bool = False
    """Whether the backward part makes results of fused blocks again from what their gradients keep."""
    variants: list[Callable[[], SizedGraph]] = field(default_factory=list)
    """Each sizes the same symbol in another form, from which recomputation may start: with results of fused blocks
    made again, and without fused nodes, of which a part can then be repeated."""

    def plan(self, options: PlanOptions | None = None, *, seconds: Mapping[str, float] | None = None) -> PlannedGraph:
        """The graph with its plan; ``seconds`` as for :func:`plan_symbol`.

        The options are by default those with which the graph was sized. What shapes the graph itself
        (:attr:`PlanOptions.eliminate_common_expr`, :attr:`PlanOptions.compat`, …) must be as it was there.
        """
        chosen = self.options if options is None else options
        if chosen.peers:  # what computes is no home
            here = [str(context) for context in self.program.contexts]
            chosen = chosen.replace(peers=tuple(peer for peer in chosen.peers if peer not in here))
        cost = partial(node_seconds, measured=seconds)
        if not self.variants or not self._searches(chosen):
            return self._planned(self._draft(chosen, cost), chosen)
        forms = [self, *self._variants]
        best = _smallest if chosen.budget is None else _fastest
        form, draft = best(forms, chosen, cost)
        if form is not self:
            usual = sum(cost(self.program))
            draft = draft.slowed(sum(cost(draft.program)) / usual - 1.0 if usual else 0.0)
        return form._planned(draft, chosen)

    def _draft(self, chosen: PlanOptions, cost: Cost) -> Draft:
        """The plan of this form of the graph."""
        # Rules name operators, not parts of fused ones: what they would repeat of a block is made again already.
        most_time = RULE_SHARE if self.rematerializes and chosen.recompute in RULES else None
        return self._drafts.plan(chosen, cost=cost, most_time=most_time)

    def _planned(self, draft: Draft, chosen: PlanOptions) -> PlannedGraph:
        """A draft of this form of the graph, with everything that an executor needs."""
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
    def _variants(self) -> list[SizedGraph]:
        return [size() for size in self.variants]


def _smallest(forms: Sequence[SizedGraph], options: PlanOptions, cost: Cost) -> tuple[SizedGraph, Draft]:
    """The form with the smallest plan. One further down the list, which costs more time, must be worth it."""
    drafts = [form._draft(options, cost) for form in forms]
    best = 0
    for place, draft in enumerate(drafts):
        if draft.memory.peak < WORTH_A_FORM * drafts[best].memory.peak:
            best = place
    return forms[best], drafts[best]


def _fastest(forms: Sequence[SizedGraph], options: PlanOptions, cost: Cost) -> tuple[SizedGraph, Draft]:
    """The form whose plan fits the budget in the least modelled time.

    Raises:
        BudgetError: none fits; the message names the smallest budget found that works.
    """
    assert options.budget is not None
    found: list[tuple[float, int, Draft]] = []
    errors: list[BudgetError] = []
    for place, form in enumerate(forms):
        if form.rematerializes and form._drafts.plain(options).memory.peak <= options.budget:
            return form, form._draft(options, cost)  # one sweep for each block, less than any search finds
        try:
            draft = form._draft(options, cost)
        except BudgetError as error:
            errors.append(error)
        else:
            found.append((sum(cost(draft.program)), place, draft))
    if not found:
        raise min(errors, key=lambda error: error.smallest or inf)
    _, place, draft = min(found, key=lambda one: one[:2])
    return forms[place], draft


def _sized(
    found: Differentiated,
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, Any],
    *,
    options: PlanOptions,
    rematerializes: bool,
) -> tuple[Differentiated, Program, dict[int, Choice]]:
    """The graph with chains of large elementwise nodes as one, sizes and what operators declare, and who computes each
    node."""
    inferred, types = complete_graph(
        found.graph, found.outputs, head_grads=found.head_grads, shapes=shapes, dtypes=dtypes, begun=found.forward
    )
    if options.fusion and options.compat == "none":
        found, inferred, types = with_depthwise_blocks(
            found, shapes=inferred, dtypes=types, mode=options.kernels, rematerializes=rematerializes
        )
        found, inferred, types = with_chains(found, shapes=inferred, dtypes=types)
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
