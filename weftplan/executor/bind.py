"""``bind`` and ``simple_bind``: from a symbol and arrays (or shapes) to an executor."""

from __future__ import annotations

import difflib
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from weftplan import planner
from weftplan.device.context import Context
from weftplan.errors import BindError, DTypeError, MXNetError, ShapeError
from weftplan.executor.executor import Executor
from weftplan.ndarray import NDArray, zeros
from weftplan.planner import PlanOptions
from weftplan.planner.recompute import parse_bytes
from weftplan.symbol import Symbol

GRAD_REQS = ("null", "write", "add")
Groups = Mapping[str, Context] | None


def bind(
    symbol: Symbol,
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
    _check_context("bind", ctx)
    names, aux_names = symbol.list_arguments(), symbol.list_auxiliary_states()
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) != len(names) else []
    if twice:
        raise BindError(f"Duplicate names detected, {twice}: give the variables different names")
    arg_arrays = _collect(args, names, "args")
    aux_arrays = _collect(aux_states if aux_states is not None else [], aux_names, "aux_states")
    grad_arrays = _collect_optional(args_grad, names)
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
    settings = {"ctx": ctx, "group2ctx": group2ctx, "plan_options": plan_options, "grad_req": reqs}
    return Executor(
        symbol,
        planned,
        ctx,
        arg_arrays,
        [g if reqs[n] != "null" else None for n, g in zip(names, grad_arrays, strict=True)],
        aux_arrays,
        reqs,
        pool=None if shared_exec is None else shared_exec.pool,
        rebind=lambda old, partial, up, new: _reshape(old, settings, partial, up, new),
    )


