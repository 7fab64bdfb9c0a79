"""Types of the arguments of ``fit``: the module and the batches that the training loop uses, and their settings.

Protocols, because modules import the loop. ``module/base_module.py`` holds the base class of all modules.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from weftplan.data.batch import DataBatch, DataDesc
from weftplan.data.data_iter import DataIter
from weftplan.device.context import Context
from weftplan.kvstore.base import KVStoreBase
from weftplan.kvstore.updater import Updater
from weftplan.ndarray import NDArray
from weftplan.symbol import Symbol
from weftplan.training.executor_group import ExecutorGroup
from weftplan.training.metrics.metric import EvalMetric, MetricLike
from weftplan.training.optimizers.base import Optimizer

Descs: TypeAlias = Sequence[tuple[str, Sequence[int]]] | tuple[str, Sequence[int]]
"""Inputs of a network: (name, shape), which a :class:`DataDesc` is, too, or several of them."""
StoreLike: TypeAlias = str | KVStoreBase | None
"""A kvstore, its name, or None: no store."""
OptimizerLike: TypeAlias = str | Optimizer
"""An optimizer, or its name."""
OptimizerSettings: TypeAlias = Mapping[str, object] | Iterable[tuple[str, object]]
"""Keyword arguments of an optimizer, as a dictionary or as pairs."""


class Logs(Protocol):
    """A logger: ``logging.Logger``, or the module ``logging``."""

    def info(self, msg: object, *args: object) -> None:
        """Log a message."""
        ...

    def warning(self, msg: object, *args: object) -> None:
        """Log a warning."""
        ...


class SavedModule(Protocol):
    """A module that writes checkpoints."""

    def save_checkpoint(self, prefix: str | os.PathLike[str], epoch: int, save_optimizer_states: bool = False) -> Path:
        """Write the network, its parameters and, if wanted, the states of the optimizer; return the file's path."""
        ...


class TrainedModule(SavedModule, Protocol):
    """The module that owns the parameters and the training state: a :class:`.module.Module`."""

    @property
    def symbol(self) -> Symbol:
        """The network."""
        ...

    @property
    def contexts(self) -> list[Context]:
        """The devices, each of which has a part of the batch."""
        ...

    @property
    def group(self) -> ExecutorGroup:
        """The executors; raises MXNetError before ``bind``."""
        ...

    @property
    def data_shapes(self) -> list[DataDesc]:
        """The inputs that were bound."""
        ...

    @property
    def param_names(self) -> list[str]:
        """Names of the parameters."""
        ...

    @property
    def fixed_param_names(self) -> list[str]:
        """Names of parameters that do not change."""
        ...

    @property
    def aux_names(self) -> list[str]:
        """Names of the auxiliary states."""
        ...

    @property
    def state_names(self) -> list[str]:
        """Names of the arguments that are neither fed nor trained."""
        ...

    @property
    def apart(self) -> bool:
        """Whether the devices have different parameters between two exchanges."""
        ...

    @property
    def precision(self) -> str | None:
        """The dtype of mixed precision; None if it is off."""
        ...

    @property
    def _kvstore(self) -> KVStoreBase | None: ...

    @property
    def _compression_params(self) -> Mapping[str, Any] | None: ...

    def _states_holder(self) -> Updater: ...

    def get_params(self) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
        """Return (parameters, auxiliary states) as copies on the host."""
        ...

    def set_params(self, arg_params: Mapping[str, NDArray], aux_params: Mapping[str, NDArray] | None) -> None:
        """Assign parameters and auxiliary states."""
        ...


class FitModule(Protocol):
    """A module as the training loop uses it: a :class:`.base_module.BaseModule`."""

    @property
    def logger(self) -> Logs:
        """The logger of messages for the user."""
        ...

    @property
    def binded(self) -> bool:
        """Whether it is bound."""
        ...

    @property
    def symbol(self) -> Symbol | None:
        """The network, None if there is none, or none yet."""
        ...

    @property
    def data_shapes(self) -> list[DataDesc]:
        """The inputs that were bound."""
        ...

    def owner(self) -> TrainedModule:
        """Return the module that owns the parameters; raises MXNetError for kinds of modules without one."""
        ...

    def bind(self, data_shapes: Descs, label_shapes: Descs | None = None, *args: Any, **kwargs: Any) -> None:
        """Plan and allocate executors for these shapes."""
        ...

    def bound_grad_req(self) -> object:
        """Return the grad_req that was bound."""
        ...

    def begin_epoch(self, epoch: int, train_data: DataIter, *, first: bool) -> None:
        """Prepare an epoch."""
        ...

    def forward_backward(self, data_batch: DataBatch) -> None:
        """Run forward and backward, asynchronously."""
        ...

    def clear_gradients(self, data_batch: DataBatch) -> None:
        """Set to zero the gradients into which this batch will be accumulated."""
        ...

    def update(self) -> None:
        """Exchange gradients and update parameters, asynchronously."""
        ...

    def update_metric(self, eval_metric: EvalMetric, labels: Sequence[NDArray]) -> None:
        """Update a metric with the outputs of the last forward."""
        ...

    def prepare(self, data_batch: DataBatch, sparse_row_id_fn: object = None) -> None:
        """Prepare for the next batch."""
        ...

    def set_params(self, arg_params: Mapping[str, NDArray], aux_params: Mapping[str, NDArray] | None) -> None:
        """Assign parameters and auxiliary states."""
        ...

    def get_outputs(self, merge_multi_context: bool = True) -> Any:
        """Return the outputs of the last forward."""
        ...

    def get_params(self) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
        """Return (parameters, auxiliary states) as copies on the host."""
        ...

    def score(
        self,
        eval_data: DataIter,
        eval_metric: MetricLike,
        *,
        batch_end_callback: Callable[..., object] | Sequence[Callable[..., object]] | None = None,
        score_end_callback: Callable[..., object] | Sequence[Callable[..., object]] | None = None,
        epoch: int = 0,
    ) -> list[tuple[str, float]]:
        """Return the values of a metric over all batches."""
        ...

    def set_loss_scale(self, scale: float) -> None:
        """Set the loss scale of mixed precision."""
        ...

    def synchronize(self) -> None:
        """Average all values that differ between contexts."""
        ...


def optimizer_of(module: TrainedModule) -> Optimizer:
    """Return a module's optimizer as an Optimizer; the updater declares only the interface that it calls."""
    optimizer: Any = module._states_holder().optimizer
    chosen: Optimizer = optimizer
    return chosen
