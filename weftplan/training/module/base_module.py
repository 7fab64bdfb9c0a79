"""BaseModule: the ``fit``, ``score`` and ``predict`` loops on top of forward, backward and update.

This file owns the loops; a subclass owns the parameters and executors. One thread at a time uses a module. It waits
only when a metric or a caller reads values. The file is long because MXNet gives ``fit`` many arguments and a subclass
many steps, each a few lines long.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from weftplan import ndarray as nd
from weftplan.data.batch import DataBatch, DataDesc
from weftplan.data.data_iter import DataIter
from weftplan.data.ndarray_iter import NDArrayIter
from weftplan.errors import MXNetError, ParameterError, ShapeTypeError
from weftplan.kvstore.distributed.transport.elastic_job import is_joining
from weftplan.ndarray import NDArray
from weftplan.support.array_types import RawArray
from weftplan.support.keyword_errors import known_keywords
from weftplan.support.package_log import log
from weftplan.support.progress import Progress, is_shown
from weftplan.symbol import Symbol
from weftplan.training.executor_group import without_padding
from weftplan.training.fit import microbatch, precision
from weftplan.training.fit.callbacks import BatchEndParam, Callbacks, EarlyStopping, call
from weftplan.training.fit.checkpoint_writer import make_checkpoints
from weftplan.training.fit.display import Display
from weftplan.training.fit.events import Events
from weftplan.training.fit.fit_module import Logs, OptimizerLike, OptimizerSettings, StoreLike, TrainedModule
from weftplan.training.fit.loop import Fitting, Validation
from weftplan.training.fit.monitor import Monitor
from weftplan.training.fit.parameter_files import read_params, write_params
from weftplan.training.initializers.initializer import Initializer, Uniform
from weftplan.training.metrics import metric as metrics
from weftplan.training.metrics.metric import MetricLike
from weftplan.training.module.module_steps import ModuleSteps, Params

PADDING: ContextVar[int] = ContextVar("padding", default=0)
"""Samples at the end of the batch that ``update_metric`` leaves out, set by ``score`` around its call.

