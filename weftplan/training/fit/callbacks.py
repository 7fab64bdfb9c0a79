"""Callbacks of ``fit``: speed, checkpoints and a progress bar; that for Ctrl-C is in ``interruption.py``.

They run on the thread that calls ``fit`` and wait for any array they read.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from weftplan.ops.core.schema import Params
from weftplan.support.keyword_errors import Constructed, known_keywords
from weftplan.support.package_log import log
from weftplan.symbol.symbol import Symbol
from weftplan.training.fit.early_stopping import EarlyStopping
from weftplan.training.fit.fit_module import SavedModule
from weftplan.training.fit.interruption import StopAtBatchEnd
from weftplan.training.fit.parameter_files import save_checkpoint
from weftplan.training.metrics.metric import EvalMetric

__all__ = [
    "BatchEndParam",
    "EarlyStopping",
    "LogValidationMetricsCallback",
    "ProgressBar",
    "Speedometer",
    "StopAtBatchEnd",
    "call",
    "do_checkpoint",
    "log_train_metric",
    "module_checkpoint",
]


Callbacks = Callable[..., Any] | Sequence[Callable[..., Any]] | None
"""Callbacks argument of ``fit`` and ``score``: none, one or several."""


def call(callbacks: Callbacks, *args: object) -> None:
    """Call each callback, in order."""
    if callbacks is None:
        return
    for callback in [callbacks] if callable(callbacks) else callbacks:
        callback(*args)


class BatchEndParam(NamedTuple):
    """Argument of a batch-end callback; ``locals`` holds the module (``self``) and its batch (``data_batch``)."""

    epoch: int
    nbatch: int
    eval_metric: EvalMetric | None
    locals: dict[str, Any] | None = None


class Speedometer(Constructed):
    """Log samples per second (and the metric) every ``frequent`` batches.

    With ``auto_reset`` the logged metric covers the batches since the last line; the metric that ``fit`` logs at the
    end of an epoch still covers the whole epoch.
    """

    def __init__(self, batch_size: int, frequent: int = 50, auto_reset: bool = True) -> None:
        self.batch_size = batch_size
        self.frequent = frequent
        self.auto_reset = auto_reset
        self.init = False
        """Whether an epoch is under way."""
        self.tic = 0.0
        """Seconds of the clock at the last line, or at the first batch of the epoch."""
        self.last_count = 0
        """Number of the last batch."""
        self._counted_from = 0

    def __call__(self, param: BatchEndParam) -> None:
        now_s, count = time.perf_counter(), param.nbatch
        if not self.init or count <= self.last_count:
            self.init, self.tic, self.last_count, self._counted_from = True, now_s, count, count
            return
        self.last_count = count
        if count % self.frequent:
            return
        speed = f"{(count - self._counted_from) * self.batch_size / max(now_s - self.tic, 1e-9):.2f}"
        metric = param.eval_metric
        if metric is None:
            log.info("Iter[%d] Batch [%d]\tSpeed: %s samples/sec", param.epoch, count, speed)
        else:
            values = "".join(f"\t{name}={value:f}" for name, value in metric.get_name_value())
            if self.auto_reset:
                metric.reset_local()
            counted_from = self._counted_from if self.auto_reset else 0
            log.info(
                "Epoch[%d] Batch [%d-%d]\tSpeed: %s samples/sec%s", param.epoch, counted_from, count, speed, values
            )
        self.tic, self._counted_from = now_s, count


@known_keywords()
def log_train_metric(period: int, auto_reset: bool = False) -> Callable[[BatchEndParam], None]:
    """Return a batch-end callback that logs the metric every ``period`` batches, and resets it with ``auto_reset``."""
    period = max(1, period)

    def callback(param: BatchEndParam) -> None:
        if param.nbatch % period == 0 and param.eval_metric is not None:
            for name, value in param.eval_metric.get_name_value():
                log.info("Iter[%d] Batch[%d] Train-%s=%f", param.epoch, param.nbatch, name, value)
            if auto_reset:
                param.eval_metric.reset_local()

    return callback


class LogValidationMetricsCallback:
    """Logs the metric at the end of a validation: an ``eval_end_callback`` of ``fit``."""

    def __call__(self, param: BatchEndParam) -> None:
        if param.eval_metric is not None:
            for name, value in param.eval_metric.get_name_value():
                log.info("Epoch[%d] Validation-%s=%f", param.epoch, name, value)


def reports_validation(callbacks: Callbacks) -> bool:
    """Return whether any validation callback logs the validation metrics, so that ``fit`` need not log them."""
    listed = [callbacks] if callbacks is None or callable(callbacks) else callbacks
    return any(isinstance(callback, LogValidationMetricsCallback) for callback in listed)


class ProgressBar(Constructed):
    """Batch-end callback that logs the progress of the epoch as a bar and in percent.

    Args:
        total: batches of an epoch.
        length: length of the bar in characters.
    """

    def __init__(self, total: int, length: int = 80) -> None:
        self.total = max(1, total)
        self.bar_len = length

    def __call__(self, param: BatchEndParam) -> None:
        share = min(1.0, (param.nbatch + 1) / self.total)  # batches count from 0
        filled = round(self.bar_len * share)
        log.info("[%s%s] %d%%", "=" * filled, "-" * (self.bar_len - filled), math.ceil(100 * share))


@known_keywords()
def do_checkpoint(prefix: str | os.PathLike[str], period: int = 1) -> Callable[[int, Symbol, Params, Params], None]:
    """Return an epoch-end callback that saves a checkpoint every ``period`` epochs."""
    period = max(1, period)

    def callback(epoch: int, symbol: Symbol, arg_params: Params, aux_params: Params) -> None:
        if (epoch + 1) % period == 0:
            save_checkpoint(prefix, epoch + 1, symbol, arg_params, aux_params)

    return callback


@known_keywords()
def module_checkpoint(
    mod: SavedModule, prefix: str | os.PathLike[str], period: int = 1, save_optimizer_states: bool = False
) -> Callable[..., None]:
    """Return an epoch-end callback that calls ``mod.save_checkpoint`` every ``period`` epochs.

    Args:
        mod: a module.
        prefix: path and start of the files' names.
        period: epochs between two checkpoints.
        save_optimizer_states: whether the optimizer's states are written too.
    """
    period = max(1, period)

    def callback(epoch: int, *_: object) -> None:
        if (epoch + 1) % period == 0:
            mod.save_checkpoint(prefix, epoch + 1, save_optimizer_states)

    return callback
