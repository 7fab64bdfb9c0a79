"""``SVRGModule``: training by stochastic variance reduced gradients (Johnson and Zhang, 2013).

Every ``update_freq`` epochs the module takes a snapshot of its parameters and the mean gradient of all batches at the
snapshot. Each update then uses the batch's gradient, minus the gradient of the same batch at the snapshot, plus that
mean. A second module holds the snapshot and computes its gradients; both belong to the training thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weftplan.data.batch import DataBatch
from weftplan.data.data_iter import DataIter
from weftplan.errors import MXNetError, ParameterError
from weftplan.ndarray import NDArray
from weftplan.support.progress import hidden
from weftplan.symbol import Symbol
from weftplan.training.fit.fit_module import Descs
from weftplan.training.module.module import Module

_REFUSED = ("micro_batches", "mixed_precision", "checkpoint", "resume", "early_stopping", "memory_budget")
"""Keywords of ``fit`` that would need a snapshot in their state or plan."""


class SVRGModule(Module):
    """A :class:`~weftplan.training.module.module.Module` that is trained by variance reduced gradients.

    Args:
        symbol, data_names, label_names, settings: as for Module.
        update_freq: epochs between two snapshots, at least 1.
    """

    def __init__(
        self,
        symbol: Symbol,
        data_names: Sequence[str] | None = ("data",),
        label_names: Sequence[str] | None = ("softmax_label",),
        *more: Any,
        update_freq: int | None = None,
        **settings: Any,
    ) -> None:
        if isinstance(update_freq, bool) or not isinstance(update_freq, int) or update_freq < 1:
            raise ParameterError(
                f"SVRGModule: update_freq must be the epochs between two full gradients, 1 or more, got {update_freq!r}"
            )
        super().__init__(symbol, data_names, label_names, *more, **settings)
        self.update_freq = update_freq
        self._mod_aux = Module(symbol, data_names, label_names, *more, **settings)
        """The network at the snapshot; MXNet's private name."""
        self._means: list[list[NDArray] | None] | None = None
        """For each parameter its mean gradient on each context, or None if it has no gradient."""

    def bind(
        self,
        data_shapes: Descs,
        label_shapes: Descs | None = None,
        for_training: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Bind as :meth:`Module.bind`, for training also the network at the snapshot."""
        super().bind(data_shapes, label_shapes, for_training, *args, **kwargs)
        if for_training:
            self._mod_aux.bind(data_shapes, label_shapes, for_training, *args, **kwargs)

    def reshape(self, data_shapes: Descs, label_shapes: Descs | None = None) -> None:
        """Bind for other shapes, the network at the snapshot too."""
        super().reshape(data_shapes, label_shapes)
        self._mod_aux.reshape(data_shapes, label_shapes)

    def forward(self, data_batch: DataBatch, is_train: bool | None = None) -> None:
        """Run forward; in training also with the parameters of the snapshot, if there is one."""
        super().forward(data_batch, is_train)
        if (self.for_training if is_train is None else is_train) and self._means is not None:
            self._mod_aux.forward(data_batch, is_train=True)

    def backward(self, out_grads: Sequence[NDArray] | None = None) -> None:
        """Run backward, also at the snapshot, if there is one."""
        super().backward(out_grads)
        if self._means is not None:
            self._mod_aux.backward(out_grads)

    def update(self) -> None:
        """Replace the gradients by variance reduced ones, and update the parameters with them.

        Raises:
            MXNetError: there is no snapshot: neither :meth:`fit` nor :meth:`update_full_grads` was called.
        """
        if self._means is None:
            raise MXNetError("SVRGModule.update: call update_full_grads(train_data) first, as fit does")
        triples = zip(self.group.grad_arrays, self._mod_aux.group.grad_arrays, self._means, strict=True)
        for gradients, at_snapshot, means in triples:
            if gradients is None or at_snapshot is None or means is None:
                continue
            for gradient, snapshot, mean in zip(gradients, at_snapshot, means, strict=True):
                gradient -= snapshot
                gradient += mean
        super().update()

    def update_full_grads(self, train_data: DataIter) -> None:
        """Take a snapshot of the parameters and compute its mean gradient over all batches of ``train_data``.

        The iterator is reset before the pass, and exhausted after it.
        """
        train_data.reset()
        self._full_gradients(train_data)

    def _full_gradients(self, train_data: DataIter) -> None:
        self._mod_aux.init_params(None, *self.get_params(), force_init=True)
        # MXNet 1.9.1 adds to the mean of the snapshot before, so that its updates are biased from the second one on.
        sums = [
            None if gradients is None else [gradient.zeros_like() for gradient in gradients]
            for gradients in self._mod_aux.group.grad_arrays
        ]
        batches, padding = 0, 0
        for batch in train_data:
            self._mod_aux.forward_backward(batch)
            for totals, gradients in zip(sums, self._mod_aux.group.grad_arrays, strict=True):
                for total, gradient in zip(totals or (), gradients or (), strict=True):
                    total += gradient
            batches, padding = batches + 1, batch.pad or 0
        if not batches:
            raise MXNetError("SVRGModule: train_data gave no batch for the full gradients")
        share = 1.0 / (batches - padding / self.group.batch_size)
        for totals in sums:
            for total in totals or ():
                total *= share
        self._means = sums

    def begin_epoch(self, epoch: int, train_data: DataIter, *, first: bool) -> None:
        """Compute the full gradients every ``update_freq`` epochs; :meth:`fit` calls this."""
        if epoch % self.update_freq == 0 or self._means is None:
            with hidden():
                if first:
                    train_data.reset()
                self._full_gradients(train_data)  # after another epoch the iterator has been reset already
            train_data.reset()

    def fit(self, train_data: DataIter, *args: Any, **kwargs: Any) -> None:
        """Train as :meth:`Module.fit`, with full gradients every ``update_freq`` epochs.

        Raises:
            ParameterError: an option that a snapshot of the parameters does not go with.
        """
        refused = [name for name in _REFUSED if kwargs.get(name) and (name, kwargs[name]) != ("micro_batches", 1)]
        if refused:
            raise ParameterError(f"SVRGModule.fit: {refused[0]} does not go with full gradients; use Module")
        self._means = None
        super().fit(train_data, *args, **kwargs)
