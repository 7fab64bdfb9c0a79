"""The pipeline from a symbol to a planned graph: translate, run passes, query operators, plan.

``network.py`` translates the symbol to a numbered graph, and ``passes`` rewrites it and infers sizes. Then operators
declare their scratch and implementations. The core (``drafts.py``), which knows no symbols, plans and rewrites the
graph; ``network.py`` turns the result back into nodes. For recomputation, several forms of the graph are planned, with
and without fusion, and the best plan is taken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf, prod

from weftplan import config
from weftplan.device.amounts import amount, counted
from weftplan.device.context import Context
from weftplan.errors import BudgetError, ShapeError
from weftplan.ops.core.implementations import KernelChoice
from weftplan.ops.core.schema import DType, Req, Shape
from weftplan.planner.drafts import Drafts, PlannedSteps, planned_steps
from weftplan.planner.memory_plan import MemoryPlan, PassReport
from weftplan.planner.options import PlanOptions
from weftplan.planner.paddle import breadth_first
from weftplan.planner.program import Program
from weftplan.planner.recompute import Cost
from weftplan.planner.storage_assignment import Kind
from weftplan.planner.strategies import Draft
from weftplan.planner.symbolic.indexed_graph import IndexedGraph
from weftplan.planner.symbolic.network import Network, realised, translated
from weftplan.planner.symbolic.node_scratch import library_bytes, operator_choices
from weftplan.planner.symbolic.node_seconds import node_seconds
from weftplan.planner.symbolic.passes import fuse_depthwise
from weftplan.planner.symbolic.passes.graph_pass import FUSION, PassSettings
from weftplan.planner.symbolic.passes.pass_manager import notes_of, run_passes
from weftplan.support.array_types import DTypeLike
from weftplan.symbol.node import Entry, Order
from weftplan.symbol.symbol import Symbol

MAX_BYTES = (1 << 63) - 1
RULES = ("mxnet", "echo")
"""Values of :attr:`PlanOptions.recompute` that select nodes by operator."""
RULE_SHARE = 0.025
"""Maximum share of a step's modelled time that such a rule spends on recomputation in a graph with rematerialized
blocks, in addition to their rematerialization; MobileNet then keeps at least 0.95 of its speed."""
WORTH_A_FORM = 0.99
"""Ratio: another form of a graph is used only if its plan is below this multiple of the smallest plan so far."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedGraph(PlannedSteps):
    """A graph that an executor can run: order, shapes, devices, write modes and memory."""

    graph: IndexedGraph
    """The graph; its outputs are the forward outputs, then one gradient entry per argument in :attr:`gradients`."""
    grad_req: dict[str, Req]
    """Argument name -> NULL, WRITE or ADD; :attr:`gradients` contains the arguments that are not NULL."""
    head_grads: list[int]
    """Node id of variable ``_head_grad_<i>`` for each output; -1 if no gradient reads it."""
    arguments: dict[str, int]
    """Argument name -> node id of the variable, in ``list_arguments`` order; -1 if the graph does not use it."""
    aux: dict[str, int]
    """Auxiliary state name -> node id of the variable, in ``list_auxiliary_states`` order."""
    kernels: Mapping[int, KernelChoice] = field(default_factory=dict)
    """Node id -> its implementation; nodes with only one implementation and no scratch may be absent."""

    def variables(self) -> dict[str, tuple[Shape, DType]]:
        """Return the shape and dtype of each argument and auxiliary state, by name."""
        rows = {name: self.graph.row[nid] for name, nid in (self.arguments | self.aux).items()}
        return {name: (self.shapes[e], self.dtypes[e]) for name, e in rows.items()}


