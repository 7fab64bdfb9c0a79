"""``symbol.plan``: one call that says how many bytes a network needs, before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from weftplan.device.context import Context
from weftplan.errors import PlanError, did_you_mean
from weftplan.ops.schema import Req, Shape
from weftplan.planner.budget import plan_within
from weftplan.planner.memory_plan import MemoryPlan, PlannedGraph
from weftplan.planner.options import PlanOptions
from weftplan.planner.pipeline import size_symbol
from weftplan.planner.recompute import parse_bytes

ORDERS = {"given": False, "best": True}
"""Values of ``order``: as the graph is written, or the order with the smallest peak that was found."""


class HasStates(Protocol):
    """An optimizer, as far as memory is concerned."""

    def state_bytes(self, weight_nbytes: int) -> int:
        """Bytes of state of a weight that has this many bytes."""
        ...


def plan(
    symbol: Any,
    shapes: Mapping[str, Shape],
    *,
    train: bool = True,
    grad_req: str | Mapping[str, str] = "write",
    dtypes: Any = None,
    budget: int | str | None = None,
    strategy: str | None = None,
    order: str | None = None,
    recompute: str | None = None,
    workspaces: bool = True,
    context: Context | None = None,
    group2ctx: Mapping[str, Context] | None = None,
    optimizer_states: int | HasStates | None = None,
    options: PlanOptions | None = None,
    **overrides: Any,
) -> MemoryPlan:
    """The memory plan of a symbol: how many bytes, where, and why. Nothing is allocated.

    Args:
        symbol: a Symbol, or its entries.
        shapes: shapes of inputs by name: enough of them that the rest can be inferred.
        train: with the backward part; without it ``grad_req`` is ignored.
        grad_req: ``write``, ``add`` or ``null`` for all arguments, or a dictionary by name (missing: null).
        dtypes: dtypes by name, or one dtype for all variables named in ``shapes``; what nothing says is float32.
        budget: most bytes that everything together may take (:attr:`MemoryPlan.total`), such as ``"2GB"``; forward
            results are computed again in the backward part where that is needed to fit, for the least time.
        strategy: ``auto``, ``arena``, ``match_range`` or ``none`` (:class:`PlanOptions`).
        order: ``best`` lets the planner choose the order of execution, ``given`` forbids it.
        recompute: ``off``, ``mxnet``, ``echo``, ``sqrt`` or ``cheap``; a budget wins over it.
        workspaces: count the scratch memory of operators.
        context: the device, ``cpu(0)`` by default.
        group2ctx: device of each ``ctx_group`` attribute.
        optimizer_states: what the optimizer keeps for each parameter (an argument with a gradient whose shape was not
            given): a number of arrays like it (momentum: 1, Adam: 2), or an optimizer, which knows.
        options: how to plan; default: from the environment.
        overrides: other fields of :class:`PlanOptions`.

    Raises:
        ShapeError, DTypeError: a size is impossible, contradictory or cannot be inferred; names argument and operator.
        PlanError: the graph is malformed, an option illegal or a name unknown.
        BudgetError: nothing fits the budget; names the smallest that works.

    >>> from weftplan import symbol as sym
    >>> net = sym.exp(sym.tanh(sym.Variable("x")))
    >>> found = plan(net, {"x": (1000,)}, train=False)
    >>> found.peak, found.lower_bound, found.total
    (4032, 4000, 8032)
    >>> plan(net, {"x": (1000,)}, train=False, budget="1 KB")
    Traceback (most recent call last):
    ...
    weftplan.errors.BudgetError: the budget is 1,000 bytes, but 4,000 bytes of arguments, gradients and states and a \
planned peak of 4,032 bytes (of 4,032 without recomputation) are needed; the smallest budget found that works is 8032: \
raise it to that, or use a smaller batch
    """
    chosen = (PlanOptions.from_environment() if options is None else options).replace(**overrides)
    chosen = chosen.replace(workspaces=workspaces and chosen.workspaces, **_chosen(strategy, order, recompute))
    _check_names(symbol, shapes)

    sized = size_symbol(
        symbol,
        shapes,
        _dtypes(dtypes, shapes),
        grad_req=grad_req if train else "null",
        context=context,
        group2ctx=group2ctx,
        options=chosen,
    )

    def states(planned: PlannedGraph) -> int:
        return _state_bytes(planned, shapes, optimizer_states)

    if budget is None:
        planned = sized.plan()
    else:
        planned = plan_within(sized.plan, chosen, parse_bytes(budget), besides=states)
    if optimizer_states is None:
        return planned.memory
    return replace(
        planned.memory, external_bytes={**planned.memory.external_bytes, "optimizer_states": states(planned)}
    )


def _chosen(strategy: str | None, order: str | None, recompute: str | None) -> dict[str, Any]:
    """The options that were named."""
    if order is not None and order not in ORDERS:
        raise PlanError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
    named = {"strategy": strategy, "recompute": recompute, "reorder": None if order is None else ORDERS[order]}
    return {name: value for name, value in named.items() if value is not None}


def _check_names(symbol: Any, shapes: Mapping[str, Shape]) -> None:
    """Refuse shapes of variables that the symbol does not have; only a Symbol can say which it has."""
    if not hasattr(symbol, "list_arguments"):
        return
    known = [*symbol.list_arguments(), *symbol.list_auxiliary_states()]
    for name in shapes:
        if name not in known:
            hint = did_you_mean(name, known)
            some = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
            raise PlanError(f"a shape is given for {name!r}, which is no argument of the symbol; {hint}it has: {some}")


def _dtypes(dtypes: Any, shapes: Mapping[str, Shape]) -> Mapping[str, Any]:
    if dtypes is None:
        return {}
    return dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(shapes, dtypes)


def _state_bytes(planned: PlannedGraph, shapes: Mapping[str, Shape], states: int | HasStates | None) -> int:
    """Bytes that the optimizer keeps for all parameters."""
    if states is None:
        return 0
    sizes = [
        int(planned.memory.entry_nbytes[e])
        for name, e in planned.gradients.items()
        if name not in shapes and planned.grad_req[name] != Req.NULL
    ]
    if isinstance(states, bool) or (isinstance(states, int) and states < 0):
        raise PlanError(f"optimizer_states must be a number of arrays per parameter or an optimizer, got {states!r}")
    if isinstance(states, int):
        return states * sum(sizes)
    if not hasattr(states, "state_bytes"):
        raise PlanError(f"optimizer_states must be a number of arrays per parameter or an optimizer, got {states!r}")
    return sum(states.state_bytes(size) for size in sizes)