It is no argument, so that a subclass can override ``update_metric`` with MXNet's arguments.
"""

_ELSEWHERE = {
    **dict.fromkeys(
        ("learning_rate", "lr", "momentum", "wd", "weight_decay", "lr_scheduler", "clip_gradient"),
        "settings of the optimizer go into optimizer_params={'learning_rate': 0.1, ...}",
    ),
    **dict.fromkeys(
        ("batch_size", "shuffle", "label", "labels"),
        "the iterator has it: mx.io.NDArrayIter(data, label, batch_size=64, shuffle=True)",
    ),
    **dict.fromkeys(
        ("context", "ctx", "device", "devices"), "devices belong to the module: mx.mod.Module(symbol, context=...)"
    ),
}
"""Hints for arguments that users pass to ``fit`` by mistake."""


class BaseModule(ModuleSteps):
    """Base of modules: the high-level loop over the low-level steps that a subclass provides."""

    def __init__(self, logger: Logs | None = None) -> None:
        if logger is not None and not callable(getattr(logger, "info", None)):
            raise MXNetError(f"logger must be one of the module logging, or logging itself, got {logger!r}")
        self.logger: Any = log if logger is None else logger
        self.inputs_need_grad = False
        self.binded = False
        self.params_initialized = False
        self.optimizer_initialized = False
        self.for_training = False
        self.symbol: Symbol | None = None

    def rollback_parts(self) -> list[object]:
        """Return the objects whose fields a step of this module may change: they get them back if it fails.

        :meta private:
        """
        return [self]

    # -- steps, given by the subclass -------------------------------------------------------------------------------

    def forward(self, data_batch: DataBatch, is_train: bool | None = None) -> None:
        """Run forward, asynchronously."""
        raise NotImplementedError

    def backward(self, out_grads: Sequence[NDArray] | None = None) -> None:
        """Run backward, asynchronously."""
        raise NotImplementedError

    def update(self) -> None:
        """Exchange gradients and update parameters, asynchronously."""
        raise NotImplementedError

    def get_outputs(self, merge_multi_context: bool = True) -> Any:
        """Outputs of the last forward."""
        raise NotImplementedError

    def get_states(self, merge_multi_context: bool = True) -> Any:
        """Return the states, which ``forward`` reads and no iterator feeds; empty unless a subclass has states."""
        self._need("get_states", binded=True, params=True)
        return []

    def set_states(self, states: Sequence[Sequence[NDArray]] | None = None, value: float | None = None) -> None:
        """Give the states values; raises ParameterError for states of a module that has none."""
        self._need("set_states", binded=True, params=True)
        if states:
            raise ParameterError(f"set_states: {len(states)} states given, {type(self).__name__} has none")

    def update_metric(
        self, eval_metric: metrics.EvalMetric, labels: Sequence[NDArray], pre_sliced: bool = False
    ) -> None:
        """Update ``eval_metric`` with the outputs of the last forward; within :meth:`score` padding does not count.

        Args:
            eval_metric: metric that is updated in place, once for each context.
            labels: labels of the batch, one array for each label of the network.
            pre_sliced: whether ``labels`` is a list of such lists, one for each context.
        """
        raise NotImplementedError

    def get_params(self) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
        """Return (arg_params, aux_params) as copies on the host."""
        raise NotImplementedError

    def install_monitor(self, mon: Monitor) -> None:
        """Let ``mon`` watch every executor."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Average all values that differ between contexts. ``fit`` calls this after each epoch."""

    def _expect(
        self,
        memory_budget: int | str | None,
        kvstore: StoreLike,
        optimizer: OptimizerLike,
        settings: OptimizerSettings,
        *,
        rebind: bool,
    ) -> None:
        """Announce kvstore and optimizer before binding, so that the memory budget covers them."""
        if memory_budget is not None:
            raise MXNetError(f"{type(self).__name__}.fit takes no memory_budget")

    def owner(self) -> TrainedModule:
        """Return the Module that owns the parameters and the training state."""
        raise MXNetError(f"{type(self).__name__}.fit writes no checkpoints: it does not say what its state is")

    def begin_epoch(self, epoch: int, train_data: DataIter, *, first: bool) -> None:
        """Do nothing; a subclass may prepare the epoch. ``fit`` calls this before the first batch of each epoch.

        Args:
            first: whether ``train_data`` is as the caller of ``fit`` gave it; before later epochs it was reset.
        """

    def bound_grad_req(self) -> object:
        """Return the grad_req that was bound."""
        return None

    def clear_gradients(self, data_batch: DataBatch) -> None:
        """Set to zero the gradients into which this batch will be accumulated."""
        raise MXNetError(f"{type(self).__name__}.fit takes no micro_batches")

    def set_precision(self, dtype: str | None, *, rebind: bool = False) -> None:
        """Set the compute dtype from the next binding on, with float32 parameters; None: the dtype of the data."""
        if dtype is not None:
            raise MXNetError(f"{type(self).__name__}.fit takes no mixed_precision")

    def set_loss_scale(self, scale: float) -> None:
        """Set the loss scale of mixed precision; ``fit`` sets it and divides gradients by it."""

    def _accumulate(self, micro_batches: int) -> None:
        """Announce the number of micro-batches per step, before the optimizer is created."""
        if micro_batches > 1:
            raise MXNetError(f"{type(self).__name__}.fit takes no micro_batches")

    # -- files ----------------------------------------------------------------------------------------------------

    def save_params(self, fname: str | os.PathLike[str]) -> None:
        """Write parameters and auxiliary states, named as in a checkpoint."""
        write_params(fname, *self.get_params())

    def load_params(self, fname: str | os.PathLike[str]) -> None:
        """Assign parameters from a file of :meth:`save_params` or a checkpoint."""
        self.set_params(*read_params(fname))

    def prepare(self, data_batch: DataBatch, sparse_row_id_fn: object = None) -> None:
        """Do nothing; a subclass may prepare a batch. Loops call this before a forward, ``fit`` not before the first.

        Args:
            data_batch: the batch of the next forward.
            sparse_row_id_fn: as the loops take it, for a subclass; rows need not be pulled here.
        """

    # -- loops ----------------------------------------------------------------------------------------------------

    def forward_backward(self, data_batch: DataBatch) -> None:
        """``forward(is_train=True)`` then ``backward``."""
        self.forward(data_batch, is_train=True)
        self.backward()

    @known_keywords(**_ELSEWHERE)
    def fit(
        self,
        train_data: DataIter,
        eval_data: DataIter | None = None,
        eval_metric: MetricLike = "acc",
        epoch_end_callback: Callbacks = None,
        batch_end_callback: Callbacks = None,
        kvstore: StoreLike = "local",
        optimizer: OptimizerLike = "sgd",
        optimizer_params: OptimizerSettings = (("learning_rate", 0.01),),
        eval_end_callback: Callbacks = None,
        eval_batch_end_callback: Callbacks = None,
        initializer: Initializer | None = None,
        arg_params: Params | None = None,
        aux_params: Params | None = None,
        allow_missing: bool = False,
        force_rebind: bool = False,
        force_init: bool = False,
        begin_epoch: int = 0,
        num_epoch: int | None = None,
        validation_metric: MetricLike | None = None,
        monitor: Monitor | None = None,
        sparse_row_id_fn: object = None,
        *,
        memory_budget: int | str | None = None,
        progress: bool | Display | None = None,
        micro_batches: int = 1,
        mixed_precision: str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        every: int | None = None,
        keep: int | None = 3,
        resume: bool | str = False,
        early_stopping: EarlyStopping | None = None,
        report: str | os.PathLike[str] | Events | None = None,
    ) -> None:
        """Train for the epochs ``begin_epoch`` to ``num_epoch``, validating after each when ``eval_data`` is given.

        Args:
            train_data: batches, which also define the shapes to bind. It is reset after each epoch, as in MXNet, and
                before the first epoch only if it is exhausted.
            eval_metric: name, metric, list of them, or function of (label, prediction).
            epoch_end_callback: called with (epoch, symbol, arg_params, aux_params).
            batch_end_callback: called with a :class:`BatchEndParam`.
            kvstore: name or store through which gradients are exchanged; None updates on one device locally.
            optimizer, optimizer_params: name and keyword arguments, or an optimizer.
            initializer: for parameters without a value; default ``Uniform(0.01)``.
            monitor: watches every executor and logs its statistics.
            sparse_row_id_fn: passed on to :meth:`prepare`.
            memory_budget: most bytes that training may take, such as ``"2GB"`` or ``"80%"``; see
                :class:`~weftplan.training.module.module.Module`.

            progress: show progress: a live line on a terminal or in a notebook, and a permanent line per epoch; files
                and pipes get only the permanent lines. Or a :class:`~weftplan.training.fit.display.Display`. None: a
                live line on stderr once training has taken a second, unless the log shows messages or
                ``WEFTPLAN_PROGRESS=0``; False: no output.
            micro_batches: split each batch into this number of equal pieces, sum their gradients, and update once. This
                takes the memory of a piece and gives the step of the batch. Batch normalization uses the statistics of
                each piece, and updates its running averages for each piece. A loss that divides by the batch size
                (``normalization="batch"``) divides by the size of the piece.
            mixed_precision: ``"float16"`` or ``"bfloat16"`` (needs ml_dtypes): matrix products run in this dtype,
                sensitive operators in float32. Parameters and outputs stay float32. With float16 a dynamic loss scale,
                a power of two, is used; if a gradient overflows, the update is skipped.
            checkpoint: prefix of checkpoints, ``<prefix>-step<updates>.safetensors``. They hold the full state for a
                bit-identical resume. They are written atomically in the background; if the disk is full, training
                logs a warning and continues, and the last good checkpoint stays.
            every: updates between two checkpoints; None: a checkpoint at the end of each epoch.
            keep: number of newest checkpoints to keep; None: all.
            resume: resume from the newest checkpoint, or start from scratch if there is none. Different settings raise
                an error that lists them; with ``"changed"`` they are logged, and the current settings apply.
            early_stopping: rule that ends training when a metric stops improving; the best epoch is saved as
                ``<prefix>-best.safetensors``.
            report: folder for ``events.jsonl`` and a page, ``index.html``, with loss, speed, time by phase, memory,
                queues and gradient norms; or an :class:`~weftplan.training.fit.events.Events`.

        NaN or infinite losses or outputs, and labels outside the classes, are logged once as a warning.

        Raises:
            BudgetError: training does not fit the memory budget; nothing has been allocated.
            MXNetError: ``num_epoch`` is missing.
            ParameterError: ``num_epoch`` or ``begin_epoch`` is not a whole number >= 0.
            ShapeError: a batch cannot be cut into ``micro_batches`` equal pieces.
            ParameterError: the checkpoint belongs to another network or other settings; or checkpoints exist without
                ``resume``.
            FormatError: no checkpoint can be read, or it is of another version.
        """
        variables = dict(locals())
        if num_epoch is None:
            raise MXNetError("fit needs num_epoch: the epoch to stop before")
        begin_epoch, num_epoch = whole_epochs("begin_epoch", begin_epoch), whole_epochs("num_epoch", num_epoch)
        _check_iterator("fit: train_data", train_data)
        if eval_data is not None:
            _check_iterator("fit: eval_data", eval_data)
        train_metric = metrics.create(eval_metric)
        check_metric = train_metric if validation_metric is None else metrics.create(validation_metric)
        count, dtype = microbatch.checked(micro_batches), precision.checked(mixed_precision)
        joins = is_joining()
        checkpoints = make_checkpoints(checkpoint, every, keep, resume, joins=joins)
        self._expect(memory_budget, kvstore, optimizer, optimizer_params, rebind=force_rebind)
        if dtype is not None or force_rebind:
            self.set_precision(dtype, rebind=force_rebind)
        microbatch.bind_for(self, train_data, count, rebind=force_rebind)
        if monitor is not None:
            self.install_monitor(monitor)
        self.init_params(
            initializer=initializer or Uniform(0.01),
            arg_params=arg_params,
            aux_params=aux_params,
            allow_missing=allow_missing,
            force_init=force_init,
        )
        self._accumulate(count)
        self.init_optimizer(kvstore=kvstore, optimizer=optimizer, optimizer_params=optimizer_params)
        fitting = Fitting(
            self,
            train_data,
            train_metric,
            (begin_epoch, num_epoch),
            validation=None
            if eval_data is None
            else Validation(eval_data, check_metric, eval_end_callback, eval_batch_end_callback),
            micro_batches=count,
            scaling=None if dtype is None else precision.LossScale.of(dtype),
            checkpoints=checkpoints,
            stopping=early_stopping,
            display=progress
            if isinstance(progress, Display)
            else Display(num_epoch, silent=not is_shown(progress), passing=progress is None),
            events=report if report is None or isinstance(report, Events) else Events(report),
            monitor=monitor,
            batch_end_callback=batch_end_callback,
            epoch_end_callback=epoch_end_callback,
            variables={**variables, "eval_metric": train_metric, "validation_metric": check_metric},
        )
        resumed = joins or (bool(resume) and fitting.resume(changed=resume == "changed"))
        fitting.begin_events(resumed=resumed)
        fitting.run()

    @known_keywords()
    def score(
        self,
        eval_data: DataIter,
        eval_metric: MetricLike,
        num_batch: int | None = None,
        batch_end_callback: Callbacks = None,
        score_end_callback: Callbacks = None,
        reset: bool = True,
        epoch: int = 0,
        sparse_row_id_fn: object = None,
        *,
        progress: bool | None = None,
    ) -> list[tuple[str, float]]:
        """Metric values over ``eval_data``: [(name, value), …]. Padding samples are not counted.

        Args:
            sparse_row_id_fn: passed on to :meth:`prepare`.
            progress: show a live line: True, False, or None: as ``fit``.
        """
        self._need("score", binded=True, params=True)
        _check_iterator("score: eval_data", eval_data)
        if reset:
            eval_data.reset()
        metric = metrics.create(eval_metric)
        variables = {**locals(), "eval_metric": metric}
        metric.reset()
        count = 0
        for nbatch, batch in enumerate(Progress("score", num_batch, show=progress).each(eval_data)):
            if num_batch is not None and nbatch == num_batch:
                break
            variables.update(nbatch=nbatch, eval_batch=batch, data_batch=batch, actual_num_batch=count)
            self.prepare(batch, sparse_row_id_fn=sparse_row_id_fn)
            self.forward(batch, is_train=False)
            padding = PADDING.set(getattr(batch, "pad", None) or 0)
            try:
                self.update_metric(metric, batch.label)
            finally:
                PADDING.reset(padding)
            call(batch_end_callback, BatchEndParam(epoch, nbatch, metric, {**variables}))
            count += 1
        call(score_end_callback, BatchEndParam(epoch, count, metric, {**variables, "actual_num_batch": count}))
        return metric.get_name_value()

    @known_keywords()
    def iter_predict(
        self,
        eval_data: DataIter,
        num_batch: int | None = None,
        reset: bool = True,
        sparse_row_id_fn: object = None,
        *,
        progress: bool | None = None,
    ) -> Iterator[tuple[list[NDArray], int, DataBatch]]:
        """Yield (outputs without padding, batch number, batch) for each batch; ``progress`` as for :meth:`score`.

        Args:
            eval_data: batches.
            num_batch: stop after this number of batches; None: all.
            reset: reset the iterator first.
            sparse_row_id_fn: passed on to :meth:`prepare`.
            progress: as for :meth:`score`.
        """
        yield from self._predictions(eval_data, num_batch, reset, sparse_row_id_fn, progress)

    def _predictions(
        self, eval_data: DataIter, num_batch: int | None, reset: bool, row_ids: object, progress: bool | None
    ) -> Iterator[tuple[list[NDArray], int, DataBatch]]:
        """Yield as :meth:`iter_predict`, which a subclass may override without a change of :meth:`predict`."""
        self._need("predict", binded=True, params=True)
        _check_iterator("predict: eval_data", eval_data)
        if reset:
            eval_data.reset()
        for nbatch, batch in enumerate(Progress("predict", num_batch, show=progress).each(eval_data)):
            if num_batch is not None and nbatch == num_batch:
                break
            self.prepare(batch, sparse_row_id_fn=row_ids)
            self.forward(batch, is_train=False)
            samples, pad = batch.data[0].shape[0], getattr(batch, "pad", None) or 0
            yield [without_padding(out, samples, pad).copy() for out in self.get_outputs()], nbatch, batch

    @known_keywords()
    def predict(
        self,
        eval_data: DataIter | NDArray | RawArray,
        num_batch: int | None = None,
        merge_batches: bool = True,
        reset: bool = True,
        always_output_list: bool = False,
        sparse_row_id_fn: object = None,
        *,
        progress: bool | None = None,
    ) -> Any:
        """Outputs for all of ``eval_data``: one array per output over all samples (a single array if one output).

        With ``merge_batches=False``: a list of the batches' lists of outputs.

        Args:
            eval_data: batches, or one array of samples (NDArray or NumPy) for a module with one data input.
            sparse_row_id_fn: passed on to :meth:`prepare`.
            progress: as for :meth:`score`.
        """
        if isinstance(eval_data, (NDArray, np.ndarray)):
            self._need("predict", binded=True, params=True)
            bound = self.data_shapes
            if len(bound) != 1 or eval_data.ndim == 0:
                raise MXNetError(
                    f"predict: one array of samples is for a module with one data input; this one's are "
                    f"{[tuple(d) for d in bound]}; pass a DataIter"
                )
            batch = min(bound[0].shape[0], eval_data.shape[0])
            eval_data = NDArrayIter(eval_data, batch_size=batch, data_name=bound[0].name)
        runs = self._predictions(eval_data, num_batch, reset, sparse_row_id_fn, progress)
        collected = [outputs for outputs, _, _ in runs]
        if not merge_batches:
            return collected
        if not collected:
            return []
        merged = [
            nd.concat(*(part.as_in_context(parts[0].context) for part in parts), dim=0) if len(parts) > 1 else parts[0]
            for parts in zip(*collected, strict=True)
        ]
        return merged[0] if len(merged) == 1 and not always_output_list else merged

    @property
    def data_shapes(self) -> list[DataDesc]:
        """Bound data inputs."""
        raise NotImplementedError

    def _need(self, verb: str, *, binded: bool = False, params: bool = False, optimizer: bool = False) -> None:
        """Raise a helpful error when a step that ``verb`` relies on has not been done."""
        if binded and not self.binded:
            raise MXNetError(f"{verb}: the module is not bound; call bind(data_shapes, label_shapes) or fit first")
        if params and not self.params_initialized:
            raise MXNetError(f"{verb}: parameters have no values; call init_params or set_params first")
        if optimizer and not self.optimizer_initialized:
            raise MXNetError(f"{verb}: there is no optimizer; call init_optimizer first")


