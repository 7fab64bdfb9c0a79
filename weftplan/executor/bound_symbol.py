"""How a symbol is bound, apart from shapes and arrays: planned for shapes, placed on arrays, bound again for others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weftplan import config, device, planner
from weftplan.device.context import Context
from weftplan.device.offload_links import speed
from weftplan.errors import BindError, ShapeError, did_you_mean, listed
from weftplan.executor.bind_arguments import as_shape
from weftplan.executor.dynamic import DynamicExecutor
from weftplan.executor.executor import Executor
from weftplan.executor.new_arrays import Groups, fitted
from weftplan.executor.plan_cache import planned_once
from weftplan.ndarray import NDArray
from weftplan.planner import PlannedGraph, PlanOptions
from weftplan.planner.spill.links import places
from weftplan.storage import offload
from weftplan.support.gc_pause import resting
from weftplan.symbol import Symbol
from weftplan.symbol.traversal import Order


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
        shapes: Mapping[str, Any],
        dtypes: Mapping[str, Any],
        contexts: Mapping[str, Context],
        *,
        budget: int | None = None,
        order: Order | None = None,
    ) -> PlannedGraph:
        """The graph planned for these shapes and dtypes of variables (as many as the rest can be inferred from).

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

        facts = {
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
        """The executor of a planned graph on arrays that fit it.

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
        self, old: Executor, partial_shaping: bool, allow_up_sizing: bool, shapes: Mapping[str, Any]
    ) -> Executor:
        """An executor like ``old``, which was bound this way, for other shapes: as many arrays are kept as fit.

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
) -> tuple[dict[str, tuple[int, ...]], dict[str, np.dtype[Any]], dict[str, Context]]:
    """(shapes, dtypes, contexts) of arrays by name."""
    pairs = list(zip(names, arrays, strict=True))
    return (
        {name: tuple(array.shape) for name, array in pairs},
        {name: np.dtype(array.dtype) for name, array in pairs},
        {name: array.context for name, array in pairs},
    )
