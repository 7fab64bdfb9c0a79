"""``bind``, ``simple_bind`` and ``reshape``: make an executor from a symbol and arrays or shapes.

All three take the same steps: they check the arguments (``bind_arguments.py``), plan the graph, make missing arrays
(``new_arrays.py``), and create the executor, which allocates the planned memory. Errors in arguments are therefore
raised before anything is allocated, and the planner infers shapes and dtypes once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weftplan import config, device, planner
from weftplan.device.amounts import bytes_of
from weftplan.device.context import Context
from weftplan.device.offload_links import speed
from weftplan.errors import BindError, BudgetError, MXNetError, PlanError, ShapeError, did_you_mean, listed, own
from weftplan.executor.bind_arguments import (
    Arrays,
    GradReq,
    check_context,
    collect,
    collect_gradients,
    collect_shapes,
    either,
    given_dtypes,
    known_shapes,
    names_of,
    normalize_grad_req,
)
from weftplan.executor.dynamic import DynamicExecutor
from weftplan.executor.executor import Executor
from weftplan.executor.new_arrays import Groups, arrays_like, fitted, variable_contexts
from weftplan.executor.plan_cache import planned_once
from weftplan.ndarray import NDArray
from weftplan.planner import PlannedGraph, PlanOptions
from weftplan.planner.spill.search import spill_targets
from weftplan.storage import offload
from weftplan.support.array_types import DType, DTypeLike
from weftplan.support.gc_pause import resting
from weftplan.support.tensor_types import Shape
from weftplan.symbol import Symbol
from weftplan.symbol.node import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The arguments of a bind, apart from shapes and arrays. An executor stores its binding for ``reshape``."""

    symbol: Symbol
    ctx: Context
    reqs: dict[str, str]
    group2ctx: Groups
    options: PlanOptions
    kind: type[Executor]
    grad_dtypes: Mapping[str, Any] = field(default_factory=dict)
    """The dtype of an argument's gradient array, by argument; only if it differs from the argument's dtype."""

    def plan(
        self,
        shapes: Mapping[str, Shape],
        dtypes: Mapping[str, DTypeLike],
        contexts: Mapping[str, Context],
        *,
        budget: int | None = None,
        order: Order | None = None,
    ) -> PlannedGraph:
        """Return the graph planned for the given shapes and dtypes of variables; the planner infers the rest of both.

        Args:
            shapes: known shapes by variable.
            dtypes: known dtypes by variable; a dtype that cannot be inferred is float32.
            contexts: context of each variable's array; ignored without ``group2ctx``.
            budget: maximum bytes of arguments, gradients, states and planned memory together; None: only the plan
                options limit memory.
            order: the depth-first order of the symbol; None: it is computed.
        """
        group_contexts = contexts if self.group2ctx else {}

        def plan(order: Order) -> PlannedGraph:
            sized = planner.size_symbol(
                self.symbol,
                shapes,
                dtypes,
                grad_req=self.reqs,
                grad_dtypes=self.grad_dtypes,
                context=self.ctx,
                group2ctx=self.group2ctx,
                variable_contexts=group_contexts or None,
                options=self.options,
                order=order,
            )
            return sized.plan() if budget is None else planner.plan_within(sized.plan, self.options, budget=budget)

        facts: dict[str, Mapping[str, Hashable]] = {
            "shapes": {name: tuple(shape) for name, shape in shapes.items()},
            "dtypes": {name: np.dtype(dtype) for name, dtype in dtypes.items()},
            "gradients": self.reqs,
            "dtypes of gradients": {name: np.dtype(dtype) for name, dtype in self.grad_dtypes.items()},
            "groups": self.group2ctx or {},
            "contexts": group_contexts,
        }
        planned = planned_once(self.symbol, self.options, facts, (self.ctx, budget), plan, order=order)
        if any(context.device_type == "file" for context in planned.memory.contexts):
            device.name_folders(planned.memory.options.targets)
        return planned

    def executor(
        self,
        planned: PlannedGraph,
        args: Sequence[NDArray],
        grads: Sequence[NDArray | None],
        aux: Sequence[NDArray],
        shared_exec: Executor | None,
    ) -> Executor:
        """Return an executor of ``planned`` on arrays of the planned shapes and dtypes.

        Raises:
            BindError: an array is on another context than ``ctx``, and ``group2ctx`` is not set.
        """
        config.warn_of_late_changes("storage")
        ctx = self.ctx
        if not self.group2ctx:
            names = list(planned.arguments)
            for k, held in enumerate((*args, *grads, *aux)):
                if held is not None and held.chunk.context is not ctx and held.context != ctx:
                    label = (*names, *(f"grad of {name}" for name in names), *planned.aux)[k]
                    raise BindError(
                        f"bind: {label!r} is on {held.context}, the executor on {ctx}; copy it with "
                        f"as_in_context({ctx}), or bind with group2ctx to spread one network over contexts"
                    )
        return self.kind(
            self.symbol,
            planned,
            ctx,
            args,
            grads,
            aux,
            self.reqs,
            pool=None if shared_exec is None else shared_exec.pool,
            rebind=self.reshaped,
            unfuse=self.unfused,
        )

    def unfused(self, old: Executor) -> Executor:
        """Return an executor without fusion, on the arrays and the planned memory of ``old``."""
        names, arrays = (*old.arg_names, *old.aux_names), (*old.arg_arrays, *old.aux_arrays)
        shapes, dtypes, contexts = facts_of(names, arrays)
        binding = replace(self, options=replace(self.options, fusion=False))
        planned = binding.plan(shapes, dtypes, contexts)
        new = binding.executor(planned, old.arg_arrays, old.grad_arrays, old.aux_arrays, old)
        new._inferred, new._unset = old._inferred, old._unset
        return new

    @resting
    def reshaped(
        self, old: Executor, partial_shaping: bool, allow_up_sizing: bool, shapes: Mapping[str, object]
    ) -> Executor:
        """Return an executor for other shapes that shares planned memory with ``old``, and all large enough arrays.

        Arguments after ``old`` are those of :meth:`Executor.reshape`.

        Raises:
            BindError: ``shapes`` has an unknown name.
            ShapeError: an array would change its shape or grow, which the caller has not allowed.
        """
        unknown = [name for name in shapes if name not in old.arg_names]
        if unknown:
            hint = did_you_mean(unknown[0], old.arg_names)
            raise BindError(
                f"reshape: no arguments named {listed(unknown)}; {hint}the arguments are {listed(old.arg_names)}"
            )
        names, arrays = (*old.arg_names, *old.aux_names), (*old.arg_arrays, *old.aux_arrays)
        _, dtypes, contexts = facts_of(names, arrays)
        planned = self.plan(known_shapes(shapes), dtypes, contexts)
        sizes = planned.variables()

        def fit(name: str, array: NDArray) -> NDArray:
            shape = sizes[name][0]
            if array.shape != shape and name not in shapes and not partial_shaping:
                raise ShapeError(
                    f"reshape: the shape of {name!r}, which was not given, changes from {array.shape} to {shape}; "
                    f"give it, or pass partial_shaping=True"
                )
            return fitted(name, array, shape, allow_up_sizing)

        args = [fit(name, array) for name, array in zip(old.arg_names, old.arg_arrays, strict=True)]
        grads = [
            None if grad is None else fit(name, grad) for name, grad in zip(old.arg_names, old.grad_arrays, strict=True)
        ]
        aux = [fit(name, array) for name, array in zip(old.aux_names, old.aux_arrays, strict=True)]
        new = self.executor(planned, args, grads, aux, old)
        if old.monitor_callback is not None:
            new.set_monitor_callback(*old.monitor_callback)
        new._inferred, new._unset = old._inferred, old._unset
        return new


