"""Memory of data-parallel training outside executors: host copies, kvstore buffers, optimizer states.

The figures follow from sizes alone, like those of an execution plan; nothing is allocated here. Each figure equals the
bytes that the owning classes allocate; a test compares it with the storage statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from weftplan.device.context import Context
from weftplan.errors import BudgetError, PlanError
from weftplan.kvstore import KVStoreDevice
from weftplan.kvstore.copies import HOST
from weftplan.ops.core.schema import Shape
from weftplan.planner.batch import batch_size, with_batch
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.symbolic.estimate import Question, is_parameter, trained_sizes
from weftplan.planner.symbolic.pipeline import PlannedGraph
from weftplan.support import slots
from weftplan.support.lazy_import import late_import
from weftplan.symbol import Symbol
from weftplan.training.data.device_placement import split_batch
from weftplan.training.kvstore_setup import choose_store
from weftplan.training.optimizers import optimizer as optimizers

_ON_HOST = ("exchange", "wire", "residual", "server")
"""What stores of several processes hold in host memory."""


@dataclass(frozen=True, slots=True)
class Besides:
    """Bytes of everything that is not an executor's."""

    by_purpose: dict[str, int]
    """``host_copies``, ``optimizer_states`` and what a kvstore holds (``kvstore_stored``, ``kvstore_merged``,
    ``kvstore_staging``, ``kvstore_compression``; of several processes ``kvstore_exchange``, ``kvstore_wire``,
    ``kvstore_residual``, ``kvstore_server``), where there are any."""
    each_device: int
    """How many of them one of several devices with memory of its own holds at most; host memory is not counted."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a memory budget leaves to each executor of a Module."""

    budget: int
    outside: int
    """Bytes that are no executor's."""
    executors: int
    """How many executors share the budget."""

    @property
    def each(self) -> int:
        """Most bytes of one executor; 0 where nothing is left."""
        return max(0, (self.budget - self.outside) // self.executors)

    def refusal(self, cause: BudgetError) -> BudgetError:
        """The error of a Module whose executors do not fit what is left to them."""
        smallest = None if cause.smallest is None else cause.smallest * self.executors + self.outside
        found = "" if smallest is None else f"; the smallest budget found that works is {smallest}: raise it to that"
        return BudgetError(
            f"the memory budget is {self.budget:,} bytes, of which {self.outside:,} are taken by copies on the host, "
            f"buffers of the kvstore and states of the optimizer, and {self.each:,} are left to "
            f"{'the executor' if self.executors == 1 else f'each of {self.executors} executors'}"
            f"{found or ': raise it'}, or use a smaller batch",
            smallest=smallest,
        )


def named_optimizer(optimizer: Any) -> Any:
    """An optimizer by name, where ``momentum`` is SGD with momentum; anything else is returned as it is.

    Raises:
        ParameterError: no optimizer has this name.
    """
    if not isinstance(optimizer, str):
        return optimizer
    if optimizer.lower() == "momentum":
        return optimizers.create("sgd", momentum=0.9)
    return optimizers.create(optimizer)


def besides_executors(
    trained: Mapping[str, tuple[int, int, int]],
    held: int,
    *,
    contexts: Sequence[Context],
    kvstore: Any = "local",
    workers: int | None = None,
) -> Besides:
    """What a Module on ``contexts`` holds besides its executors; of several processes the one that holds most.

    Args:
        trained: for each parameter with a gradient its (elements, bytes, bytes of optimizer state).
        held: bytes of all parameters and auxiliary states, of which Module keeps a copy on the host.
        contexts: one executor each.
        kvstore: a name or a store, as ``fit`` takes it.
        workers: how many processes share a store of several, where that is a name.

    Raises:
        PlanError: the name of a store of several processes, and nothing says how many.
    """
    if isinstance(kvstore, str) and "dist" in kvstore:
        every = [_besides(trained, held, contexts, store) for store in late_planned_stores(kvstore, workers)]
        return max(every, key=lambda one: sum(one.by_purpose.values()))
    return _besides(trained, held, contexts, kvstore)


def late_planned_stores(name: str, workers: int | None) -> list[Any]:
    """The stand-ins of ``weftplan.kvstore.distributed.footprint``, which is imported for them alone."""
    found: list[Any] = late_import("weftplan.kvstore.distributed.footprint").planned_stores(name, workers)
    return found


def _besides(
    trained: Mapping[str, tuple[int, int, int]], held: int, contexts: Sequence[Context], kvstore: Any
) -> Besides:
    count = len(contexts)
    largest = max((elements for elements, _, _ in trained.values()), default=0)
    store, on_store = choose_store(kvstore, contexts=count, largest=largest)
    states = sum(state for _, _, state in trained.values())
    if store is not None and on_store:
        states = sum(
            state * store.updated_here(number, elements) // max(1, elements)
            for number, (elements, _, state) in enumerate(trained.values())
        )
    found = {"host_copies": held}
    on_host = all(context.device_type in HOST for context in contexts)
    sums_on_host = store is None or not isinstance(store, KVStoreDevice)
    if store is not None:
        arrays = [(elements, nbytes) for elements, nbytes, _ in trained.values()]
        buffers = store.buffer_bytes(arrays, contexts, updates=on_store)
        found |= {f"kvstore_{purpose}": nbytes for purpose, nbytes in buffers.items() if nbytes}
    if states:
        found["optimizer_states"] = states * (1 if on_store or store is None else count)
    # A parameter's buffers and states are all on the device that sums it, the one with the least to sum so far.
    each = states if not on_store else 0
    if not (sums_on_host or on_host):
        spread = sum(nbytes for name, nbytes in buffers.items() if name not in _ON_HOST) + (states if on_store else 0)
        most = max((nbytes * (1 + count) + state * on_store for _, nbytes, state in trained.values()), default=0)
        each += min(spread, spread // count + most)
    return Besides(found, 0 if on_host else each)


def executor_budget(
    budget: int,
    symbol: Symbol,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, Any],
    trained: Sequence[str],
    params: Sequence[str],
    *,
    contexts: Sequence[Context],
    kvstore: Any,
    optimizer: Any,
) -> Share:
    """How many bytes each executor of a Module may take, so that everything together stays within ``budget``.

    Args:
        budget: of the memory that all contexts share, for CPUs; else of the memory of each device.
        shapes, dtypes: of the inputs.
        trained: parameters with a gradient.
        params: all parameters.
        contexts, kvstore, optimizer: what will train; ``optimizer`` may be None where it is not known yet.
    """
    names, aux_names = symbol.list_arguments(), symbol.list_auxiliary_states()
    found, _, states = symbol.infer_shape(**shapes)
    types, _, state_types = symbol.infer_type(**dtypes)
    facts = zip(
        (*names, *aux_names), (*(found or ()), *(states or ())), (*(types or ()), *(state_types or ())), strict=True
    )
    known = {name: (shape, np.dtype(dtype)) for name, shape, dtype in facts}
    sizes = {name: (prod(shape), prod(shape) * dtype.itemsize) for name, (shape, dtype) in known.items()}
    besides = besides_executors(
        {name: (*sizes[name], 0 if optimizer is None else optimizer.kept_bytes(*known[name])) for name in trained},
        sum(sizes[name][1] for name in (*params, *aux_names)),
        contexts=contexts,
        kvstore=kvstore,
    )
    shared = all(context.device_type in HOST for context in contexts)
    outside = sum(besides.by_purpose.values()) if shared else besides.each_device
    return Share(budget, outside, len(contexts) if shared else 1)


def plan_on_several(question: Question, contexts: Sequence[Context], budget: int | None) -> MemoryPlan:
    """The plan of one of several executors, with everything that a Module on all of them holds.

    Raises:
        BudgetError: nothing fits; names the smallest budget that works.
    """
    count, batch = len(contexts), batch_size(question.shapes)
    if batch < count:
        raise PlanError(f"a batch of {batch} samples cannot be split over {count} devices: make it larger")
    parts = [part.stop - part.start for part in split_batch(batch, count)]
    largest = replace(question, shapes=with_batch(question.shapes, max(parts)))
    plain = largest.sized(contexts[0]).plan()
    besides = besides_executors(
        trained_sizes(plain, question.shapes, optimizer=question.optimizer),
        _held(plain, question.shapes),
        contexts=contexts,
        kvstore=question.kvstore,
        workers=question.workers,
    )
    shared = all(context.device_type in HOST for context in contexts)  # one memory for all of them
    outside = sum(besides.by_purpose.values()) if shared else besides.each_device
    each = None if budget is None else max(1, (budget - outside) // (count if shared else 1))
    try:
        plans = {
            part: replace(question, shapes=with_batch(question.shapes, part)).within(contexts[0], each)
            for part in dict.fromkeys((max(parts), *parts))
        }
    except BudgetError as error:
        if error.smallest is None:
            raise
        smallest = error.smallest * (count if shared else 1) + outside
        raise BudgetError(
            f"the budget is {budget:,} bytes, but training on {count} devices needs {smallest:,}, of which "
            f"{outside:,} are copies on the host, buffers of the kvstore and states of the optimizer; the smallest "
            f"budget found that works is {smallest}: raise it to that, or use a smaller batch",
            smallest=smallest,
        ) from None
    memory = plans[max(parts)].memory
    others = list(parts)
    others.remove(max(parts))
    extra = {"other_devices": sum(plans[part].memory.total for part in others)} if others else {}
    found = {**memory.external_bytes, **extra, **besides.by_purpose}
    away = 0 if shared else sum(found.values()) - sum(memory.external_bytes.values()) - besides.each_device
    return replace(memory, external_bytes=found, elsewhere=away)


def _held(planned: PlannedGraph, known: Mapping[str, Shape]) -> int:
    """Bytes of the parameters and auxiliary states."""
    sizes = planned.memory.entry_nbytes
    row = planned.graph.row
    nids = [nid for name, nid in planned.arguments.items() if nid >= 0 and is_parameter(name, known)]
    nids += [nid for nid in planned.aux.values() if nid >= 0]
    return sum(int(sizes[row[nid]]) for nid in nids)


slots.PLAN_OPTIMIZER.fill(named_optimizer)
slots.PLAN_ON_SEVERAL.fill(plan_on_several)
