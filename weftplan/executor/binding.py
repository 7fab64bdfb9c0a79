"""``bind``, ``simple_bind`` and ``reshape``: from a symbol and arrays (or shapes) to an executor.

All three take the same steps: the arguments are checked (``bind_arguments.py``), the graph is planned
(``bound_symbol.py``), missing arrays are made (``new_arrays.py``), and the executor lays the plan into memory. So an
error is raised before anything is allocated, and the planner infers shapes and dtypes once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from weftplan.device.amounts import bytes_of
from weftplan.device.context import Context
from weftplan.errors import BindError, BudgetError, MXNetError, PlanError, own
from weftplan.executor.bind_arguments import (
    Arrays,
    GradReq,
    as_shape,
    check_context,
    collect,
    collect_gradients,
    collect_shapes,
    either,
    given_dtypes,
    names_of,
    normalize_grad_req,
)
from weftplan.executor.bound_symbol import Binding, facts_of, strategy_of
from weftplan.executor.dynamic import DynamicExecutor
from weftplan.executor.executor import Executor
from weftplan.executor.new_arrays import Groups, arrays_like, variable_contexts
from weftplan.ndarray import NDArray
from weftplan.planner import PlanOptions
from weftplan.support.array_types import DTypeLike
from weftplan.support.gc_pause import resting
from weftplan.symbol import Symbol


@resting
def bind(
    symbol: Symbol,
    /,
    ctx: Context,
    args: Arrays,
    args_grad: Arrays | None = None,
    grad_req: GradReq = "write",
    aux_states: Arrays | None = None,
    group2ctx: Groups = None,
    shared_exec: Executor | None = None,
    *,
    options: PlanOptions | None = None,
    plan_options: PlanOptions | None = None,
) -> Executor:
    """Bind ``symbol`` to arrays, which are used as they are, not copied.

    Args:
        ctx: default context of the operations.
        args: every argument, a list in ``list_arguments`` order or a dictionary.
        args_grad: gradient arrays, a list or a dictionary; an argument without one has ``grad_req`` null. One of
            another dtype than its argument gets the gradient cast to it.
        grad_req: ``write``, ``add`` or ``null``: for all, as a list, or as a dictionary (missing: null).
        aux_states: every auxiliary state, a list or a dictionary.
        group2ctx: context of each ``ctx_group`` attribute.
        shared_exec: an executor whose planned memory is used again; the two must not be needed at once.
        options: how to plan; default: from the environment. ``plan_options`` is the same by its older name.

    Raises:
        BindError: an array is missing, has the wrong context, or lists have the wrong length.
        ShapeError, DTypeError: an array does not fit the network.
    """
    check_context("bind", ctx)
    names, aux_names, order = names_of(symbol)
    arg_arrays = collect(args, names, "args")
    aux_arrays = collect(aux_states if aux_states is not None else [], aux_names, "aux_states")
    grad_arrays, reqs, grad_dtypes = collect_gradients(args_grad, normalize_grad_req(grad_req, names), arg_arrays)
    chosen_options = either("bind", "options", options, "plan_options", plan_options)
    chosen, kind = strategy_of(chosen_options, ctx, budget=False)
    binding = Binding(
        symbol=symbol, ctx=ctx, reqs=reqs, group2ctx=group2ctx, options=chosen, kind=kind, grad_dtypes=grad_dtypes
    )
    planned = binding.plan(*facts_of((*names, *aux_names), (*arg_arrays, *aux_arrays)), order=order)
    return binding.executor(planned, arg_arrays, grad_arrays, aux_arrays, shared_exec)


@resting
def simple_bind(
    symbol: Symbol,
    /,
    ctx: Context,
    grad_req: GradReq = "write",
    type_dict: Mapping[str, DTypeLike | None] | None = None,
    stype_dict: Mapping[str, str] | None = None,
    group2ctx: Groups = None,
    shared_arg_names: Sequence[str] | None = None,
    shared_exec: Executor | None = None,
    shared_buffer: dict[str, NDArray] | None = None,
    *,
    budget: int | str | None = None,
    dtype: DTypeLike | None = None,
    options: PlanOptions | None = None,
    memory_budget: int | str | None = None,
    plan_options: PlanOptions | None = None,
    **shapes: object,
) -> Executor:
    """Infer every shape and dtype from a few, allocate zero-filled arrays, and bind.

    Args:
        ctx: default context.
        grad_req: as for :func:`bind`.
        type_dict: dtypes by argument name; float32 is the default.
        group2ctx: context of each ``ctx_group`` attribute; arrays are made where their group says.
        shared_arg_names: arguments that are the same arrays as in ``shared_exec`` (their gradients too).
        shared_exec: an executor whose planned memory and auxiliary states are used again.
        shared_buffer: name -> array; other arguments are cut from these; missing arrays are added, small arrays grow.
        budget: most bytes for everything that the executor holds (arguments, gradients, states and planned memory),
            such as ``"2GB"`` or ``"80%"``; forward results are recomputed if the budget needs it.
        dtype: one dtype for every argument whose shape is given and that ``type_dict`` does not name.
        options: how to plan; default: from the environment.
        memory_budget, plan_options: ``budget`` and ``options`` by their older names.
        shapes: known shapes by argument name.

    Raises:
        BudgetError: nothing fits the budget; names the smallest that works. Nothing has been allocated.
        MXNetError: beginning ``simple_bind error. Arguments:`` and one line per shape, then the cause.
    """
    check_context("simple_bind", ctx)
    if stype_dict and any(kind != "default" for kind in stype_dict.values()):
        raise BindError(f"simple_bind: only dense arrays are supported, got {dict(stype_dict)}")
    chosen_options = either("simple_bind", "options", options, "plan_options", plan_options)
    limit = either("simple_bind", "budget", budget, "memory_budget", memory_budget)
    chosen, kind = strategy_of(chosen_options, ctx, budget=limit is not None)
    if limit is not None and kind is DynamicExecutor:
        raise BindError("simple_bind: a budget needs a plan that is kept; unset WEFTPLAN_EXECUTOR_STRATEGY=dynamic")
    names, aux_names, order = names_of(symbol)
    every = (*names, *aux_names)
    shapes = collect_shapes(shapes, names, aux_names)
    shared: dict[str, Mapping[str, Any]] = {}
    if shared_exec is not None:
        known_names = frozenset(names)
        shared.update((name, shared_exec.arg_dict) for name in shared_arg_names or () if name in known_names)
        shared.update((name, shared_exec.aux_dict) for name in aux_names if name in shared_exec.aux_dict)
    groups = variable_contexts(symbol, ctx, group2ctx)
    places = {name: groups.get(name, ctx) for name in every}
    there = {name: table[name].context for name, table in shared.items() if name in table}
    try:
        reqs = normalize_grad_req(grad_req, names)
        known = {name: as_shape(name, shape) for name, shape in shapes.items()}
        binding = Binding(symbol=symbol, ctx=ctx, reqs=reqs, group2ctx=group2ctx, options=chosen, kind=kind)
        most = bytes_of(limit, ctx) if isinstance(limit, (int, str)) else None
        types = {**(dict.fromkeys(known, dtype) if dtype is not None else {}), **(type_dict or {})}
        planned = binding.plan(known, given_dtypes(types, every), {**places, **there}, budget=most, order=order)
    except (BudgetError, PlanError):
        raise
    except MXNetError as error:
        lines = "".join(f"\n{name}: {shape}" for name, shape in shapes.items())
        raise type(error)(f"simple_bind error. Arguments:{lines}\n{error}") from own(error)
    wanted = {name: (*fact, places[name]) for name, fact in planned.variables().items()}
    args, grads, aux = arrays_like(
        wanted, names, aux_names, reqs, shared=shared, shared_exec=shared_exec, shared_buffer=shared_buffer
    )
    if most is not None:
        binding = replace(binding, options=planned.memory.options)  # on reshape planned memory is to stay as small
    executor = binding.executor(planned, args, grads, aux, shared_exec)
    if shared_exec is None and shared_buffer is None:
        executor._inferred = frozenset(every).difference(known)
    return executor