def plan_symbol(
    symbol: Symbol | Sequence[Entry],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, DTypeLike] | None = None,
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
        dtypes: dtypes by name; float32 if nothing else is inferred.
        grad_req: ``null``, ``write`` or ``add`` for every argument, or a dictionary by name (missing: null).
        context: the device, ``cpu(0)`` by default.
        group2ctx: device of each ``ctx_group`` attribute.
        variable_contexts: devices of the caller's arrays and their gradients by variable name; they take precedence
            over groups.
        options: the options; by default those of the environment.
        seconds: measured seconds of nodes by name, for recomputation; the seconds of other nodes are modelled.

    Raises:
        PlanError: the graph is cyclic, malformed or not differentiable, or an option is illegal.
        ShapeError, DTypeError: shapes or dtypes conflict or cannot be inferred.
        BindError: a group has no device.
        UnknownOperatorError: the graph needs operators that weftplan does not have; the message names all of them.
    """
    sized = size_symbol(
        symbol, shapes, dtypes, grad_req=grad_req, context=context, group2ctx=group2ctx,
        variable_contexts=variable_contexts, options=options,
    )  # fmt: skip
    return sized.plan(seconds=seconds)


def size_symbol(
    symbol: Symbol | Sequence[Entry],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, DTypeLike] | None = None,
    *,
    grad_req: str | Mapping[str, str] = "null",
    grad_dtypes: Mapping[str, DTypeLike] | None = None,
    context: Context | None = None,
    group2ctx: Mapping[str, Context] | None = None,
    variable_contexts: Mapping[str, Context] | None = None,
    options: PlanOptions | None = None,
    order: Order | None = None,
) -> SizedGraph:
    """Run the first half of :func:`plan_symbol`: all steps before memory planning.

    Args:
        symbol, shapes, dtypes, grad_req, context, group2ctx, variable_contexts, options: as in :func:`plan_symbol`.
        grad_dtypes: dtypes of gradients that differ from the dtype of their argument, by name.
        order: the depth-first order of the symbol, if the caller has computed it.
    """
    settings = PassSettings(
        options=PlanOptions.from_environment() if options is None else options,
        context=context or Context("cpu", 0),
        shapes=shapes,
        dtypes=dtypes or {},
        grad_dtypes=grad_dtypes or {},
        group2ctx=group2ctx or {},
        variable_contexts=variable_contexts or {},
    )
    network = translated(symbol, grad_req=grad_req, context=settings.context, order=order)
    sized = _size(network, settings)
    fusions = [report.name for report in sized.network.reports if report.changed and report.switch == FUSION]
    if fuse_depthwise.PASS.name in fusions:
        sized.variants.append(lambda: _size(network, replace(settings, rematerializes=True)))
    if fusions:
        sized.variants.append(lambda: _size(network, replace(settings, options=settings.options.replace(fusion=False))))
    return sized


def _size(network: Network, settings: PassSettings) -> SizedGraph:
    """Run the passes and query the operators' declarations."""
    seconds: dict[str, float] = {}
    network = run_passes(network, settings, checked=bool(config.get("WEFTPLAN_ENGINE_DEBUG")), seconds=seconds)
    program, choices = _program(network, settings.options)
    if settings.options.compat == "paddle":
        program = program.in_order(breadth_first(program))
    return SizedGraph(network, program, settings, choices, seconds)


