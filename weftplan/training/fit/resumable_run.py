"""Resumable state of a ``fit`` run: snapshots for checkpoints, and resuming from a checkpoint.

This file decides what a snapshot contains and the order in which it is restored. ``run_state.py`` gathers the state of
each part; ``checkpoint_writer.py`` writes the files. A run belongs to the training thread. Snapshots are taken between
two updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weftplan.data.batch import DataBatch
from weftplan.data.data_iter import DataIter
from weftplan.data.resumable_position import state_or_none
from weftplan.errors import FormatError, ParameterError
from weftplan.training.fit.checkpoint_writer import Checkpoints, CheckpointSnapshot, Saved
from weftplan.training.fit.early_stopping import EarlyStopping
from weftplan.training.fit.fit_module import FitModule, optimizer_of
from weftplan.training.fit.precision import LossScale
from weftplan.training.fit.run_state import (
    attributes_behind,
    changed_names,
    differences,
    gather_metric,
    gather_module,
    gather_random,
    listed_under,
    random_states,
    restore_metric,
    restore_module,
    restore_random,
    settings_of,
    wrong_parameters,
)
from weftplan.training.fit.state_values import StatePacker, restore, unpacked
from weftplan.training.metrics.metric import EvalMetric


class ResumableRun:
    """Checkpointed state of a run. The arguments are those of :class:`.loop.Fitting`."""

    def __init__(
        self,
        module: FitModule,
        data: DataIter,
        *,
        metric: EvalMetric,
        epoch: int,
        micro_batches: int,
        scaling: LossScale | None,
        checkpoints: Checkpoints | None,
        stopping: EarlyStopping | None,
    ) -> None:
        self.module = module
        self.data = data
        self.metric = metric
        self.epoch = epoch
        self.batches = 0
        """Completed batches of this epoch."""
        self.step = 0
        """Completed updates."""
        self._micro_batches = micro_batches
        self._scaling = scaling
        self._checkpoints = checkpoints
        self._stopping = stopping
        self._skip = 0
        """Batches to skip after a resume because the iterator has no state; they were used before the checkpoint."""
        self._random: tuple[dict[str, Any], dict[str, Any]] | None = None
        """Random states of the checkpoint, restored after skipping, which must not advance them."""
        self._before_epoch = random_states()
        self._settings: dict[str, Any] | None = None
        self._begun = False
        """Whether an epoch has begun in this ``fit`` call or in the resumed run."""
        self._reset = False
        """Whether ``fit`` has reset the iterator for this epoch."""

    def start_over(self) -> None:
        """Reset the iterator for a new epoch."""
        self._before_epoch, self._reset = random_states(), True
        self.data.reset()

    def snapshot(self) -> CheckpointSnapshot:
        """Return the current state, between two updates; its array copies are pending."""
        packer = StatePacker("weftplan.run/")
        owner = self.module.owner()
        state, args, aux = gather_module(owner, packer)
        facts = {
            "step": self.step,
            "epoch": self.epoch,
            "batches": self.batches,
            "settings": self.settings(),
            "module": state,
            "metric": gather_metric(self.metric, packer),
            "random": gather_random(random_states(), packer),
            "random_before": gather_random(self._before_epoch, packer),
            "reset": self._reset,
            "begun": self._begun,
            "iterator": packer.value(state_or_none(self.data)),
            "scaling": None if self._scaling is None else packer.attributes(self._scaling),
            "stopping": None if self._stopping is None else packer.attributes(self._stopping),
        }
        return CheckpointSnapshot(args, aux, packer.arrays, facts)

    def finish_writes(self) -> None:
        """Wait until the checkpoints that were begun are on disk."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def settings(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share, as of the start of this run."""
        if self._settings is None:
            owner = self.module.owner()
            fitting = {
                "micro_batches": self._micro_batches,
                "mixed_precision": self.module.owner().precision,
                "iterator": type(self.data).__name__,
                "metric": [name for name, _ in self.metric.get_name_value()],
            }
            self._settings = settings_of(owner, optimizer_of(owner), fitting)
        return self._settings

    def resume(self, *, changed: bool) -> bool:
        """Resume from the newest checkpoint, if there is one; returns whether it did. A mismatch changes nothing.

        Args:
            changed: accept different settings: log the differences and use the current settings.

        Raises:
            ParameterError: the checkpoint belongs to another network or other settings; the message lists differences.
            FormatError: there are checkpoints, but none can be read.
            KVStoreError: the processes found different checkpoints.
        """
        assert self._checkpoints is not None
        saved = self._checkpoints.newest()
        store: Any = self.module.owner()._kvstore
        if getattr(store, "num_workers", 1) > 1:
            store.agree(f"go on from {'the beginning' if saved is None else saved.path.name}")
        if saved is None:
            return False
        self.go_on_from(saved, changed=changed)
        self.module.logger.info(
            "resumed from %s: epoch %d, %d batches of it, %d updates", saved.path, self.epoch, self.batches, self.step
        )
        return True

    def go_on_from(self, saved: Saved, *, changed: bool = False) -> None:
        """Take the state of a checkpoint; raises as :meth:`resume` does. A mismatch changes nothing."""
        owner = self.module.owner()
        facts = saved.facts
        wrong = wrong_parameters(owner, saved.args, saved.aux)
        if wrong:
            raise ParameterError(listed_under(f"{saved.path} is a checkpoint of another network", wrong))
        settings = self.settings()
        differing = differences(facts["settings"], settings)
        if differing and not changed:
            raise ParameterError(
                listed_under(f"{saved.path} was written with other settings", differing)
                + "\ngo on with the same ones for the same bits, or pass resume='changed' to let those of now hold"
            )
        optimizer = optimizer_of(owner)
        attributes = attributes_behind(changed_names(facts["settings"], settings), optimizer)
        current = {name: getattr(optimizer, name) for name in attributes}
        if differing:
            self.module.logger.warning(listed_under(f"resumed from {saved.path} with other settings", differing))
        try:
            self._go_on(saved, current)
        except (KeyError, TypeError, IndexError) as error:
            raise FormatError(f"{saved.path}: damaged: {error!r}") from error

    def _go_on(self, saved: Saved, current: Mapping[str, object]) -> None:
        facts, arrays = saved.facts, saved.arrays
        iterator_state = unpacked(facts["iterator"], arrays)
        if iterator_state is not None:
            self.data.set_state(iterator_state)  # first, because it may raise
        restore_module(self.module.owner(), facts["module"], arrays, saved.args, saved.aux, current)
        restore_metric(self.metric, facts["metric"], arrays)
        if self._stopping is not None and facts["stopping"] is not None:
            wished = {name: getattr(self._stopping, name) for name in ("metric", "patience", "min_delta", "mode")}
            restore(self._stopping, {**facts["stopping"], **wished}, arrays)
        if self._scaling is not None and facts["scaling"] is not None:
            restore(self._scaling, facts["scaling"], arrays)
            self.module.set_loss_scale(self._scaling.scale)
        self.step, self.epoch, self.batches = facts["step"], facts["epoch"], facts["batches"]
        random_before = facts.get("random_before") or {
            "weftplan": facts["before_epoch"]
        }  # format of an earlier release
        self._before_epoch = {name: unpacked(value, arrays) for name, value in random_before.items()}
        self._reset, self._begun = facts.get("reset", True), facts.get("begun", True)
        if iterator_state is not None:
            restore_random(facts["random"], arrays)
        else:  # restart the epoch in its original order, and skip the batches already used
            if self._reset:  # else it is in its first epoch, in its initial order
                restore_random(random_before, arrays)
                self.data.reset()
            self._skip, self._random = self.batches, (facts["random"], arrays)

    def epoch_batches(self) -> Iterator[DataBatch]:
        """Yield the remaining batches of this epoch. An iterator that the caller has exhausted is reset, once."""
        batches = iter(self.data)
        self._skip_seen(batches)
        first_batch = next(batches, None)
        if first_batch is None and not self._begun:
            self.start_over()
            batches = iter(self.data)
            first_batch = next(batches, None)
        self._begun = True
        batch, first_batch = first_batch, None
        while batch is not None:  # a for loop would call the iterator's __iter__ again
            yield batch
            batch = next(batches, None)

    def _skip_seen(self, batches: Iterator[DataBatch]) -> None:
        """Skip the batches used before the checkpoint, if the iterator has no state."""
        for number in range(self._skip):
            if next(batches, None) is None:
                raise FormatError(
                    f"train_data has {number} batches in epoch {self.epoch}, but the checkpoint has seen "
                    f"{self._skip} of it: it is of other data"
                )
        self._skip = 0
        if self._random is not None:
            restore_random(*self._random)
            self._random = None
