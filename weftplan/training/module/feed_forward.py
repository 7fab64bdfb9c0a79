"""``mx.model.FeedForward``: the estimator API that predates Module, on top of Module.

One thread uses it at a time.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from weftplan.data.batch import Host
from weftplan.data.data_iter import DataIter
from weftplan.data.file_iterators import ResizeIter
from weftplan.data.ndarray_iter import NDArrayIter
from weftplan.device.context import Context
from weftplan.errors import MXNetError, ParameterError, ShapeError
from weftplan.ndarray import NDArray
from weftplan.symbol import Symbol
from weftplan.training.executor_group import without_padding
from weftplan.training.fit.callbacks import Callbacks, LogValidationMetricsCallback
from weftplan.training.fit.fit_module import Logs, OptimizerLike, StoreLike
from weftplan.training.fit.monitor import Monitor
from weftplan.training.fit.parameter_files import load_checkpoint, save_checkpoint
from weftplan.training.initializers.initializer import Initializer, Uniform
from weftplan.training.metrics.metric import MetricLike
from weftplan.training.module.base_module import BaseModule
from weftplan.training.module.bucketing_module import BucketingModule
from weftplan.training.module.module import Module

Data = DataIter | Host | NDArray
_UNSET: Any = object()


class FeedForward:
    """A network with its parameters: ``fit``, ``predict``, ``score``, ``save``, ``load``.

    Args:
        symbol: the network, or a function from a bucket's key to its network.
        ctx: a context or a list; prediction uses the first.
        num_epoch: the epoch to stop before; begin_epoch: the first epoch.
        epoch_size: batches of an epoch; default: all.
        numpy_batch_size: batch size for data given as arrays.
        arg_params, aux_params: initial values; the initializer fills the others.
        allow_extra_params: whether values unknown to the network are ignored.
        kwargs: settings of the optimizer.
    """

    def __init__(
        self,
        symbol: Symbol | Callable[[Any], Symbol],
        ctx: Context | Sequence[Context] | None = None,
        num_epoch: int | None = None,
        epoch_size: int | None = None,
        optimizer: OptimizerLike = "sgd",
        initializer: Initializer | None = None,
        numpy_batch_size: int = 128,
        arg_params: Mapping[str, NDArray] | None = None,
        aux_params: Mapping[str, NDArray] | None = None,
        allow_extra_params: bool = False,
        begin_epoch: int = 0,
        **kwargs: Any,
    ) -> None:
        warnings.warn("FeedForward is deprecated; use mx.mod.Module", DeprecationWarning, stacklevel=2)
        if not isinstance(symbol, Symbol) and not callable(symbol):
            raise ParameterError(f"FeedForward needs a Symbol or a function that gives one, got {symbol!r}")
        self.symbol: Symbol | None = symbol if isinstance(symbol, Symbol) else None
        self.sym_gen = None if isinstance(symbol, Symbol) else symbol
        self.ctx = ctx
        self.num_epoch, self.epoch_size, self.begin_epoch = num_epoch, epoch_size, begin_epoch
        self.optimizer, self.kwargs = optimizer, dict(kwargs)
        self.initializer = initializer or Uniform(0.01)
        self.numpy_batch_size = numpy_batch_size
        self.arg_params = None if arg_params is None else dict(arg_params)
        self.aux_params = None if aux_params is None else dict(aux_params)
        self.allow_extra_params = allow_extra_params
        self._predictor: tuple[Any, Module] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_predictor": None}

    def _batches(self, data: Any, label: ArrayLike | NDArray | None, *, training: bool) -> DataIter:
        """Wrap arrays in an iterator; return iterators unchanged."""
        if isinstance(data, DataIter) or (hasattr(data, "provide_data") and hasattr(data, "reset")):
            batches: DataIter = data
            return batches
        data = np.asarray(data) if isinstance(data, list) else data
        if not isinstance(data, (np.ndarray, NDArray)):
            raise ParameterError(f"expected a DataIter or an array of samples, got {type(data).__name__}")
        if label is None:
            if training:
                raise ParameterError("fit: labels are missing: give y beside an array of samples")
            label = np.zeros(data.shape[0], np.float32)
        label = label.asnumpy() if isinstance(label, NDArray) else np.asarray(label)
        if label.ndim == 2 and label.shape[1] == 1:
            label = label[:, 0]
        if label.ndim != 1 or len(label) != data.shape[0]:
            raise ShapeError(f"{data.shape[0]} samples need as many labels, got shape {label.shape}")
        size = min(data.shape[0], self.numpy_batch_size)
        last_batch = "roll_over" if training else "pad"
        return NDArrayIter(data, label, size, shuffle=training, last_batch_handle=last_batch)

    def _module(self, batches: DataIter, work_load_list: Sequence[float] | None) -> BaseModule:
        data = [desc[0] for desc in batches.provide_data]
        labels = [desc[0] for desc in batches.provide_label]
        make = self.sym_gen
        if make is not None:
            self.symbol = make(batches.default_bucket_key)  # type: ignore[attr-defined]

            def generate(key: Hashable) -> tuple[Symbol, list[str], list[str]]:
                return make(key), data, labels

            return BucketingModule(
                generate,
                batches.default_bucket_key,  # type: ignore[attr-defined]
                context=self.ctx,
                work_load_list=work_load_list,
            )
        assert self.symbol is not None
        arguments = self.symbol.list_arguments()
        labels = [name for name in labels if name in arguments]
        return Module(self.symbol, data, labels, context=self.ctx, work_load_list=work_load_list)

    def fit(
        self,
        X: Data,
        y: ArrayLike | NDArray | None = None,
        eval_data: DataIter | Sequence[Any] | None = None,
        eval_metric: MetricLike = "acc",
        epoch_end_callback: Callbacks = None,
        batch_end_callback: Callbacks = None,
        kvstore: StoreLike = "local",
        logger: Logs | None = None,
        work_load_list: Sequence[float] | None = None,
        monitor: Monitor | None = None,
        eval_end_callback: Any = _UNSET,
        eval_batch_end_callback: Callbacks = None,
    ) -> None:
        """Train on batches, or on samples ``X`` with labels ``y``; ``eval_data`` is an iterator or such a pair.

        Args:
            X: iterator over batches, or array of samples.
            y: labels of the samples, if ``X`` is an array.
            eval_data: iterator, or (samples, labels), for a validation after each epoch.
            eval_metric: name of a metric, or a metric.
            epoch_end_callback: called after each epoch with (epoch, symbol, arg_params, aux_params); one or
                a list.
            batch_end_callback: called after each batch with a ``BatchEndParam``; one or a list.
            kvstore: name of a kvstore, a store, or None.
            logger: takes the records instead of the package's logger.
            work_load_list: share of the batch for each device; None: equal shares.
            monitor: watches intermediate results.
            eval_end_callback: called after each validation; None: nothing; by default the metric is logged.
            eval_batch_end_callback: called after each batch of a validation; one or a list.
        """
        batches = self._batches(X, y, training=True)
        batches.reset()  # as MXNet does here, though not in Module.fit
        validation: Any = eval_data
        if isinstance(eval_data, (tuple, list)):
            if len(eval_data) != 2 or eval_data[0] is None:
                raise ParameterError("eval_data must be a DataIter or a pair of samples and labels")
            validation = self._batches(*eval_data, training=False)
        module = self._module(batches, work_load_list)
        if logger is not None:
            module.logger = logger
        if self.epoch_size is not None:
            batches = ResizeIter(batches, self.epoch_size, reset_internal=False)
        args, states = self.arg_params, self.aux_params
        if self.allow_extra_params and self.symbol is not None:
            names = {*self.symbol.list_arguments()}
            args = {name: value for name, value in (args or {}).items() if name in names}
            held = {*self.symbol.list_auxiliary_states()}
            states = {name: value for name, value in (states or {}).items() if name in held}
        module.fit(
            batches,
            validation,
            eval_metric,
            epoch_end_callback,
            batch_end_callback,
            kvstore,
            self.optimizer,
            self.kwargs or (("learning_rate", 0.01),),
            LogValidationMetricsCallback() if eval_end_callback is _UNSET else eval_end_callback,
            eval_batch_end_callback,
            self.initializer,
            args,
            states,
            allow_missing=True,
            begin_epoch=self.begin_epoch,
            num_epoch=self.num_epoch,
            monitor=monitor,
        )
        self.arg_params, self.aux_params = module.get_params()
        self._predictor = None

    def _bound(self, batches: DataIter) -> Module:
        """Return the prediction module, cached until the shapes change."""
        if self.symbol is None or self.arg_params is None:
            raise MXNetError("the model has no parameters yet: call fit, or give arg_params")
        key = [(desc[0], tuple(desc[1])) for desc in batches.provide_data]
        if self._predictor is not None and self._predictor[0] == key:
            return self._predictor[1]
        head_context = self.ctx if self.ctx is None or isinstance(self.ctx, Context) else self.ctx[0]
        data, arguments = [name for name, _ in key], self.symbol.list_arguments()
        labels = [name for name in arguments if name.endswith("label") and name not in self.arg_params]
        module = Module(self.symbol, data, labels or None, context=head_context)
        module.bind(batches.provide_data, None, for_training=False)
        module.set_params(self.arg_params, self.aux_params, allow_extra=self.allow_extra_params)
        self._predictor = (key, module)
        return module

    def predict(
        self,
        X: Data,
        num_batch: int | None = None,
        return_data: bool = False,
        reset: bool = True,
    ) -> Any:
        """Return the outputs for all samples as NumPy arrays (a single array if the network has a single output).

        With ``return_data``: (outputs, data, labels).

        Args:
            X: iterator, or array of samples.
            num_batch: stop after this number of batches; None: all.
            return_data: return the samples and labels too.
            reset: reset the iterator first.
        """
        batches = self._batches(X, None, training=False)
        module = self._bound(batches)
        outputs: list[list[Host]] = []
        data: list[list[Host]] = []
        labels: list[list[Host]] = []
        for results, _, batch in module.iter_predict(batches, num_batch, reset):
            outputs.append([value.asnumpy() for value in results])
            if return_data:
                samples, pad = batch.data[0].shape[0], getattr(batch, "pad", None) or 0
                data.append([without_padding(value, samples, pad).asnumpy() for value in batch.data])
                labels.append([without_padding(value, samples, pad).asnumpy() for value in batch.label])
        joined = [_joined(parts) for parts in ((outputs, data, labels) if return_data else (outputs,))]
        return tuple(joined) if return_data else joined[0]

    def score(
        self,
        X: Data,
        eval_metric: MetricLike = "acc",
        num_batch: int | None = None,
        batch_end_callback: Callbacks = None,
        reset: bool = True,
    ) -> float | list[float]:
        """Compute a metric over the batches.

        Args:
            X: iterator, or array of samples.
            eval_metric: name of a metric, or a metric.
            num_batch: stop after this number of batches; None: all.
            batch_end_callback: called after each batch with a ``BatchEndParam``.
            reset: reset the iterator first.
        """
        batches = self._batches(X, None, training=False)
        pairs = self._bound(batches).score(batches, eval_metric, num_batch, batch_end_callback, reset=reset)
        values = [value for _, value in pairs]
        return values[0] if len(values) == 1 else values

    def save(self, prefix: str | os.PathLike[str], epoch: int | None = None, remove_amp_cast: bool = True) -> Path:
        """Write a checkpoint of an epoch, by default the last; returns the parameter file's path.

        Args:
            prefix: path and start of the files' names.
            epoch: number in the name of the parameter file; None: the last epoch.
            remove_amp_cast: see :meth:`Symbol.tojson <weftplan.symbol.Symbol.tojson>`.
        """
        epoch = self.num_epoch if epoch is None else epoch
        if epoch is None or self.arg_params is None:
            raise MXNetError("save: the epoch is missing" if epoch is None else "save: there are no parameters yet")
        return save_checkpoint(prefix, epoch, self.symbol, self.arg_params, self.aux_params or {})

    @staticmethod
    def load(
        prefix: str | os.PathLike[str], epoch: int, ctx: Context | Sequence[Context] | None = None, **kwargs: Any
    ) -> FeedForward:
        """Load the model of a checkpoint, to resume at that epoch; ``kwargs`` go to the constructor.

        Args:
            prefix: path and start of the files' names.
            epoch: number in the name of the parameter file.
            ctx: device or devices.
            **kwargs: arguments of the constructor.
        """
        symbol, args, aux = load_checkpoint(prefix, epoch)
        return FeedForward(symbol, ctx, arg_params=args, aux_params=aux, begin_epoch=epoch, **kwargs)

    @staticmethod
    def create(
        symbol: Symbol | Callable[[Any], Symbol],
        X: Data,
        y: Any = None,
        ctx: Context | Sequence[Context] | None = None,
        num_epoch: int | None = None,
        epoch_size: int | None = None,
        optimizer: Any = "sgd",
        initializer: Initializer | None = None,
        eval_data: Any = None,
        eval_metric: Any = "acc",
        epoch_end_callback: Callbacks = None,
        batch_end_callback: Callbacks = None,
        kvstore: Any = "local",
        logger: Any = None,
        work_load_list: Sequence[float] | None = None,
        eval_end_callback: Any = _UNSET,
        eval_batch_end_callback: Callbacks = None,
        **kwargs: Any,
    ) -> FeedForward:
        """Construct and train a model.

        Args:
            symbol: the network, or a function from a bucket's key to its network.
            X: iterator over batches, or array of samples.
            y: labels of the samples, if ``X`` is an array.
            ctx: device or devices.
            num_epoch: the epoch to stop before.
            epoch_size: batches of an epoch; None: all.
            optimizer: name of an optimizer, or an optimizer.
            initializer: gives values to all parameters; None: ``Uniform(0.01)``.
            eval_data: iterator, or (samples, labels), for a validation after each epoch.
            eval_metric: name of a metric, or a metric.
            epoch_end_callback: called after each epoch with (epoch, symbol, arg_params, aux_params); one or
                a list.
            batch_end_callback: called after each batch with a ``BatchEndParam``; one or a list.
            kvstore: name of a kvstore, a store, or None.
            logger: takes the records instead of the package's logger.
            work_load_list: share of the batch for each device; None: equal shares.
            eval_end_callback: called after each validation; None: nothing; by default the metric is logged.
            eval_batch_end_callback: called after each batch of a validation; one or a list.
            **kwargs: settings of the optimizer.
        """
        model = FeedForward(symbol, ctx, num_epoch, epoch_size, optimizer, initializer, **kwargs)
        model.fit(
            X,
            y,
            eval_data,
            eval_metric,
            epoch_end_callback,
            batch_end_callback,
            kvstore,
            logger,
            work_load_list,
            eval_end_callback=eval_end_callback,
            eval_batch_end_callback=eval_batch_end_callback,
        )
        return model


def _joined(batches: list[list[Host]]) -> Any:
    """Concatenate the arrays of all batches; a single array is returned without a list."""
    joined = [np.concatenate(parts) for parts in zip(*batches, strict=True)]
    return joined[0] if len(joined) == 1 else joined
