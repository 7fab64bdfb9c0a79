"""``symbol.plan``: compute the memory plan of a network before any allocation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
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
from weftplan.support.array_types import DTypeLike
from weftplan.symbol.node import Entry
from weftplan.symbol.symbol import Symbol

ORDERS = {"given": False, "best": True}
"""Values of ``order``: ``given`` keeps the order of the graph; ``best`` takes the order with the smallest peak."""


class HasStates(Protocol):
    """An optimizer that states the bytes of its state."""

    def kept_bytes(self, shape: Shape, dtype: DType) -> int:
        """Return the bytes of the optimizer state for a weight of this shape and dtype."""
        ...


def plan(
    symbol: Symbol | Sequence[Entry],
    shapes: Mapping[str, Shape] | None = None,
    *,
    train: bool = True,
    grad_req: str | Mapping[str, str] | None = None,
    dtype: DTypeLike | Mapping[str, DTypeLike] | None = None,
    budget: int | str | None = None,
    strategy: str | None = None,
    order: str | None = None,
    recompute: str | None = None,
    workspaces: bool = True,
    context: Context | Sequence[Context] | None = None,
    group2ctx: Mapping[str, Context] | None = None,
    kvstore: object = "local",
    workers: int | None = None,
    optimizer: str | int | HasStates | None = None,
    options: PlanOptions | None = None,
    **more: object,
) -> MemoryPlan:
    """Return the memory plan of a symbol without allocating memory.

    Args:
        symbol: a Symbol, or its entries.
        shapes: shapes of inputs by name: enough of them that the rest can be inferred. They may also be keywords, as
            for ``simple_bind``: ``net.plan(data=(32, 784))``.
        train: whether to plan the backward part; if false, ``grad_req`` is ignored.
        grad_req: ``write``, ``add`` or ``null`` for all arguments, or a dictionary by name (missing: null). The default
            is ``Module``'s choice: arguments whose shape is not given and whose name does not end in ``label``.
            ``simple_bind`` writes the gradient of every argument by default; ``"write"`` plans that.
        dtype: one dtype for all variables named in ``shapes``, or dtypes by name; float32 is the default.
            Without the package ml_dtypes ``bfloat16`` is planned as float16, which takes the same bytes.
        budget: maximum bytes of everything together (:attr:`MemoryPlan.total`), such as ``"2GB"``, or ``"80%"`` of the
            memory of the device. If needed, forward results are recomputed in the backward part, at the least cost of
            time. With several devices that have separate memories it is the budget of each.
        strategy: ``auto``, ``arena``, ``match_range`` or ``none`` (:class:`PlanOptions`).
        order: ``best`` lets the planner choose the execution order; ``given`` keeps the order of the graph.
        recompute: ``off``, ``mxnet``, ``echo``, ``sqrt`` or ``cheap``; a budget takes precedence.
        workspaces: whether to count the scratch memory of operators.
        context: the device, ``cpu(0)`` by default. A list plans the training of ``Module(symbol, context=[…])``: the
            batch is split over the devices, and the total includes the bytes of the other devices, of the kvstore and
            of Module's copies on the host. The plan itself is that of the device with the largest part of the batch.
        group2ctx: device of each ``ctx_group`` attribute.
        kvstore: kvstore that exchanges gradients between devices, as for ``fit``; a store of several processes also
            counts for a list of one device.
        workers: number of processes on one host that share such a store; required for a name outside a job. The plan
            is that of the process that needs the most bytes.
        optimizer: adds the optimizer state of each parameter that has a gradient: a name such as ``"adam"``, an
            optimizer, or the number of arrays per parameter.
        options: the options; by default those of the environment.
        more: shapes by name, and other fields of :class:`PlanOptions`.

    Raises:
        ShapeError, DTypeError: a size is impossible, contradictory or cannot be inferred; the message names the
            argument and an operator.
        PlanError: the graph is malformed, an option is illegal or a name is unknown.
        BudgetError: no plan fits the budget; the message names the smallest budget found that works.

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
    shapes_by_name, overrides = _sorted_out(symbol, shapes or {}, more)
    chosen = (PlanOptions.from_environment() if options is None else options).replace(**overrides)
    if order is not None and order not in ORDERS:
        raise PlanError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
    named = {"strategy": strategy, "recompute": recompute, "reorder": None if order is None else ORDERS[order]}
    named = {name: value for name, value in named.items() if value is not None}
    chosen = chosen.replace(workspaces=workspaces and chosen.workspaces, **named)
    dtypes, notes = _dtypes(dtype, shapes_by_name)
    question = Question(
        symbol,
        shapes_by_name,
        dtypes,
        "null" if not train else parameters_only(symbol, shapes_by_name) if grad_req is None else grad_req,
        group2ctx,
        chosen,
        slots.PLAN_OPTIMIZER.get()(optimizer) if isinstance(optimizer, str) else optimizer,
        kvstore,
        workers,
    )
    several = isinstance(context, Sequence) and not isinstance(context, str)
    contexts: list[Any] = list(context) if isinstance(context, Sequence) and several else [context]
    contexts = [Context("cpu", 0)] if contexts == [None] and not several else contexts
    if (
        not contexts
        or not all(isinstance(parameter, Context) for parameter in contexts)
        or len(set(contexts)) != len(contexts)
    ):
        raise PlanError(
            f"context must be a context such as mx.cpu(0) or mx.gpu(0), or a list of different ones, got {context!r}"
        )

    def again(*, batch: int | None = None, budget: int | str | None = None) -> MemoryPlan:
        changed_question = question if batch is None else replace(question, shapes=with_batch(question.shapes, batch))
        limit = None if budget is None else bytes_of(budget, contexts[0])
        memory = (
            slots.PLAN_ON_SEVERAL.get()(changed_question, contexts, limit)
            if several
            else changed_question.on_one(contexts[0], limit)
        )
        return replace(memory, again=again, notes=(*notes, *memory.notes))

    return again(budget=budget)