@dataclass(eq=False)
class SizedGraph:
    """A differentiated, placed and sized graph of a symbol: the input of memory planning under any budget."""

    network: Network
    """The graph after all passes."""
    program: Program
    """The graph with sizes, in the order of the symbol."""
    settings: PassSettings
    """The caller's arguments."""
    choices: dict[int, KernelChoice]
    """The implementation of each node."""
    seconds: dict[str, float]
    """Processor time of each pass, by name."""
    variants: list[Callable[[], SizedGraph]] = field(default_factory=list)
    """Functions that size the same symbol in another form, for recomputation: with rematerialized results of fused
    blocks, and without fusion, so that single members can be recomputed."""

    def plan(self, options: PlanOptions | None = None, *, seconds: Mapping[str, float] | None = None) -> PlannedGraph:
        """Return the planned graph.

        Args:
            options: the options; by default those with which the graph was sized. Options that change the graph itself
                (:attr:`PlanOptions.eliminate_common_expr`, :attr:`PlanOptions.compat`, …) must have the same values.
            seconds: as for :func:`plan_symbol`.
        """
        chosen = self.settings.options if options is None else options
        if chosen.peers:  # a device that computes is no offload target
            contexts = [str(context) for context in self.program.contexts]
            chosen = chosen.replace(peers=tuple(peer for peer in chosen.peers if peer not in contexts))
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
        """Plan this form of the graph."""
        # The results of fused blocks are rematerialized in any case, and a rule does not see the members of a block. So
        # the rule may spend only a small share of the step on recomputation of its own.
        max_time = RULE_SHARE if self.settings.rematerializes and chosen.recompute in RULES else None
        return self._drafts.plan(chosen, cost=cost, max_time=max_time)

    def _planned(self, draft: Draft, chosen: PlanOptions) -> PlannedGraph:
        """Return the planned graph of a draft of this form."""
        network = self.network
        graph = realised(network.graph, draft.program.graph)
        outputs = graph.outputs[: network.num_outputs]
        gradients = dict(zip(network.wanted, graph.outputs[network.num_outputs :], strict=True))
        steps = planned_steps(draft, outputs, gradients=gradients)
        kernels, options = self.choices, self.settings.options
        if graph is not network.graph or (chosen.kernels, chosen.autotune) != (options.kernels, options.autotune):
            kernels, _ = operator_choices(
                graph, shapes=steps.shapes, dtypes=steps.dtypes, devices=steps.devices, options=chosen
            )
        memory = replace(
            steps.memory,
            options=chosen,
            outputs=tuple(outputs),
            num_forward=draft.program.num_forward,
            notes=(*notes_of(network.reports), *draft.notes),
            passes=(*network.reports, *dead_outputs(steps.memory, nbytes=draft.program.nbytes, options=chosen)),
            kernels={graph.names[nid]: choice.text for nid, choice in kernels.items() if choice.several},
        )
        number = {origin: nid for nid, origin in enumerate(draft.program.graph.origin) if nid not in graph.again}
        number[-1] = -1  # stands for no node; copies, whose origin is -1, must not overwrite it
        return PlannedGraph(
            **{**vars(steps), "graph": graph, "memory": memory},
            grad_req=network.requests,
            head_grads=[number.get(nid, -1) for nid in network.head_grads] or [-1] * len(outputs),
            arguments={name: number[nid] for name, nid in network.arguments.items()},
            aux={name: number[nid] for name, nid in network.states.items()},
            kernels=kernels,
        )

    def _searches(self, options: PlanOptions) -> bool:
        """Return whether the plan may recompute: only then can another form of the graph be better."""
        if options.budget is None:
            return options.recompute != "off"
        return self._drafts.plain(options).memory.peak > options.budget

    @cached_property
    def _drafts(self) -> Drafts:
        """Plans of this form, cached."""
        return Drafts(self.program)

    @cached_property
    def _variants(self) -> list[SizedGraph]:
        """Other forms of the graph, sized on first use."""
        return [size() for size in self.variants]


def _smallest(forms: Sequence[SizedGraph], options: PlanOptions, cost: Cost) -> tuple[SizedGraph, Draft]:
    """Return the form with the smallest plan; a later form takes more time, so it must be smaller by `WORTH_A_FORM`."""
    drafts = [form._draft(options, cost) for form in forms]
    best = 0
    for position, draft in enumerate(drafts):
        if draft.memory.peak < WORTH_A_FORM * drafts[best].memory.peak:
            best = position
    return forms[best], drafts[best]


