"""``symbol.plan``: one call that says how many bytes a network needs, before anything is allocated."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from math import prod
from typing import Any, Protocol

from weftplan.device.amounts import bytes_of
from weftplan.device.context import Context
from weftplan.errors import PlanError, did_you_mean
from weftplan.ops.core.params import p_dtype
from weftplan.ops.core.schema import DType, Req, Shape
from weftplan.planner.batch import with_batch
from weftplan.planner.drafts import plan_within
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.options import PlanOptions
from weftplan.planner.symbolic.pipeline import PlannedGraph, SizedGraph, size_symbol
from weftplan.support import slots

ORDERS = {"given": False, "best": True}
"""Values of ``order``: as the graph is written, or the order with the smallest peak that was found."""


class HasStates(Protocol):
    """An optimizer, as far as memory is concerned."""

    def kept_bytes(self, shape: Shape, dtype: DType) -> int:
        """Bytes of everything that it keeps for a weight of this shape and dtype."""
        ...


def plan(
    symbol: Any,
    shapes: Mapping[str, Shape] | None = None,
    *,
    train: bool = True,
    grad_req: str | Mapping[str, str] | None = None,
    dtype: Any = None,
    budget: int | str | None = None,
    strategy: str | None = None,
    order: str | None = None,
    recompute: str | None = None,
    workspaces: bool = True,
    context: Context | Sequence[Context] | None = None,
    group2ctx: Mapping[str, Context] | None = None,
    kvstore: Any = "local",
    workers: int | None = None,
    optimizer: str | int | HasStates | None = None,
    options: PlanOptions | None = None,
    **more: Any,
) -> MemoryPlan:
    """The memory plan of a symbol: how many bytes, where, and why. Nothing is allocated.

    Args:
        symbol: a Symbol, or its entries.
        shapes: shapes of inputs by name: enough of them that the rest can be inferred. They may also be given as
            keywords, as for ``simple_bind``: ``net.plan(data=(32, 784))``.
        train: with the backward part; without it ``grad_req`` is ignored.
        grad_req: ``write``, ``add`` or ``null`` for all arguments, or a dictionary by name (missing: null). The default
            is ``Module``'s choice: arguments whose shape is not given and whose name does not end in ``label``.
            ``simple_bind`` writes the gradient of every argument by default; ``"write"`` plans that.
        dtype: one dtype for all variables named in ``shapes``, or dtypes by name; float32 is the default.
            Without the package ml_dtypes ``bfloat16`` is planned as float16, which takes the same bytes.
        budget: most bytes that everything together may take (:attr:`MemoryPlan.total`), such as ``"2GB"``, or ``"80%"``
            of the memory of the device; forward results are computed again in the backward part if that is needed
            to fit, for the least time. With several devices that have memory of their own it is the budget of each.
        strategy: ``auto``, ``arena``, ``match_range`` or ``none`` (:class:`PlanOptions`).
        order: ``best`` lets the planner choose the order of execution, ``given`` forbids it.
        recompute: ``off``, ``mxnet``, ``echo``, ``sqrt`` or ``cheap``; a budget wins over it.
        workspaces: count the scratch memory of operators.
        context: the device, ``cpu(0)`` by default. A list plans what ``Module(symbol, context=[…])`` trains: the batch
            is split over the devices, and the total also holds what the other devices, the kvstore and Module's copies
            on the host take. The plan itself is that of one device, which has the largest part of the batch.
        group2ctx: device of each ``ctx_group`` attribute.
        kvstore: how several devices exchange gradients, as for ``fit``; a store of several processes counts with a
            list of one device, too.
        workers: how many processes on one host share such a store; needed for a name outside of a job. The plan is that
            of the process that holds most.
        optimizer: counts what the optimizer keeps for each parameter that has a gradient: a name such as ``"adam"``,
            an optimizer, or a number of arrays like the parameter.
        options: how to plan; default: from the environment.
        more: shapes by name, and other fields of :class:`PlanOptions`.

    Raises:
        ShapeError, DTypeError: a size is impossible, contradictory or cannot be inferred; names argument and operator.
        PlanError: the graph is malformed, an option illegal or a name unknown.
        BudgetError: nothing fits the budget; names the smallest that works.

    >>> from weftplan import symbol as sym
    >>> net = sym.exp(sym.tanh(sym.Variable("x")))
    >>> found = plan(net, x=(1000,), train=False)
    >>> found.peak, found.lower_bound, found.total
    (4032, 4000, 8032)
    >>> plan(net, x=(1000,), train=False, budget="1 KB")
    Traceback (most recent call last):
    ...
    weftplan.errors.BudgetError: the budget is 1,000 bytes, but 4,000 bytes of arguments, gradients and states and a \