_STRATEGY = "WEFTPLAN_EXECUTOR_STRATEGY"
_COLLECTOR_FLAGS = (
    "FLAGS_memory_fraction_of_eager_deletion", "FLAGS_fast_eager_deletion_mode", "FLAGS_eager_delete_scope",
)  # fmt: skip
"""Flags that affect only dynamic executors; a bind of another executor warns that they have no effect."""


def strategy_of(requested: PlanOptions | None, ctx: Context, *, budget: bool) -> tuple[PlanOptions, type[Executor]]:
    """Return complete plan options and the executor class that ``WEFTPLAN_EXECUTOR_STRATEGY`` selects.

    Args:
        requested: the caller's options; None: the options of the environment.
        ctx: the default context of the executor.
        budget: whether the caller gives a memory budget; link speeds are measured only for budgets.
    """
    options = PlanOptions.from_environment() if requested is None else requested
    if not options.peers and any(target.kind == "peer" for target in options.targets):
        options = options.replace(peers=tuple(map(str, offload.peers(ctx))))
    if any(target.nbytes is not None for target in options.targets):
        options = options.replace(spill_taken=tuple(map(offload.reserved_bytes, options.targets)))
    budget = budget or options.budget is not None
    if (
        budget
        and ctx.device_type == "gpu"
        and options.targets
        and not options.links
        and config.get("WEFTPLAN_MEASURE_LINKS")
    ):
        options = options.replace(links=_links(options, ctx))
    if config.get(_STRATEGY) == "dynamic":
        return replace(options, strategy="none"), DynamicExecutor
    for name, text in config.in_force():
        if text and name in _COLLECTOR_FLAGS:
            config.warn_once(name, f"{name} has no effect: graphs have a static plan; set {_STRATEGY}=dynamic")
    return options, Executor


