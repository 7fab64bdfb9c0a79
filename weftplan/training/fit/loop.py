"""The loop of one ``fit`` call over epochs and batches, and the state of that call.

A :class:`Fitting` lives as long as the call and belongs to the training thread. It counts updates, sums the gradients
of micro-batches, writes checkpoints and reports progress. Each of these has its own file; ``resumable_run.py`` resumes
from a checkpoint, and ``interruption.py`` has the rule for Ctrl-C.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from weftplan.data.batch import DataBatch
from weftplan.data.data_iter import DataIter
from weftplan.errors import MXNetError
from weftplan.support import program_end
from weftplan.support.progress import hidden
from weftplan.training.fit.callbacks import BatchEndParam, Callbacks, call, reports_validation
from weftplan.training.fit.checkpoint_writer import Checkpoints
from weftplan.training.fit.display import Display
from weftplan.training.fit.early_stopping import EarlyStopping
from weftplan.training.fit.events import Events, StepEnd, Window
from weftplan.training.fit.fit_module import FitModule
from weftplan.training.fit.fit_warnings import LEAST_STEPS, Watch, position_of
from weftplan.training.fit.interruption import saving_first
from weftplan.training.fit.microbatch import BatchPieces, MicroBatchIter
from weftplan.training.fit.monitor import Monitor
from weftplan.training.fit.overrides import overrides
from weftplan.training.fit.precision import LossScale
from weftplan.training.fit.rejoining import Rejoining
from weftplan.training.fit.resumable_run import ResumableRun
from weftplan.training.metrics.metric import EvalMetric


@dataclass(slots=True)
class Validation:
    """Settings of the validation after each epoch."""

    data: Any
    metric: EvalMetric
    end_callback: Callbacks = None
    batch_end_callback: Callbacks = None


class Fitting(ResumableRun):
    """State and loop of a ``fit`` call.

    Args:
        module: bound module with parameters and an optimizer.
        data: training batches.
        metric: training metric.
        epochs: (first, end): the epochs to train.
        validation: validation settings, or None.
        micro_batches: pieces per batch.
        scaling: loss scale in mixed precision, or None.
        checkpoints: writer of checkpoints, or None.
        stopping: early-stopping rule, or None.
        events: receiver of training events, or None.
        display, monitor, batch_end_callback, epoch_end_callback: as ``fit`` takes them.
        variables: arguments of ``fit``, which a callback finds in ``param.locals``.
    """

    def __init__(
        self,
        module: FitModule,
        data: DataIter,
        metric: EvalMetric,
        epochs: tuple[int, int],
        *,
        validation: Validation | None = None,
        micro_batches: int = 1,
        scaling: LossScale | None = None,
        checkpoints: Checkpoints | None = None,
        stopping: EarlyStopping | None = None,
        display: Display,
        events: Events | None = None,
        monitor: Monitor | None = None,
        batch_end_callback: Callbacks = None,
        epoch_end_callback: Callbacks = None,
        variables: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        super().__init__(
            module,
            data,
            metric=metric,
            epoch=epochs[0],
            micro_batches=micro_batches,
            scaling=scaling,
            checkpoints=checkpoints,
            stopping=stopping,
        )
        self.end = epochs[1]
        self._validation = validation
        self._pieces = BatchPieces(data.provide_data, data.provide_label)
        self._samples = _samples(data.provide_data) // micro_batches
        # Ask for the owner only if needed, because not every kind of module has one.
        store: Any = None if scaling is None and checkpoints is None else module.owner()._kvstore
        if getattr(store, "num_workers", 1) > 1:
            if scaling is not None:
                raise MXNetError("fit: mixed_precision is for one process: several would scale their losses apart")
            if checkpoints is not None and store.type == "dist_async":
                raise MXNetError(
                    "fit: checkpoint needs processes with equal weights, as those of dist_sync have: with dist_async "
                    "let one process save with do_checkpoint"
                )
            if checkpoints is not None:
                checkpoints.writes = store.rank == 0
        self._rejoining = Rejoining.of(self)
        if scaling is not None:
            module.set_loss_scale(scaling.scale)
        self._display = display
        self._monitor = monitor
        self._batch_end_callback = batch_end_callback
        self._epoch_end_callback = epoch_end_callback
        self._variables = variables
        self._events = events
        # A user's own metric is read only when MXNet reads it, unless its values are shown.
        self._reads_metric = events is not None or display.stays or not overrides(metric, "get", "get_name_value")
        self._window = Window()
        self._ended: StepEnd | None = None
        self._trained: list[tuple[str, float]] | None = None
        """The metric after the last batch, before its callbacks; None: not read."""
        """Completion time of the last step on the devices."""
        self._watch = Watch(module, self._warned)

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until the last epoch has ended or early stopping applies."""
        why = "an error"
        try:
            if self._rejoining is None:
                self._train()
            else:
                self._rejoining.train(self._train)
            why = "no better value any more" if self._stops() else "all epochs are done"
            program_end.unfinished.clear()
        except BaseException as error:
            why = type(error).__name__
            program_end.unfinished[:] = [f"in epoch {self.epoch}, after {self.batches} batches"]
            raise
        finally:
            self._display.clear()
            self.finish_writes()
            if self._events is not None:
                self._events.end({"step": self.step, "why": why})

    def _train(self) -> None:
        while self.epoch < self.end and not self._stops():
            start = time.perf_counter()
            self._train_epoch()
            self._end_epoch(start)
            self._keep()

    def begin_events(self, *, resumed: bool) -> None:
        """Report the start or the resumption of the run to the events."""
        if self._events is None:
            return
        if self._checkpoints is not None:
            self._checkpoints.on_event = self._events.tell
        facts = {
            "step": self.step,
            "epoch": self.epoch,
            "epochs": self.end,
            "devices": [str(context) for context in self.module.owner().contexts],
            "batch": _samples(self.data.provide_data),
            "micro_batches": self._micro_batches,
        }
        self._events.begin(self.module.owner().contexts, facts, resumed=resumed)

    def _stops(self) -> bool:
        return self._stopping is not None and self._stopping.stops

    def _warned(self, text: str) -> None:
        self._display.clear()
        if self._events is not None:
            self._events.tell("warning", {"step": self.step, "epoch": self.epoch, "text": text})

    def _train_epoch(self) -> None:
        if not self.batches:
            self.metric.reset()
            self.module.begin_epoch(self.epoch, self.data, first=not self.step)
        began = since = time.perf_counter()
        # As in MXNet the next batch is read before the callbacks of this one. A checkpoint between the two could not
        # tell the iterator's position, so runs that save read it after them.
        reads_ahead = self._checkpoints is None and self._rejoining is None
        batches = self.epoch_batches()
        batch = next(batches, None)
        while batch is not None:
            since = self._waited(since)
            if self._monitor is not None:
                self._monitor.tic()
            since = self._update(batch, since)
            self._ended = StepEnd(self.module)
            # Read before the next batch, whose arrays may be the same memory. A custom batch may lack data.
            labels, data = batch.label, getattr(batch, "data", None)
            samples = data[0].shape[0] if data else 0
            following = None
            if reads_ahead:
                following = next(batches, None)
                since = self._waited(since)
                if following is not None:
                    self.module.prepare(following, sparse_row_id_fn=self._variables.get("sparse_row_id_fn"))
            if self._monitor is not None:
                self._monitor.toc_print()
            pairs = self.metric.get_name_value() if self._reads_metric else []
            since = self._window.spent("compute", since)
            number, self.batches, self.step = self.batches, self.batches + 1, self.step + 1
            self._watch.batch(self.epoch, number, labels, pairs)
            self._display.batch(self.epoch, number, samples, pairs)
            # Read before the callbacks, as in MXNet: Speedometer may reset the metric after the last batch.
            if following is None:
                self._trained = self.metric.get_global_name_value()
            told = {"epoch": self.epoch, "nbatch": number, "data_batch": batch, "next_data_batch": following}
            told |= {"self": self.module, "tic": began, "end_of_batch": following is None}
            param = BatchEndParam(self.epoch, number, self.metric, {**self._variables, **told})
            with saving_first(self._save):
                call(self._batch_end_callback, param)
            if self._checkpoints is not None and self._checkpoints.every and not self.step % self._checkpoints.every:
                self._save()
                self._keep()
            since = self._window.spent("other", since)
            self._count(number, samples, pairs)
            batch = following
            if not reads_ahead:
                batch = next(batches, None)
                if batch is not None:
                    self.module.prepare(batch, sparse_row_id_fn=self._variables.get("sparse_row_id_fn"))
        if not self.batches:
            raise MXNetError(
                f"fit: train_data gave no batch in epoch {self.epoch}; its reset() must start over, and with "
                f"last_batch_handle 'discard' there must be at least one whole batch"
            )

    def _waited(self, since: float) -> float:
        """Account the wait for a batch: the part during which the devices were idle counts as ``data``."""
        ended, now_s = self._ended, time.perf_counter()
        idle_from = since if ended is None else now_s if ended.at is None else min(max(since, ended.at), now_s)
        self._window.seconds["compute"] += idle_from - since
        self._window.seconds["data"] += now_s - idle_from
        return now_s

    def _count(self, number: int, samples: int, pairs: list[tuple[str, float]]) -> None:
        """Count a step, and write a line of figures if due."""
        window, events = self._window, self._events
        window.steps += 1
        window.samples += samples
        if events.is_due() if events is not None else window.steps >= LEAST_STEPS:
            self._line(number, pairs)

    def _line(self, number: int, pairs: list[tuple[str, float]]) -> None:
        """Write a line of figures for the steps since the previous line; ``number`` is that of the last batch."""
        window, events, self._window = self._window, self._events, Window()
        self._watch.time(window.seconds, window.steps)
        if events is not None:
            event = events.step(self.step, self.epoch, number, pairs, window, self.module)
            self._watch.gradients(position_of(self.epoch, number), event.get("gradient_norm"))

    def _update(self, batch: DataBatch, since: float) -> float:
        """Run a step: forward and backward of every piece of the batch, then an update; returns the time at its end."""
        module, window = self.module, self._window
        if self._micro_batches == 1:
            module.forward_backward(batch)
            since = window.spent("compute", since)
            self._apply()
            since = window.spent("exchange", since)
            module.update_metric(self.metric, batch.label)
            return since
        for number, piece in enumerate(self._pieces.cut(batch, self._samples)):
            if not number:
                module.clear_gradients(piece)
            module.forward_backward(piece)
            module.update_metric(self.metric, piece.label)
        since = window.spent("compute", since)
        self._apply()
        return window.spent("exchange", since)

    def _apply(self) -> None:
        """Update the parameters, unless a gradient of mixed precision has overflowed."""
        scaling = self._scaling
        if scaling is None:
            self.module.update()
        elif not scaling.update(self.module) and scaling.scale == 1.0:
            self._watch.overflow(position_of(self.epoch, self.batches))

    def _end_epoch(self, start: float) -> None:
        module, epoch = self.module, self.epoch
        if self._events is not None and self._window.steps:
            self._line(self.batches - 1, self.metric.get_name_value())  # include the last steps
        trained = self._trained or self.metric.get_global_name_value()
        self._trained = None
        for name, value in trained:
            module.logger.info("Epoch[%d] Train-%s=%f", epoch, name, value)
        module.logger.info("Epoch[%d] Time cost=%.3f", epoch, time.perf_counter() - start)
        args, aux = module.get_params()
        if overrides(module, "get_params", "set_params", "init_params"):
            module.set_params(args, aux)
        else:
            module.synchronize()  # the same, without copies of equal values
        for array in (*(args or {}).values(), *(aux or {}).values()):  # a module of the user's may return None
            array.wait_to_read()  # raises an error of backward or of the update
        if self._epoch_end_callback is not None:
            call(self._epoch_end_callback, epoch, module.symbol, args, aux)
        checked: list[tuple[str, float]] = []
        if self._validation is not None:
            checked = self._score(self._validation)
            if not reports_validation(self._validation.end_callback):
                for name, value in checked:
                    module.logger.info("Epoch[%d] Validation-%s=%f", epoch, name, value)
        self._display.epoch_end(epoch, trained, checked, time.perf_counter() - start)
        if self._events is not None:
            self._events.epoch(self.step, epoch, trained, checked, time.perf_counter() - start)
        better = self._stopping is not None and self._stopping.epoch_end(epoch, checked or trained)
        self.start_over()
        self.epoch, self.batches = epoch + 1, 0
        checkpoints = self._checkpoints
        if checkpoints is None or not checkpoints.writes:
            return
        snapshot = None
        over = self.epoch >= self.end or self._stops()
        if better:
            snapshot = self.snapshot()
            checkpoints.save(checkpoints.best, snapshot)
        if checkpoints.every is None or over:
            checkpoints.save(checkpoints.path(self.step), snapshot or self.snapshot())

    def _score(self, how: Validation) -> list[tuple[str, float]]:
        data = how.data
        if self._micro_batches > 1 and _samples(data.provide_data) > self._samples:
            data = MicroBatchIter(data, self._samples)  # a whole batch would need the memory that pieces save
        with hidden():
            pairs: list[tuple[str, float]] = self.module.score(
                data,
                how.metric,
                score_end_callback=how.end_callback,
                batch_end_callback=how.batch_end_callback,
                epoch=self.epoch,
            )
        return pairs

    def _keep(self) -> None:
        """Keep the current state, to which all ranks return after the loss of a rank."""
        if self._rejoining is not None:
            self._rejoining.keep()

    def _save(self) -> None:
        if self._checkpoints is not None and self._checkpoints.writes:
            self._checkpoints.save(self._checkpoints.path(self.step), self.snapshot())


def _samples(descs: Sequence[tuple[str, Sequence[int]]]) -> int:
    """Return the batch size; 0 if the iterator does not provide it."""
    if not descs:
        return 0
    head = descs[0]
    return int(head[1][getattr(head, "batch_axis", 0)])
