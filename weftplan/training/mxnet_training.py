"""Private functions and the executor group of MXNet's training code, for scripts that import them.

They do with public parts what MXNet's do: choose a store, give it the weights, exchange gradients and update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weftplan.data.batch import DataBatch, DataDesc
from weftplan.device.context import Context
from weftplan.kvstore import KVStoreBase
from weftplan.ndarray import NDArray
from weftplan.symbol import Symbol
from weftplan.training.executor_group import ExecutorGroup, GradReq
from weftplan.training.kvstore_setup import choose_store
from weftplan.training.module.base_module import as_descs

Rows = Sequence[Sequence[NDArray]]
"""For each parameter, its array on each context."""


def _create_kvstore(
    kvstore: str | KVStoreBase | None, num_device: int, arg_params: Mapping[str, NDArray]
) -> tuple[KVStoreBase | None, bool]:
    """Return (store or None, whether the store applies the optimizer)."""
    largest = max((value.size for value in arg_params.values()), default=0)
    store, on_store = choose_store(kvstore, contexts=num_device, largest=largest)
    return store, store is not None and on_store


def _initialize_kvstore(
    kvstore: KVStoreBase,
    param_arrays: Rows,
    arg_params: Mapping[str, NDArray],
    param_names: Sequence[str],
    update_on_kvstore: bool,
) -> None:
    """Give a store the initial values; if it updates, also copy them to all contexts."""
    for name, arrays in zip(param_names, param_arrays, strict=True):
        if update_on_kvstore:
            kvstore.broadcast(name, arg_params[name], out=arrays)
        else:
            kvstore.init(name, arg_params[name])


def _update_params_on_kvstore(
    param_arrays: Rows, grad_arrays: Sequence[Any], kvstore: KVStoreBase, param_names: Sequence[str]
) -> None:
    """Push the gradients to a store that updates, and pull the weights."""
    for index, (name, weights, grads) in enumerate(zip(param_names, param_arrays, grad_arrays, strict=True)):
        if grads is not None and grads[0] is not None:
            kvstore.pushpull(name, grads, out=weights, priority=-index)


def _update_params(
    param_arrays: Rows,
    grad_arrays: Sequence[Any],
    updater: Callable[[Any, Any, Any], object],
    num_device: int,
    kvstore: KVStoreBase | None = None,
    param_names: Sequence[str] | None = None,
) -> None:
    """Sum the gradients of all contexts through ``kvstore``, if given, and update each context by ``updater``."""
    pairs = enumerate(zip(param_arrays, grad_arrays, strict=True))
    rows = [(index, pair) for index, pair in pairs if pair[1] is not None and pair[1][0] is not None]
    if kvstore is not None:
        names = range(len(param_arrays)) if param_names is None else param_names
        for index, (_, grads) in rows:
            kvstore.pushpull(names[index], grads, priority=-index)
    for device in range(num_device):
        indices = [index * num_device + device for index, _ in rows]
        if indices:
            updater(indices, [grads[device] for _, (_, grads) in rows], [weights[device] for _, (weights, _) in rows])


class DataParallelExecutorGroup(ExecutorGroup):
    """Executor group with MXNet's arguments; its ``forward`` loads the batch, too."""

    def __init__(
        self,
        symbol: Symbol,
        contexts: Sequence[Context],
        workload: Sequence[float] | None,
        data_shapes: Sequence[tuple[str, Sequence[int]]],
        label_shapes: Sequence[tuple[str, Sequence[int]]] | None,
        param_names: Sequence[str],
        for_training: bool,
        inputs_need_grad: bool,
        shared_group: ExecutorGroup | None = None,
        logger: object = None,
        fixed_param_names: Sequence[str] | None = None,
        grad_req: GradReq = "write",
        state_names: Sequence[str] | None = None,
        group2ctxs: Sequence[Mapping[str, Context]] | None = None,
    ) -> None:
        data: list[DataDesc] = as_descs(data_shapes)
        super().__init__(
            symbol,
            contexts,
            data,
            as_descs(label_shapes),
            param_names,
            for_training=for_training,
            inputs_need_grad=inputs_need_grad,
            fixed_param_names=fixed_param_names or (),
            grad_req=grad_req,
            shared_group=shared_group,
            group2ctxs=group2ctxs,
            state_names=state_names or (),
            loads=workload,
        )

    def forward(self, data_batch: DataBatch | None = None, is_train: bool | None = None) -> None:
        """Load a batch and run it.

        Args:
            data_batch: the batch; None: the arrays as they are.
            is_train: training mode; None: as the group was made.
        """
        if data_batch is not None:
            self.load(data_batch)
        super().forward(is_train=self.for_training if is_train is None else is_train)

    def set_params(
        self, arg_params: Mapping[str, NDArray], aux_params: Mapping[str, NDArray], allow_extra: bool = False
    ) -> None:
        """Copy values to all contexts; unknown names raise, unless ``allow_extra``."""
        for executor in self.executors:
            executor.copy_params_from(arg_params, aux_params, allow_extra_params=allow_extra, allow_missing=True)

    def get_params(  # type: ignore[override]
        self, arg_params: dict[str, NDArray], aux_params: dict[str, NDArray]
    ) -> None:
        """Write the parameters, averaged over the contexts, into two dictionaries."""
        for table, values in zip((arg_params, aux_params), super().get_params(apart=True), strict=True):
            table.update(values)
