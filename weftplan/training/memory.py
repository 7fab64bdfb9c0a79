"""Memory of data-parallel training outside executors: host copies, kvstore buffers, optimizer states.

The figures follow from sizes alone, like those of an execution plan; nothing is allocated here. Each figure equals the
bytes that the owning classes allocate; a test compares it with the storage statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import numpy as np

from weftplan.data.batch import DataDesc
from weftplan.data.device_placement import split_batch
from weftplan.device.amounts import bytes_of, pasteable
from weftplan.device.context import Context
from weftplan.errors import BindError, BudgetError, PlanError
from weftplan.executor import Executor
from weftplan.kvstore import KVStoreDevice
from weftplan.kvstore.base import KVStoreBase
from weftplan.kvstore.stages import HOST
from weftplan.ops.core.schema import Shape
from weftplan.planner.batch import batch_size, with_batch
from weftplan.planner.memory_plan import MemoryPlan
from weftplan.planner.symbolic.estimate import Question, is_parameter, trained_sizes
from weftplan.planner.symbolic.pipeline import PlannedGraph
from weftplan.support import slots
from weftplan.support.array_types import DTypeLike
from weftplan.support.lazy_import import late_import
from weftplan.symbol import Symbol
from weftplan.training.kvstore_setup import choose_store
from weftplan.training.optimizers import sgd_adam as optimizers

_ON_HOST = ("exchange", "wire", "residual", "server")
"""Buffers of distributed stores in host memory."""


@dataclass(frozen=True, slots=True)
class Besides:
    """Bytes of training outside executors."""

    by_purpose: dict[str, int]
    """Bytes by purpose, without zeros: ``host_copies``, ``optimizer_states`` and the kvstore's buffers
    (``kvstore_stored``, ``kvstore_merged``, ``kvstore_staging``, ``kvstore_compression``; distributed stores also
    ``kvstore_exchange``, ``kvstore_wire``, ``kvstore_residual``, ``kvstore_server``)."""
    each_device: int
    """Upper limit of these bytes on a single device with its own memory; excludes host memory."""


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """An executor's share of a Module's memory budget."""

    budget: int
    outside: int
    """Bytes used outside executors."""
    executors: int
    """Number of executors that share the budget."""

    @property
    def each(self) -> int:
        """Byte limit of each executor; 0 if nothing is left."""
        return max(0, (self.budget - self.outside) // self.executors)

    def refusal(self, cause: BudgetError) -> BudgetError:
        """Return the error for executors that exceed their share, in terms of the whole budget."""
        smallest = None if cause.smallest is None else cause.smallest * self.executors + self.outside
        hint = (
            ""
            if smallest is None
            else f"; the smallest budget found that works is {pasteable(smallest)}: raise it to that"
        )
        return BudgetError(
            f"the memory budget is {self.budget:,} bytes, of which {self.outside:,} are taken by copies on the host, "
            f"buffers of the kvstore and states of the optimizer, and {self.each:,} are left to "
            f"{'the executor' if self.executors == 1 else f'each of {self.executors} executors'}"
            f"{hint or ': raise it'}, or use a smaller batch",
            smallest=smallest,
        )


def named_optimizer(optimizer: str) -> optimizers.Optimizer:
    """Create an optimizer by name; ``momentum`` means SGD with momentum.

    Raises:
        ParameterError: no optimizer has this name.
    """
    if optimizer.lower() == "momentum":
        return optimizers.create("sgd", momentum=0.9)
    return optimizers.create(optimizer)


def besides_executors(
    trained: Mapping[str, tuple[int, int, int]],
    held: int,
    *,
    contexts: Sequence[Context],
    kvstore: str | KVStoreBase | None = "local",
    workers: int | None = None,
) -> Besides:
    """Compute a Module's memory outside its executors; with several processes, for the process with the most.

    Args:
        trained: (elements, bytes, bytes of optimizer state) of each parameter with a gradient.
        held: bytes of all parameters and auxiliary states, which Module copies to the host.
        contexts: contexts of the executors.
        kvstore: a name or a store, as in ``fit``.
        workers: number of processes, if ``kvstore`` is the name of a distributed store.

    Raises:
        PlanError: a distributed store is named, and the number of processes is unknown.
    """
    if isinstance(kvstore, str) and "dist" in kvstore:
        every = [_besides(trained, held, contexts, store) for store in late_planned_stores(kvstore, workers)]
        return max(every, key=lambda memory: sum(memory.by_purpose.values()))
    return _besides(trained, held, contexts, kvstore)


def late_planned_stores(name: str, workers: int | None) -> list[KVStoreBase]:
    """Return planning stand-ins of a distributed store; imports ``weftplan.kvstore.distributed.footprint`` lazily."""
    stores: list[Any] = late_import("weftplan.kvstore.distributed.footprint").planned_stores(name, workers)
    return stores


def _besides(
    trained: Mapping[str, tuple[int, int, int]],
    held: int,
    contexts: Sequence[Context],
    kvstore: str | KVStoreBase | None,
) -> Besides:
    count = len(contexts)
    largest = max((elements for elements, _, _ in trained.values()), default=0)
    store, on_store = choose_store(kvstore, contexts=count, largest=largest)
    states = sum(state for _, _, state in trained.values())
    if store is not None and on_store:
        states = sum(
            state * store.local_elements(number, elements) // max(1, elements)
            for number, (elements, _, state) in enumerate(trained.values())
        )
    by_purpose = {"host_copies": held}
    on_host = all(context.device_type in HOST for context in contexts)
    sums_on_host = store is None or not isinstance(store, KVStoreDevice)
    if store is not None:
        arrays = [(elements, nbytes) for elements, nbytes, _ in trained.values()]
        buffers = store.buffer_bytes(arrays, contexts, updates=on_store)
        by_purpose |= {f"kvstore_{purpose}": nbytes for purpose, nbytes in buffers.items() if nbytes}
    if states:
        by_purpose["optimizer_states"] = states * (1 if on_store or store is None else count)
    # A parameter's buffers and states are on the device that sums it. The store assigns each parameter to the device
    # with the smallest load so far, so a device exceeds the average by at most the largest parameter.
    state_bytes = states if not on_store else 0
    if not (sums_on_host or on_host):
        spread = sum(nbytes for name, nbytes in buffers.items() if name not in _ON_HOST) + (states if on_store else 0)
        max_bytes = max((nbytes * (1 + count) + state * on_store for _, nbytes, state in trained.values()), default=0)
        state_bytes += min(spread, spread // count + max_bytes)
    return Besides(by_purpose, 0 if on_host else state_bytes)


def executor_budget(
    budget: int,
    symbol: Symbol,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, DTypeLike],
    trained: Sequence[str],
    params: Sequence[str],
    *,
    contexts: Sequence[Context],
    kvstore: str | KVStoreBase | None,
    optimizer: optimizers.Optimizer | None,
) -> MemoryShare:
    """Divide ``budget`` among a Module's executors, after subtracting the memory outside them.

    Args:
        budget: bytes of host memory, shared by all CPU contexts; or bytes of each device.
        shapes, dtypes: shapes and dtypes of the inputs.
        trained: parameters with a gradient.
        params: all parameters.
        contexts, kvstore, optimizer: the training set-up; ``optimizer`` may be None if it is not known yet.
    """
    names, aux_names = symbol.list_arguments(), symbol.list_auxiliary_states()
    inferred, _, states = symbol.infer_shape(**shapes)
    types, _, state_types = symbol.infer_type(**dtypes)
    facts = zip(
        (*names, *aux_names), (*(inferred or ()), *(states or ())), (*(types or ()), *(state_types or ())), strict=True
    )
    facts_by_name = {name: (shape, np.dtype(dtype)) for name, shape, dtype in facts}
    sizes = {name: (prod(shape), prod(shape) * dtype.itemsize) for name, (shape, dtype) in facts_by_name.items()}
    besides = besides_executors(
        {
            name: (*sizes[name], 0 if optimizer is None else optimizer.kept_bytes(*facts_by_name[name]))
            for name in trained
        },
        sum(sizes[name][1] for name in (*params, *aux_names)),
        contexts=contexts,
        kvstore=kvstore,
    )
    shared = all(context.device_type in HOST for context in contexts)
    outside = sum(besides.by_purpose.values()) if shared else besides.each_device
    return MemoryShare(budget, outside, len(contexts) if shared else 1)


class BudgetedModule(Protocol):
    """The facts of a Module on which its memory budget depends."""

    symbol: Symbol
    contexts: list[Context]
    memory_budget: int | str | None
    _work_load_list: list[float]
    data_names: list[str]
    label_names: list[str]
    param_names: list[str]
    fixed_param_names: list[str]
    for_training: bool


def module_share(
    module: BudgetedModule,
    data: Sequence[DataDesc],
    label: Sequence[DataDesc],
    kvstore: str | KVStoreBase | None,
    optimizer: optimizers.Optimizer | None,
) -> MemoryShare | None:
    """Return each executor's share of a module's memory budget; None without a budget.

    Args:
        module: the module, with the options of the bind.
        data, label: the inputs to bind.
        kvstore, optimizer: the set-up of the training; ``optimizer`` may be None if it is not known yet.

    Raises:
        BindError: contexts get unequal parts of a batch.
    """
    if module.memory_budget is None:
        return None
    if len(set(module._work_load_list)) > 1:
        raise BindError(
            f"contexts share a memory budget equally, so work_load_list must have equal numbers, got "
            f"{module._work_load_list}"
        )
    descs = [desc for desc in (*data, *label) if desc.name in {*module.data_names, *module.label_names}]
    training, names = module.for_training, module.param_names
    return executor_budget(
        bytes_of(module.memory_budget, module.contexts[0]),
        module.symbol,
        {desc.name: tuple(desc.shape) for desc in descs},
        {desc.name: desc.dtype for desc in descs},
        [name for name in names if name not in module.fixed_param_names] if training else [],
        [name for name in names if training or not name.endswith("label")],
        contexts=module.contexts,
        kvstore=kvstore if training else None,
        optimizer=optimizer if training else None,
    )


def check_share(
    module: BudgetedModule,
    inputs: Sequence[DataDesc],
    executors: Sequence[Executor],
    kvstore: KVStoreBase | None,
    optimizer: optimizers.Optimizer,
) -> None:
    """Raise BudgetError if an optimizer's states, together with the bound executors, exceed the memory budget.

    Args:
        module: the module.
        inputs: its data and labels as bound.
        executors: its bound executors.
        kvstore, optimizer: the set-up of the training.
    """
    share = module_share(module, inputs, (), kvstore, optimizer)
    need = max(executor.memory_plan.counted for executor in executors)
    if share is not None and need > share.each:
        raise BudgetError(
            f"init_optimizer: an executor was bound with {need:,} bytes, but the memory budget of "
            f"{module.memory_budget} leaves it {share.each:,} beside {type(optimizer).__name__}: let fit bind, which "
            f"knows the optimizer, or bind with a smaller memory_budget"
        )


def plan_on_several(question: Question, contexts: Sequence[Context], budget: int | None) -> MemoryPlan:
    """Plan the largest of several executors, and add the memory of the whole Module.

    Raises:
        BudgetError: the budget is too small; the message names the smallest budget found that works.
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
    shared = all(context.device_type in HOST for context in contexts)  # all contexts share the host memory
    outside = sum(besides.by_purpose.values()) if shared else besides.each_device
    device_budget = None if budget is None else max(1, (budget - outside) // (count if shared else 1))
    try:
        plans = {
            part: replace(question, shapes=with_batch(question.shapes, part)).within(contexts[0], device_budget)
            for part in dict.fromkeys((max(parts), *parts))
        }
    except BudgetError as error:
        if error.smallest is None:
            raise
        smallest = error.smallest * (count if shared else 1) + outside
        raise BudgetError(
            f"the budget is {budget:,} bytes, but training on {count} devices needs {smallest:,}, of which "
            f"{outside:,} are copies on the host, buffers of the kvstore and states of the optimizer; the smallest "
            f"budget found that works is {pasteable(smallest)}: raise it to that, or use a smaller batch",
            smallest=smallest,
        ) from None
    memory = replace(plans[max(parts)].memory, input_bytes=question.input_bytes(plans[max(parts)]))
    part_names = list(parts)
    part_names.remove(max(parts))
    extra = {"other_devices": sum(plans[part].memory.total for part in part_names)} if part_names else {}
    external = {**memory.external_bytes, **extra, **besides.by_purpose}
    external_elsewhere = (
        0 if shared else sum(external.values()) - sum(memory.external_bytes.values()) - besides.each_device
    )
    return replace(memory, external_bytes=external, elsewhere=external_elsewhere)


def _held(planned: PlannedGraph, shapes: Mapping[str, Shape]) -> int:
    """Return the bytes of the parameters and auxiliary states."""
    sizes = planned.memory.entry_nbytes
    row = planned.graph.row
    nids = [nid for name, nid in planned.arguments.items() if nid >= 0 and is_parameter(name, shapes)]
    nids += [nid for nid in planned.aux.values() if nid >= 0]
    return sum(int(sizes[row[nid]]) for nid in nids)


slots.PLAN_OPTIMIZER.fill(named_optimizer)
slots.PLAN_ON_SEVERAL.fill(plan_on_several)