def _fastest(forms: Sequence[SizedGraph], options: PlanOptions, cost: Cost) -> tuple[SizedGraph, Draft]:
    """Return the form whose plan fits the budget in the least modelled time.

    Raises:
        BudgetError: no form fits; the message names the smallest budget found that works.
    """
    assert options.budget is not None
    fitting: list[tuple[float, int, Draft]] = []
    errors: list[BudgetError] = []
    for position, form in enumerate(forms):
        if form.settings.rematerializes and form._drafts.plain(options).memory.peak <= options.budget:
            return form, form._draft(options, cost)  # costs one sweep per block, less than any recomputation
        try:
            draft = form._draft(options, cost)
        except BudgetError as error:
            errors.append(error)
        else:
            fitting.append((sum(cost(draft.program)), position, draft))
    if not fitting:
        raise min(errors, key=lambda error: error.smallest or inf)
    _, position, draft = min(fitting, key=lambda candidate: candidate[:2])
    return forms[position], draft


def _program(network: Network, options: PlanOptions) -> tuple[Program, dict[int, KernelChoice]]:
    """Return the core's program with the operators' declarations, and the implementation of each node.

    Raises:
        ShapeError: all entries together exceed 2^63 - 1 bytes.
    """
    graph, shapes, dtypes = network.graph, list(network.shapes), list(network.dtypes)
    nbytes = [prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    if sum(nbytes) > MAX_BYTES:
        largest = max(range(len(nbytes)), key=nbytes.__getitem__)
        raise ShapeError(
            f"the graph needs {sum(nbytes)} bytes without sharing, more than 2^63 - 1; the largest entry is "
            f"{graph.entry_name(largest)!r}, shape {shapes[largest]}, {dtypes[largest]}"
        )
    choices, workspaces = operator_choices(
        graph, shapes=shapes, dtypes=dtypes, devices=network.devices, options=options
    )
    steps = [nid for nid, is_variable in enumerate(graph.is_variable) if not is_variable]
    default_device = network.devices[0]
    alike = network.devices.count(default_device) == len(network.devices)  # faster than hashing every device
    contexts = (default_device,) if alike else tuple(dict.fromkeys(network.devices))
    brought = {
        "arguments": [graph.row[nid] for nid in network.arguments.values() if nid >= 0],
        "gradients": network.gradients,
        "aux": [graph.row[nid] for nid in network.states.values() if nid >= 0],
        "head_grads": [graph.row[nid] for nid in network.head_grads if nid >= 0],
    }
    gradients = dict(zip(network.gradients, network.wanted, strict=True))
    program = Program(
        graph=graph,
        order=steps,
        num_forward=bisect_left(steps, network.num_forward),
        shapes=shapes,
        dtypes=dtypes,
        nbytes=nbytes,
        contexts=contexts,
        device=[contexts.index(ctx) for ctx in network.devices],
        gradients=frozenset(gradients),
        added=frozenset(e for e, name in gradients.items() if network.requests[name] == Req.ADD),
        workspaces=workspaces,
        external_bytes={
            **{purpose: sum(map(nbytes.__getitem__, entries)) for purpose, entries in brought.items()},
            **library_bytes(network, choices),
        },
    )
    return program, choices


def dead_outputs(memory: MemoryPlan, *, nbytes: Sequence[int], options: PlanOptions) -> tuple[PassReport, ...]:
    """Return a record of the outputs that the plan drops; empty if the options keep them.

    ``nbytes`` are the bytes of each entry.
    """
    if not options.drop_dead_outputs or options.compat == "mxnet":
        return ()
    dead = ((memory.entry_kind == int(Kind.UNUSED)) & (memory.entry_storage < 0)).nonzero()[0].tolist()
    size = sum(nbytes[e] for e in dead)
    changed = f"left out {counted(len(dead), 'output')} that nobody reads: {amount(size)}" if len(dead) else ""
    return (PassReport("dead outputs dropped", changed, "WEFTPLAN_DROP_DEAD_OUTPUTS"),)
