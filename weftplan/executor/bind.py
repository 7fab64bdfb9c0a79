"""``bind`` and ``simple_bind``: from a symbol and arrays (or shapes) to an executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from weftplan import config, planner
from weftplan.device.context import Context
from weftplan.errors import BindError, DTypeError, MXNetError, ShapeError, did_you_mean, listed
from weftplan.executor.arguments import as_shape, check_context, collect, collect_optional, normalize_grad_req
from weftplan.executor.arrays import (
    Groups,
    buffered_array,
    complete_shapes,
    infer_types,
    shared_array,
    variable_contexts,
)
from weftplan.executor.executor import Executor
from weftplan.executor.reshape import reshaped
from weftplan.ndarray import NDArray, zeros
from weftplan.planner import PlanOptions
from weftplan.planner.recompute import parse_bytes
from weftplan.symbol import Symbol
from weftplan.symbol.provenance import warn


def bind(
    symbol: Symbol,
    /,
    ctx: Context,
    args: Any,
    args_grad: Any = None,
    grad_req: Any = "write",
    aux_states: Any = None,
    group2ctx: Groups = None,
    shared_exec: Executor | None = None,
    *,
    plan_options: PlanOptions | None = None,
) -> Executor:
    """Bind ``symbol`` to arrays, which are used as they are, not copied.

    Args:
        ctx: default context of the operations.
        args: every argument, a list in ``list_arguments`` order or a dictionary.
        args_grad: gradient arrays, a list or a dictionary; an argument without one has ``grad_req`` null.
        grad_req: ``write``, ``add`` or ``null``: for all, as a list, or as a dictionary (missing: null).
        aux_states: every auxiliary state, a list or a dictionary.
        group2ctx: context of each ``ctx_group`` attribute.
        shared_exec: an executor whose planned memory is used again; the two must not be needed at once.
        plan_options: how to plan; default: from the environment.

    Raises:
        BindError: an array is missing, has the wrong context, or lists have the wrong length.
        ShapeError, DTypeError: an array does not fit the network.
    """
    check_context("bind", ctx)
    config.warn_of_late_changes("storage")
    names, aux_names = symbol.list_arguments(), symbol.list_auxiliary_states()
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) != len(names) else []
    if twice:
        raise BindError(f"Duplicate names detected, {twice}: give the variables different names")
    arg_arrays = collect(args, names, "args")
    aux_arrays = collect(aux_states if aux_states is not None else [], aux_names, "aux_states")
    grad_arrays = collect_optional(args_grad, names)
    reqs = normalize_grad_req(grad_req, names)
    reqs = {n: r if g is not None else "null" for (n, r), g in zip(reqs.items(), grad_arrays, strict=True)}
    shapes = {n: tuple(a.shape) for n, a in zip((*names, *aux_names), (*arg_arrays, *aux_arrays), strict=True)}
    dtypes = {n: np.dtype(a.dtype) for n, a in zip((*names, *aux_names), (*arg_arrays, *aux_arrays), strict=True)}
    for name, array, grad in zip(names, arg_arrays, grad_arrays, strict=True):
        if grad is None:
            continue
        if not isinstance(grad, NDArray):
            raise DTypeError(
                f"bind: args_grad {name!r} must be an NDArray to write the gradient to, got {type(grad).__name__}; "
                f"make one with mx.nd.zeros({array.shape})"
            )
        if tuple(grad.shape) != tuple(array.shape):
            raise ShapeError(f"bind: argument {name!r} has shape {array.shape}, its gradient array {grad.shape}")
        if grad.dtype != array.dtype:
            raise DTypeError(f"bind: argument {name!r} has dtype {array.dtype}, its gradient array {grad.dtype}")
    if not group2ctx:
        every = (*zip(names, arg_arrays, strict=True), *zip(aux_names, aux_arrays, strict=True))
        for label, held in (*every, *((f"grad of {n}", g) for n, g in zip(names, grad_arrays, strict=True))):
            if held is not None and held.context != ctx:
                raise BindError(
                    f"bind: {label!r} is on {held.context}, the executor on {ctx}; copy it with as_in_context({ctx}), "
                    f"or bind with group2ctx to spread one network over contexts"
                )
    planned = planner.plan_symbol(
        symbol,
        shapes,
        dtypes,
        grad_req=reqs,
        context=ctx,
        group2ctx=group2ctx,
        variable_contexts={n: a.context for n, a in zip((*names, *aux_names), (*arg_arrays, *aux_arrays), strict=True)}
        if group2ctx
        else None,
        options=plan_options,
    )
    rebind = partial(bind, symbol, ctx, grad_req=reqs, group2ctx=group2ctx, plan_options=plan_options)
    return Executor(
        symbol,
        planned,
        ctx,
        arg_arrays,
        grad_arrays,  # those of requests "null", too: they are the caller's, and stay as they are
        aux_arrays,
        reqs,
        pool=None if shared_exec is None else shared_exec.pool,
        rebind=partial(reshaped, rebind),
    )


def simple_bind(
    symbol: Symbol,
    /,
    ctx: Context,
    grad_req: Any = "write",
    type_dict: Mapping[str, Any] | None = None,
    stype_dict: Mapping[str, str] | None = None,
    group2ctx: Groups = None,
    shared_arg_names: Sequence[str] | None = None,
    shared_exec: Executor | None = None,
    shared_buffer: dict[str, NDArray] | None = None,
    *,
    plan_options: PlanOptions | None = None,
    memory_budget: int | str | None = None,
    **shapes: Any,
) -> Executor:
    """Infer every shape and dtype from a few, allocate zero-filled arrays, and bind.

    Args:
        ctx: default context.
        grad_req: as for :func:`bind`.
        type_dict: dtypes by argument name; what nothing says is float32.
        group2ctx: context of each ``ctx_group`` attribute; arrays are made where their group says.
        shared_arg_names: arguments that are the same arrays as in ``shared_exec`` (their gradients too).
        shared_exec: an executor whose planned memory and auxiliary states are used again.
        shared_buffer: name -> array; other arguments are cut from these; missing ones are added, small ones grow.
        plan_options: how to plan; default: from the environment.
        memory_budget: most bytes for everything that the executor holds (arguments, gradients, states and planned
            memory), such as ``"2GB"``; forward results are computed again where that is needed to fit.
        shapes: known shapes by argument name.

    Raises:
        BudgetError: nothing fits ``memory_budget``; names the smallest that works. Nothing has been allocated.
        MXNetError: beginning ``simple_bind error. Arguments:`` and one line per shape, then the cause.
    """
    check_context("simple_bind", ctx)
    if stype_dict and any(kind != "default" for kind in stype_dict.values()):
        raise BindError(f"simple_bind: only dense arrays are supported, got {dict(stype_dict)}")
    names, aux_names = symbol.list_arguments(), symbol.list_auxiliary_states()
    unknown = [name for name in shapes if name not in names and name not in aux_names]
    if unknown:
        hint = did_you_mean(unknown[0], (*names, *aux_names))
        warn(f"simple_bind: no arguments named {listed(unknown)}; {hint}the arguments are {listed(names)}")
    try:
        reqs = normalize_grad_req(grad_req, names)
        known = {name: as_shape(name, shape) for name, shape in shapes.items() if name not in unknown}
        arg_shapes, aux_shapes = complete_shapes(symbol, known)
        arg_types, _, aux_types = infer_types(symbol, type_dict or {})
    except MXNetError as error:
        lines = "".join(f"\n{name}: {shape}" for name, shape in shapes.items())
        raise type(error)(f"simple_bind error. Arguments:{lines}\n{error}") from error
    places = variable_contexts(symbol, ctx, group2ctx)
    if memory_budget is not None:
        plan_options = _options_within(
            symbol,
            memory_budget,
            plan_options,
            dict(zip((*names, *aux_names), (*arg_shapes, *aux_shapes), strict=True)),
            dict(zip((*names, *aux_names), (*arg_types, *aux_types), strict=True)),
            grad_req=reqs,
            context=ctx,
            group2ctx=group2ctx,
            variable_contexts={n: places.get(n, ctx) for n in (*names, *aux_names)} if group2ctx else None,
        )
    shared_names = set(shared_arg_names or ())
    args: list[NDArray] = []
    grads: dict[str, NDArray] = {}
    for name, shape, dtype in zip(names, arg_shapes, arg_types, strict=True):
        place = places.get(name, ctx)
        if name in shared_names and shared_exec is not None:
            args.append(shared_array(shared_exec.arg_dict, name, shape, dtype))
            if reqs[name] != "null":
                old = shared_exec.grad_dict.get(name)
                grads[name] = old if old is not None else zeros(shape, ctx=place, dtype=dtype)
            continue
        args.append(buffered_array(shared_buffer, name, shape, dtype, place))
        if reqs[name] != "null":
            grads[name] = buffered_array(shared_buffer, f"grad of {name}", shape, dtype, place)
    aux: list[NDArray] = []
    for name, shape, dtype in zip(aux_names, aux_shapes, aux_types, strict=True):
        if shared_exec is not None and name in shared_exec.aux_dict:
            aux.append(shared_array(shared_exec.aux_dict, name, shape, dtype))
        else:
            aux.append(zeros(shape, ctx=places.get(name, ctx), dtype=dtype))
    executor = bind(
        symbol,
        ctx,
        args,
        args_grad=grads,
        grad_req=reqs,
        aux_states=aux,
        group2ctx=group2ctx,
        shared_exec=shared_exec,
        plan_options=plan_options,
    )
    if shared_exec is None and shared_buffer is None:
        executor._inferred = frozenset((*names, *aux_names)).difference(known)
    return executor


def _options_within(
    symbol: Symbol,
    budget: int | str,
    options: PlanOptions | None,
    shapes: Mapping[str, Any],
    dtypes: Mapping[str, Any],
    **how: Any,
) -> PlanOptions:
    """The options under which everything fits the budget, found by planning before any array is made."""
    planned = planner.plan_within(
        lambda these: planner.plan_symbol(symbol, shapes, dtypes, options=these, **how),
        PlanOptions.from_environment() if options is None else options,
        parse_bytes(budget),
    )
    return planned.memory.options