def whole_epochs(name: str, value: object) -> int:
    """Validate a number of epochs; raises ParameterError unless it is a whole number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ParameterError(f"fit: {name} must be a whole number of epochs, 0 or more, got {value!r}")
    return int(value)


def _check_iterator(what: str, data: object) -> None:
    if not (hasattr(data, "provide_data") and hasattr(data, "reset") and hasattr(data, "__iter__")):
        raise MXNetError(
            f"{what} must be a DataIter such as mx.io.NDArrayIter(data, label, batch_size), got {type(data).__name__}"
        )


def as_descs(shapes: object) -> list[DataDesc]:
    """Convert ``[(name, shape), …]`` or DataDescs to a list of DataDescs.

    >>> as_descs([("data", (2, 3))])[0].shape
    (2, 3)
    """
    descs = []
    for item in () if shapes is None else shapes if isinstance(shapes, (list, tuple)) else [shapes]:
        if isinstance(item, DataDesc):
            descs.append(item)
            continue
        try:
            pair: Any = item  # what cannot be unpacked raises
            name, shape, *dtype = pair
            if not isinstance(name, str):
                raise TypeError
            descs.append(DataDesc(name, tuple(operator.index(n) for n in shape), *dtype[:1]))
        except (TypeError, ValueError):
            raise ShapeTypeError(
                f"shapes are given as a list of pairs such as [('data', (32, 10))], got {shapes!r}"
            ) from None
    return descs