planned peak of 4,032 bytes (of 4,032 without recomputation) are needed; the smallest budget found that works is 8032 \
(7.84 KiB): raise it to that, or use a smaller batch
    """
    known, overrides = _sorted_out(symbol, shapes or {}, more)
    chosen = (PlanOptions.from_environment() if options is None else options).replace(**overrides)
    if order is not None and order not in ORDERS:
        raise PlanError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
    named = {"strategy": strategy, "recompute": recompute, "reorder": None if order is None else ORDERS[order]}
    named = {name: value for name, value in named.items() if value is not None}
    chosen = chosen.replace(workspaces=workspaces and chosen.workspaces, **named)
    dtypes, notes = _dtypes(dtype, known)
    question = Question(
        symbol,
        known,
        dtypes,
        "null" if not train else parameters_only(symbol, known) if grad_req is None else grad_req,
        group2ctx,
        chosen,
        slots.PLAN_OPTIMIZER.get()(optimizer) if isinstance(optimizer, str) else optimizer,
        kvstore,
        workers,
    )
    several = isinstance(context, Sequence) and not isinstance(context, str)
    contexts: list[Any] = list(context) if isinstance(context, Sequence) and several else [context]
    contexts = [Context("cpu", 0)] if contexts == [None] and not several else contexts
    if not contexts or not all(isinstance(one, Context) for one in contexts) or len(set(contexts)) != len(contexts):
        raise PlanError(
            f"context must be a context such as mx.cpu(0) or mx.gpu(0), or a list of different ones, got {context!r}"
        )

    def again(*, batch: int | None = None, budget: int | str | None = None) -> MemoryPlan:
        asked = question if batch is None else replace(question, shapes=with_batch(question.shapes, batch))
        limit = None if budget is None else bytes_of(budget, contexts[0])
        memory = slots.PLAN_ON_SEVERAL.get()(asked, contexts, limit) if several else asked.on_one(contexts[0], limit)
        return replace(memory, again=again, notes=(*notes, *memory.notes))

    return again(budget=budget)


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the planner, checked and complete, but for devices and a budget.

    What Module holds on several devices is planned in ``weftplan.training.memory``, which asks for one after the other.
    """

    symbol: Any
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, Any]
    grad_req: str | Mapping[str, str]
    group2ctx: Mapping[str, Context] | None
    options: PlanOptions
    optimizer: int | HasStates | None
    kvstore: Any
    workers: int | None = None

    def sized(self, context: Context) -> SizedGraph:
        """The graph with sizes."""
        return size_symbol(
            self.symbol,
            self.shapes,
            self.dtypes,
            grad_req=self.grad_req,
            context=context,
            group2ctx=self.group2ctx,
            options=self.options,
        )

    def on_one(self, context: Context, budget: int | None) -> MemoryPlan:
        """The plan of one executor, with the states of its optimizer."""

        def states(planned: PlannedGraph) -> int:
            return sum(state for _, _, state in trained_sizes(planned, self.shapes, optimizer=self.optimizer).values())

        planned = self.within(context, budget, besides=states)
        kept = {} if self.optimizer is None else {"optimizer_states": states(planned)}
        external = {**planned.memory.external_bytes, **kept}
        return replace(planned.memory, external_bytes=external, input_bytes=self.input_bytes(planned))

    def input_bytes(self, planned: PlannedGraph) -> int:
        """Return the bytes of the arguments that are no parameters."""
        sizes, row = planned.memory.entry_nbytes, planned.graph.row
        inputs = [nid for name, nid in planned.arguments.items() if nid >= 0 and not is_parameter(name, self.shapes)]
        return sum(int(sizes[row[nid]]) for nid in inputs)

    def within(self, context: Context, budget: int | None, *, besides: Any = lambda planned: 0) -> PlannedGraph:
        """Return the plan of one executor in at most ``budget`` bytes, with the bytes ``besides`` it."""
        sized = self.sized(context)
        planned = (
            sized.plan() if budget is None else plan_within(sized.plan, self.options, budget=budget, besides=besides)
        )
        return replace(planned, memory=replace(planned.memory, pass_seconds=sized.seconds))