@dataclass(frozen=True, slots=True)
class Question:
    """The validated arguments of :func:`plan`, without devices and budget.

    ``weftplan.training.memory`` plans a Module on several devices, by one query per device.
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
        """Return the graph with sizes for a device."""
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
        """Return the plan of one executor, with its optimizer state, in at most ``budget`` bytes."""

        def states(planned: PlannedGraph) -> int:
            return sum(state for _, _, state in trained_sizes(planned, self.shapes, optimizer=self.optimizer).values())

        planned = self.within(context, budget, besides=states)
        persistent = {} if self.optimizer is None else {"optimizer_states": states(planned)}
        external = {**planned.memory.external_bytes, **persistent}
        return replace(planned.memory, external_bytes=external, input_bytes=self.input_bytes(planned))

    def input_bytes(self, planned: PlannedGraph) -> int:
        """Return the bytes of the arguments that are inputs, not parameters."""
        sizes, row = planned.memory.entry_nbytes, planned.graph.row
        inputs = [nid for name, nid in planned.arguments.items() if nid >= 0 and not is_parameter(name, self.shapes)]
        return sum(int(sizes[row[nid]]) for nid in inputs)

    def within(
        self, context: Context, budget: int | None, *, besides: Callable[[PlannedGraph], int] = lambda planned: 0
    ) -> PlannedGraph:
        """Return the plan of one executor; its bytes plus those that ``besides`` returns are at most ``budget``."""
        sized = self.sized(context)
        planned = (
            sized.plan() if budget is None else plan_within(sized.plan, self.options, budget=budget, besides=besides)
        )
        return replace(planned, memory=replace(planned.memory, pass_seconds=sized.seconds))


def parameters_only(
    symbol: Symbol | Sequence[Entry], shapes: Mapping[str, Shape], *, inputs: bool = False
) -> str | dict[str, str]:
    """Return ``Module``'s grad_req: ``write`` for parameters, ``null`` for inputs (arguments with a shape, and labels).

    Args:
        symbol: a Symbol, or entries, whose arguments all get a gradient.
        shapes: shapes of the inputs by name.
        inputs: whether inputs also get a gradient.
    """
    if inputs or not isinstance(symbol, Symbol):
        return "write"
    return {name: "write" if is_parameter(name, shapes) else "null" for name in symbol.list_arguments()}


def is_parameter(name: str, shapes: Mapping[str, Shape]) -> bool:
    """Return whether an argument is a parameter: it has no shape in ``shapes`` and is no label."""
    return name not in shapes and not name.endswith("label")


def _sorted_out(
    symbol: Symbol | Sequence[Entry], shapes: Mapping[str, Shape], more: Mapping[str, object]
) -> tuple[dict[str, Shape], dict[str, object]]:
    """Divide the keywords ``more`` into shapes and options; return (all shapes by name, plan options).

    Raises:
        PlanError: a keyword is neither, or the symbol has no argument of the name of a shape.
    """
    inputs: list[str] = []
    if isinstance(symbol, Symbol):
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
    shapes_by_name: dict[str, Any] = dict(shapes)  # planning checks the values
    overrides = {}
    for name, value in more.items():
        if name in inputs:
            if name in shapes_by_name:
                raise PlanError(f"the shape of {name!r} is given twice, among the shapes and by keyword")
            shapes_by_name[name] = value
        elif name in options:
            overrides[name] = value
        else:
            hint = did_you_mean(name, [*OPTIONS, *inputs, *options])
            raise PlanError(
                f"plan has no option and the symbol no argument {name!r}; {hint}options: {', '.join(OPTIONS)}; "
                f"arguments: {_some(inputs)}"
            )
    return shapes_by_name, overrides


def _some(names: Sequence[str]) -> str:
    """Return the first eight names as text."""
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


OPTIONS = tuple(
    name for name, parameter in signature(plan).parameters.items() if parameter.kind is parameter.KEYWORD_ONLY
)
"""Names of the keyword-only parameters of :func:`plan`."""


def _dtypes(
    dtype: DTypeLike | Mapping[str, DTypeLike] | None, shapes: Mapping[str, Shape]
) -> tuple[dict[str, DType], tuple[str, ...]]:
    """Return (dtypes by name, notes). Without ml_dtypes bfloat16 becomes float16, which has the same size and rules."""
    named = dict(dtype) if isinstance(dtype, Mapping) else {} if dtype is None else dict.fromkeys(shapes, dtype)
    notes: tuple[str, ...] = ()
    if "bfloat16" in named.values() and importlib.util.find_spec("ml_dtypes") is None:
        named = {name: "float16" if value == "bfloat16" else value for name, value in named.items()}
        notes = (
            "bfloat16 is planned as float16, which takes the same bytes; running it needs the package ml_dtypes: "
            "pip install ml_dtypes",
        )
    dtypes: dict[str, DType] = {}
    for name, value in named.items():
        try:
            if value is not None:
                dtypes[name] = p_dtype(value)
        except ValueError as error:
            raise PlanError(f"the dtype of {name!r} is {value!r}: {error}") from None
    return dtypes, notes


def trained_sizes(
    planned: PlannedGraph, shapes: Mapping[str, Shape], *, optimizer: int | HasStates | None
) -> dict[str, tuple[int, int, int]]:
    """Return (elements, bytes, bytes of optimizer state) of each parameter that has a gradient, by name.

    Raises:
        PlanError: ``optimizer`` is neither an optimizer nor a number of arrays.
    """
    if isinstance(optimizer, bool) or not (
        optimizer is None or (isinstance(optimizer, int) and optimizer >= 0) or hasattr(optimizer, "kept_bytes")
    ):
        raise PlanError(
            f"optimizer must be a name, an optimizer or a number of arrays per parameter, got {optimizer!r}"
        )
    sizes = {}
    for name, e in planned.gradients.items():
        if name in shapes or planned.grad_req[name] == Req.NULL:
            continue
        nbytes = int(planned.memory.entry_nbytes[e])
        if optimizer is None:
            state = 0
        else:
            facts = planned.shapes[e], planned.dtypes[e]
            state = optimizer * nbytes if isinstance(optimizer, int) else optimizer.kept_bytes(*facts)
        sizes[name] = (prod(planned.shapes[e]), nbytes, state)
    return sizes


slots.PLAN_SYMBOL.fill(plan)
