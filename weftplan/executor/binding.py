"""``bind``, ``simple_bind`` and ``reshape``: from a symbol and arrays (or shapes) to an executor.

All three take the same steps: the arguments are checked (``bind_arguments.py``), the graph is planned, missing arrays
are made (``new_arrays.py``), and the executor lays the plan into memory. So an error is raised before anything is
allocated, and the planner infers shapes and dtypes once.
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
from weftplan.executor.dynamic import DynamicExecutor
from weftplan.executor.executor import Executor
from weftplan.executor.new_arrays import Groups, arrays_like, fitted, variable_contexts
from weftplan.executor.plan_cache import planned_once
from weftplan.ndarray import NDArray
from weftplan.planner import PlannedGraph, PlanOptions
from weftplan.planner.spill.search import places
from weftplan.storage import offload
from weftplan.support.array_types import DType, DTypeLike
from weftplan.support.gc_pause import resting
from weftplan.support.tensor_types import Shape
from weftplan.symbol import Symbol
from weftplan.symbol.node import Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """How a symbol is bound: everything but shapes and arrays. An executor keeps it, to be bound again on reshape."""

    symbol: Symbol
    ctx: Context
    reqs: dict[str, str]
    group2ctx: Groups
    options: PlanOptions
    kind: type[Executor]
    grad_dtypes: Mapping[str, Any] = field(default_factory=dict)
    """Dtypes of gradient arrays that do not have their argument's."""

    def plan(
        self,
        shapes: Mapping[str, Shape],
        dtypes: Mapping[str, DTypeLike],
        contexts: Mapping[str, Context],
        *,
        budget: int | None = None,
        order: Order | None = None,
    ) -> PlannedGraph:
        """Return the graph planned for these shapes and dtypes of variables (as many as the rest can be inferred from).

        Args:
            shapes: by name.
            dtypes: by name; float32 if nothing else is inferred.
            contexts: where the array of each variable is, or is to be; looked at with ``group2ctx`` only.
            budget: most bytes for everything that the executor holds.
            order: the depth-first order of the symbol, when the caller has it.
        """
        places = contexts if self.group2ctx else {}

        def plan(order: Order) -> PlannedGraph:
            sized = planner.size_symbol(
                self.symbol,
                shapes,
                dtypes,
                grad_req=self.reqs,
                grad_dtypes=self.grad_dtypes,
                context=self.ctx,
                group2ctx=self.group2ctx,
                variable_contexts=places or None,
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
            "contexts": places,
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
        """Return the executor of a planned graph on arrays that fit it.

        Raises:
            BindError: without ``group2ctx``, an array is on another context.
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
        )

    @resting
    def reshaped(
        self, old: Executor, partial_shaping: bool, allow_up_sizing: bool, shapes: Mapping[str, object]
    ) -> Executor:
        """Return an executor like ``old``, which was bound this way, for other shapes: as many arrays are kept as fit.

        Raises:
            BindError: an unknown name.
            ShapeError: a change that was not allowed.
        """
        unknown = [name for name in shapes if name not in old.arg_names]
        if unknown:
            hint = did_you_mean(unknown[0], old.arg_names)
            raise BindError(
                f"reshape: no arguments named {listed(unknown)}; {hint}the arguments are {listed(old.arg_names)}"
            )
        names, arrays = (*old.arg_names, *old.aux_names), (*old.arg_arrays, *old.aux_arrays)
        _, dtypes, contexts = facts_of(names, arrays)
        planned = self.plan({name: as_shape(name, shape) for name, shape in shapes.items()}, dtypes, contexts)
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
        new._monitor = old._monitor
        new._inferred, new._unset = old._inferred, old._unset
        return new


_STRATEGY = "WEFTPLAN_EXECUTOR_STRATEGY"
_OF_COLLECTOR = (
    "FLAGS_memory_fraction_of_eager_deletion", "FLAGS_fast_eager_deletion_mode", "FLAGS_eager_delete_scope",
)  # fmt: skip
"""Flags that shape what a dynamic executor does, and nothing else."""


def strategy_of(requested: PlanOptions | None, ctx: Context, *, budget: bool) -> tuple[PlanOptions, type[Executor]]:
    """Return how to plan, and the class that runs the plan."""
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
        if text and name in _OF_COLLECTOR:
            config.warn_once(name, f"{name} has no effect: graphs have a static plan; set {_STRATEGY}=dynamic")
    return options, Executor


def _links(options: PlanOptions, ctx: Context) -> tuple[tuple[str, str, float, float], ...]:
    """How fast the ways from a device to its offload targets are, as far as that is known."""
    links = []
    for place in places(ctx, options):
        known = speed(ctx, place.context)
        if known is not None:
            links.append((str(ctx), str(place.context), known.bandwidth, known.latency))
    return tuple(links)


def facts_of(
    names: Iterable[str], arrays: Iterable[NDArray]
) -> tuple[dict[str, tuple[int, ...]], dict[str, DType], dict[str, Context]]:
    """Return (shapes, dtypes, contexts) of arrays by name."""
    pairs = list(zip(names, arrays, strict=True))
    return (
        {name: tuple(array.shape) for name, array in pairs},
        {name: np.dtype(array.dtype) for name, array in pairs},
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