def simple_bind(
    symbol: Symbol,
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
        shared_buffer: name -> array; other arguments are cut from these, and new ones are added.
        plan_options: how to plan; default: from the environment.
        memory_budget: most bytes for everything that the executor holds (arguments, gradients, states and planned
            memory), such as ``"2GB"``; forward results are computed again where that is needed to fit.
        shapes: known shapes by argument name.

    Raises:
        BudgetError: nothing fits ``memory_budget``; names the smallest that works. Nothing has been allocated.
        MXNetError: beginning ``simple_bind error. Arguments:`` and one line per shape, then the cause.
    """
    _check_context("simple_bind", ctx)
    if stype_dict and any(kind != "default" for kind in stype_dict.values()):
        raise BindError(f"simple_bind: only dense arrays are supported, got {dict(stype_dict)}")
    names, aux_names = symbol.list_arguments(), symbol.list_auxiliary_states()
    unknown = [name for name in shapes if name not in names and name not in aux_names]
    if unknown:
        warnings.warn(f"simple_bind: no arguments named {unknown}; the arguments are {names}", stacklevel=3)
    try:
        reqs = normalize_grad_req(grad_req, names)
        known = {name: _shape(name, shape) for name, shape in shapes.items() if name not in unknown}
        arg_shapes, aux_shapes = _complete_shapes(symbol, known)
        arg_types, _, aux_types = _infer_types(symbol, type_dict or {})
    except MXNetError as error:
        lines = "".join(f"\n{name}: {shape}" for name, shape in shapes.items())
        raise type(error)(f"simple_bind error. Arguments:{lines}\n{error}") from error
    places = _variable_contexts(symbol, ctx, group2ctx)
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
            args.append(_shared(shared_exec.arg_dict, name, shape, dtype))
            if reqs[name] != "null":
                old = shared_exec.grad_dict.get(name)
                grads[name] = old if old is not None else zeros(shape, ctx=place, dtype=dtype)
            continue
        args.append(_buffer(shared_buffer, name, shape, dtype, place))
        if reqs[name] != "null":
            grads[name] = _buffer(shared_buffer, f"grad of {name}", shape, dtype, place)
    aux: list[NDArray] = []
    for name, shape, dtype in zip(aux_names, aux_shapes, aux_types, strict=True):
        if shared_exec is not None and name in shared_exec.aux_dict:
            aux.append(_shared(shared_exec.aux_dict, name, shape, dtype))
        else:
            aux.append(zeros(shape, ctx=places.get(name, ctx), dtype=dtype))
    return bind(
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


def normalize_grad_req(grad_req: Any, names: Sequence[str]) -> dict[str, str]:
    """``grad_req`` as a dictionary over all arguments.

    >>> normalize_grad_req({"w": "add"}, ["x", "w"])
    {'x': 'null', 'w': 'add'}
    """
    if isinstance(grad_req, str):
        reqs = dict.fromkeys(names, grad_req)
    elif isinstance(grad_req, Mapping):
        _warn_unknown("grad_req", grad_req, names)
        reqs = {name: grad_req.get(name, "null") for name in names}
    elif isinstance(grad_req, (list, tuple)):
        if len(grad_req) != len(names):
            raise BindError(f"grad_req has {len(grad_req)} items for {len(names)} arguments {list(names)}")
        reqs = dict(zip(names, grad_req, strict=True))
    else:
        raise BindError(f"grad_req must be a str, a list or a dictionary, got {type(grad_req).__name__}")
    for name, req in reqs.items():
        if req not in GRAD_REQS:
            raise BindError(f"grad_req of {name!r} must be one of {', '.join(GRAD_REQS)}, got {req!r}")
    return reqs


def _collect(given: Any, names: Sequence[str], what: str) -> list[NDArray]:
    if isinstance(given, Mapping):
        missing = [name for name in names if name not in given]
        if missing:
            raise BindError(f"bind: {what} lacks {missing}; needed are {list(names)}")
        arrays = [given[name] for name in names]
    elif isinstance(given, (list, tuple)):
        if len(given) != len(names):
            raise BindError(f"bind: {what} has {len(given)} arrays, needed are {len(names)}: {list(names)}")
        arrays = list(given)
    else:
        raise BindError(f"bind: {what} must be a list or a dictionary, got {type(given).__name__}")
    for name, array in zip(names, arrays, strict=True):
        if not isinstance(array, NDArray):
            raise DTypeError(
                f"bind: {what} {name!r} must be an NDArray, got {type(array).__name__}; make one with mx.nd.array(...)"
            )
    return arrays


def _collect_optional(given: Any, names: Sequence[str]) -> list[NDArray | None]:
    if given is None:
        return [None] * len(names)
    if isinstance(given, Mapping):
        _warn_unknown("args_grad", given, names)
        return [given.get(name) for name in names]
    if not isinstance(given, (list, tuple)):
        raise BindError(f"bind: args_grad must be a list or a dictionary, got {type(given).__name__}")
    if len(given) != len(names):
        raise BindError(f"bind: args_grad has {len(given)} items, needed are {len(names)}: {list(names)}")
    return list(given)


def _check_context(verb: str, ctx: Any) -> None:
    if not isinstance(ctx, Context):
        raise BindError(f"{verb}: ctx must be a context such as mx.cpu() or mx.gpu(0), got {ctx!r}")


def _warn_unknown(what: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    """Extra names are allowed, as in MXNet, but a misspelt one would silently train nothing."""
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            warnings.warn(
                f"{what} names {name!r}, which is no argument: {hint}the arguments are {list(names)}", stacklevel=5
            )


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    try:
        return tuple(operator.index(d) for d in shape)
    except TypeError:
        raise ShapeError(f"the shape of {name!r} must be a tuple of integers such as (32, 10), got {shape!r}") from None


def _dtype(name: str, dtype: Any) -> np.dtype[Any]:
    try:
        known: np.dtype[Any] = np.dtype(dtype)
        return known
    except TypeError:
        raise DTypeError(
            f"type_dict: {name!r} needs a dtype such as 'float32' or numpy.float32, got {dtype!r}"
        ) from None


def _infer_types(symbol: Symbol, type_dict: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Dtypes of arguments, outputs and auxiliary states; what stays open is float32."""
    known = {name: _dtype(name, dtype) for name, dtype in type_dict.items() if dtype is not None}
    args, outs, aux = symbol.infer_type_partial(**known)
    if any(t is None for t in args):
        known.update({n: np.dtype(np.float32) for n, t in zip(symbol.list_arguments(), args, strict=True) if t is None})
        args, outs, aux = symbol.infer_type_partial(**known)
    fallback = np.dtype(np.float32)
    return [t or fallback for t in args], [t or fallback for t in outs], [t or fallback for t in aux]


def _complete_shapes(
    symbol: Symbol, known: Mapping[str, tuple[int, ...]]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Shapes of all arguments and auxiliary states; raises ShapeError naming those that stay open."""
    args, _, aux = symbol.infer_shape_partial(**known)
    names = (*symbol.list_arguments(), *symbol.list_auxiliary_states())
    open_ones = [n for n, shape in zip(names, (*args, *aux), strict=True) if not shape or 0 in shape]
    if open_ones:
        raise ShapeError(f"shapes of {open_ones} cannot be inferred; give them too")
    return [tuple(s) for s in args], [tuple(s) for s in aux]


def _variable_contexts(symbol: Symbol, ctx: Context, group2ctx: Groups) -> dict[str, Context]:
    if not group2ctx:
        return {}
    places = {}
    for name, attrs in symbol.attr_dict().items():
        group = attrs.get("__ctx_group__") or attrs.get("ctx_group")
        if group is not None:
            if group not in group2ctx:
                raise BindError(f"{name!r} is in ctx_group {group!r}, which group2ctx {dict(group2ctx)} does not name")
            places[name] = group2ctx[group]
    return places


def _shared(table: Mapping[str, Any], name: str, shape: tuple[int, ...], dtype: Any) -> NDArray:
    array = table.get(name)
    if array is None:
        raise BindError(f"simple_bind: shared_exec has no array {name!r}; it has {list(table)}")
    if tuple(array.shape) != tuple(shape) or array.dtype != dtype:
        raise ShapeError(f"simple_bind: {name!r} is shared as {array.shape} {array.dtype} but needs {shape} {dtype}")
    return array  # type: ignore[no-any-return]


def _buffer(pool: dict[str, NDArray] | None, name: str, shape: tuple[int, ...], dtype: Any, ctx: Context) -> NDArray:
    if pool is None:
        return zeros(shape, ctx=ctx, dtype=dtype)
    have = pool.get(name)
    size = int(np.prod(shape, dtype=np.int64))
    if have is not None and have.dtype == dtype and have.context == ctx:
        if have.size >= size:
            return view_as(have, shape)
        warnings.warn(
            f"shared_buffer: {name!r} has {have.size} elements, {size} are needed: it is replaced", stacklevel=3
        )
    pool[name] = zeros(shape, ctx=ctx, dtype=dtype)
    return pool[name]


def view_as(array: NDArray, shape: tuple[int, ...]) -> NDArray:
    """The first bytes of ``array`` under another shape, sharing memory and var."""
    return NDArray(array.chunk, shape, array.dtype, array.offset)


def _reshape(
    old: Executor, settings: Mapping[str, Any], partial: bool, up_sizing: bool, shapes: Mapping[str, Any]
) -> Executor:
    symbol = old.symbol
    unknown = [name for name in shapes if name not in old.arg_names]
    if unknown:
        raise BindError(f"reshape: no arguments named {unknown}; the arguments are {old.arg_names}")
    arg_shapes, aux_shapes = _complete_shapes(symbol, {n: _shape(n, s) for n, s in shapes.items()})

    def fit(name: str, array: NDArray, shape: tuple[int, ...]) -> NDArray:
        if tuple(array.shape) == tuple(shape):
            return array
        if name not in shapes and not partial:
            raise ShapeError(
                f"reshape: the shape of {name!r}, which was not given, changes from {array.shape} to {shape}; "
                f"give it, or pass partial_shaping=True"
            )
        if int(np.prod(shape, dtype=np.int64)) > array.size:
            if not up_sizing:
                raise ShapeError(
                    f"reshape: {name!r} grows from {array.shape} to {shape}; pass allow_up_sizing=True for a new array"
                )
            return zeros(shape, ctx=array.context, dtype=array.dtype)
        return view_as(array, shape)

    args, grads = [], {}
    for name, array, grad, shape in zip(old.arg_names, old.arg_arrays, old.grad_arrays, arg_shapes, strict=True):
        args.append(fit(name, array, shape))
        if grad is not None:
            grads[name] = fit(name, grad, shape)
    aux = [fit(n, a, s) for n, a, s in zip(old.aux_names, old.aux_arrays, aux_shapes, strict=True)]
    new = bind(
        symbol,
        settings["ctx"],
        args,
        args_grad=grads,
        grad_req=settings["grad_req"],
        aux_states=aux,
        group2ctx=settings["group2ctx"],
        shared_exec=old,
        plan_options=settings["plan_options"],
    )
    new._monitor = old._monitor
    return new