def parameters_only(symbol: Any, shapes: Mapping[str, Shape], *, inputs: bool = False) -> str | dict[str, str]:
    """Requests as ``Module`` has them: a gradient for every argument but the inputs (those with a shape, and labels).

    Args:
        symbol: a Symbol; of mere entries every argument has a gradient.
        shapes: those that were given.
        inputs: gradients of the inputs too.
    """
    if inputs or not hasattr(symbol, "list_arguments"):
        return "write"
    return {name: "write" if is_parameter(name, shapes) else "null" for name in symbol.list_arguments()}


def is_parameter(name: str, shapes: Mapping[str, Shape]) -> bool:
    return name not in shapes and not name.endswith("label")


def _sorted_out(
    symbol: Any, shapes: Mapping[str, Shape], more: Mapping[str, Any]
) -> tuple[dict[str, Shape], dict[str, Any]]:
    """(shapes by name, plan options) among the keywords.

    Raises:
        PlanError: a keyword is neither, or a shape is given for a name that the symbol does not have.
    """
    inputs: list[str] = []
    if hasattr(symbol, "list_arguments"):
        inputs = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
        for name in shapes:
            if name not in inputs:
                hint = did_you_mean(name, inputs)
                raise PlanError(
                    f"a shape is given for {name!r}, which is no argument of the symbol; {hint}it has: {_some(inputs)}"
                )
    options = [field.name for field in fields(PlanOptions)]
    for name, value in (*shapes.items(), *more.items()):
        if name in inputs and hasattr(value, "shape"):
            raise PlanError(f"the shape of {name!r} is given as an array of shape {value.shape}: give that shape")
    known, overrides = dict(shapes), {}
    for name, value in more.items():
        if name in inputs:
            if name in known:
                raise PlanError(f"the shape of {name!r} is given twice, among the shapes and by keyword")
            known[name] = value
        elif name in options:
            overrides[name] = value
        else:
            hint = did_you_mean(name, [*OPTIONS, *inputs, *options])
            raise PlanError(
                f"plan has no option and the symbol no argument {name!r}; {hint}options: {', '.join(OPTIONS)}; "
                f"arguments: {_some(inputs)}"
            )
    return known, overrides


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


OPTIONS = tuple(name for name, one in signature(plan).parameters.items() if one.kind is one.KEYWORD_ONLY)
"""Keywords of :func:`plan` that are no shapes."""


def _dtypes(dtype: Any, shapes: Mapping[str, Shape]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(dtypes by name, notes). Without ml_dtypes bfloat16 gets the plan of float16, whose size and rules it has."""
    named = dict(dtype) if isinstance(dtype, Mapping) else {} if dtype is None else dict.fromkeys(shapes, dtype)
    notes: tuple[str, ...] = ()
    if "bfloat16" in named.values() and importlib.util.find_spec("ml_dtypes") is None:
        named = {name: "float16" if value == "bfloat16" else value for name, value in named.items()}
        notes = (
            "bfloat16 is planned as float16, which takes the same bytes; running it needs the package ml_dtypes: "
            "pip install ml_dtypes",
        )
    for name, value in named.items():
        try:
            named[name] = None if value is None else p_dtype(value)
        except ValueError as error:
            raise PlanError(f"the dtype of {name!r} is {value!r}: {error}") from None
    return {name: value for name, value in named.items() if value is not None}, notes


def trained_sizes(
    planned: PlannedGraph, known: Mapping[str, Shape], *, optimizer: int | HasStates | None
) -> dict[str, tuple[int, int, int]]:
    """(elements, bytes, bytes of optimizer state) of each parameter that has a gradient."""
    if isinstance(optimizer, bool) or not (
        optimizer is None or (isinstance(optimizer, int) and optimizer >= 0) or hasattr(optimizer, "kept_bytes")
    ):
        raise PlanError(
            f"optimizer must be a name, an optimizer or a number of arrays per parameter, got {optimizer!r}"
        )
    sizes = {}
    for name, e in planned.gradients.items():
        if name in known or planned.grad_req[name] == Req.NULL:
            continue
        nbytes = int(planned.memory.entry_nbytes[e])
        if optimizer is None:
            state = 0
        else:
            facts = planned.shapes[e], planned.dtypes[e]
            state = optimizer * nbytes if isinstance(optimizer, int) else optimizer.kept_bytes(*facts)
        sizes[name] = (prod(planned.shapes[e]), nbytes, state)
    return sizes