def _links(options: PlanOptions, ctx: Context) -> tuple[tuple[str, str, float, float], ...]:
    """Return (device, target, bytes per second, latency in seconds) for each offload target with a known link speed."""
    links = []
    for target in spill_targets(ctx, options):
        link_speed = speed(ctx, target.context)
        if link_speed is not None:
            links.append((str(ctx), str(target.context), link_speed.bandwidth, link_speed.latency))
    return tuple(links)


def facts_of(
    names: Iterable[str], arrays: Iterable[NDArray]
) -> tuple[dict[str, tuple[int, ...]], dict[str, DType], dict[str, Context]]:
    """Return the shapes, the dtypes and the contexts of arrays, each by name."""
    pairs = list(zip(names, arrays, strict=True))
    return (
        {name: tuple(array.shape) for name, array in pairs},
        {name: array.np_dtype for name, array in pairs},
        {name: array.context for name, array in pairs},
    )


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
    """Bind ``symbol`` to arrays, without copying them.

    Args:
        ctx: default context of the operations.
        args: every argument, a list in ``list_arguments`` order or a dictionary.
        args_grad: gradient arrays, a list or a dictionary. An argument without a gradient array has ``grad_req`` null.
            A gradient is cast to the dtype of its array.
        grad_req: ``write``, ``add`` or ``null``: for all, as a list, or as a dictionary (missing: null).
        aux_states: every auxiliary state, a list or a dictionary.
        group2ctx: context of each ``ctx_group`` attribute.
        shared_exec: an executor whose planned memory the new executor shares. A run of one overwrites the results of
            the other.
        options: plan options; default: from the environment. ``plan_options`` is an older name.

    Raises:
        BindError: an array is missing or has the wrong context, or a list has the wrong length.
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
    """Infer all shapes and dtypes from the known ones, allocate zero-filled arrays, and bind ``symbol`` to them.

    Args:
        ctx: default context.
        grad_req: as for :func:`bind`.
        type_dict: dtypes by variable; float32 is the default.
        stype_dict: storage types by variable; only ``default`` (dense) is supported.
        group2ctx: context of each ``ctx_group`` attribute; the arrays of a group are allocated there.
        shared_arg_names: arguments whose arrays and gradients are those of ``shared_exec``.
        shared_exec: an executor whose planned memory and auxiliary states the new executor shares.
        shared_buffer: arrays by name; other arguments and gradients are cut from them. Missing arrays are added to it;
            an array that is too small grows or is replaced.
        budget: maximum bytes of arguments, gradients, states and planned memory together, such as ``"2GB"`` or
            ``"80%"``; forward results are recomputed if the budget requires it.
        dtype: dtype of the arguments whose shapes are given, unless ``type_dict`` names them.
        options: plan options; default: from the environment.
        memory_budget, plan_options: older names of ``budget`` and ``options``.
        shapes: known shapes by argument name.

    Raises:
        BindError: an option is invalid, or is given by both of its names.
        BudgetError: no plan fits the budget; the message gives the smallest budget that works. Nothing has been
            allocated.
        MXNetError: inference failed; the message begins with ``simple_bind error. Arguments:`` and one line per shape.
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
        names_with_shapes = frozenset(names)
        shared.update((name, shared_exec.arg_dict) for name in shared_arg_names or () if name in names_with_shapes)
        shared.update((name, shared_exec.aux_dict) for name in aux_names if name in shared_exec.aux_dict)
    groups = variable_contexts(symbol, ctx, group2ctx)
    variable_places = {name: groups.get(name, ctx) for name in every}
    shared_contexts = {name: table[name].context for name, table in shared.items() if name in table}
    try:
        reqs = normalize_grad_req(grad_req, names)
        input_shapes = known_shapes(shapes)
        binding = Binding(symbol=symbol, ctx=ctx, reqs=reqs, group2ctx=group2ctx, options=chosen, kind=kind)
        byte_limit = bytes_of(limit, ctx) if isinstance(limit, (int, str)) else None
        types = {**(dict.fromkeys(input_shapes, dtype) if dtype is not None else {}), **(type_dict or {})}
        planned = binding.plan(
            input_shapes,
            given_dtypes(types, every),
            {**variable_places, **shared_contexts},
            budget=byte_limit,
            order=order,
        )
    except (BudgetError, PlanError):
        raise
    except MXNetError as error:
        lines = "".join(f"\n{name}: {shape}" for name, shape in shapes.items())
        raise type(error)(f"simple_bind error. Arguments:{lines}\n{error}") from own(error)
    facts = {name: (*fact, variable_places[name]) for name, fact in planned.variables().items()}
    args, grads, aux = arrays_like(
        facts, names, aux_names, reqs, shared=shared, shared_exec=shared_exec, shared_buffer=shared_buffer
    )
    if byte_limit is not None:
        binding = replace(binding, options=planned.memory.options)  # reshape then uses the options that met the budget
    executor = binding.executor(planned, args, grads, aux, shared_exec)
    if shared_exec is None and shared_buffer is None:
        executor._inferred = frozenset(every).difference(input_shapes)
    return executor
