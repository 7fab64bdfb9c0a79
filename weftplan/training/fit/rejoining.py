"""``fit`` in a job of ``weftplan launch --elastic``: every rank keeps the state of training, and returns to it.

A *state* is a checkpoint in memory: the bytes of a checkpoint file. Every rank takes one when ``fit`` begins, at the
end of each epoch, and whenever a checkpoint is due. After the loss of a rank the survivors wait for its replacement;
all ranks receive the state of the lowest rank that has one, and train on from there. All repeat the steps after it, so
a run with losses has the weights of one without, bit for bit.

It relies on ``resumable_run.py``, which resumes from a state as from a file, and on a store that can be formed again
 (``kvstore/distributed/recovery.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weftplan import engine
from weftplan.data.resumable_position import state_or_none
from weftplan.errors import MXNetError, WorkerLostError
from weftplan.kvstore.distributed.transport.elastic_job import in_elastic_job
from weftplan.training.fit.checkpoint_writer import decode_snapshot, encode_snapshot
from weftplan.training.fit.resumable_run import ResumableRun

_NAME = Path("the state of training")
"""Stands in messages for the path of a checkpoint."""


class Rejoining:
    """The state of a run to which all ranks return after the loss of a rank.

    Args:
        run: the run of this process.
        store: a store of an elastic job.

    Raises:
        MXNetError: the training data have no state, so that no rank could repeat an epoch.
    """

    def __init__(self, run: ResumableRun, store: Any) -> None:
        if state_or_none(run.data) is None:
            raise MXNetError(
                f"fit: in a job of weftplan launch --elastic every rank returns to earlier batches after a loss, but "
                f"{type(run.data).__name__} has no state(): give it state() and set_state(), or launch without "
                f"--elastic"
            )
        self._run, self._store = run, store
        self._state: bytes | None = None

    @classmethod
    def of(cls, run: ResumableRun) -> Rejoining | None:
        """Return the Rejoining of ``run`` in an elastic job; None in another job.

        Also return None for a module without an owner of the training state, and in training that a replacement cannot
        join, such as a second ``fit``. Then the loss of a rank restarts the job.
        """
        if not in_elastic_job():
            return None
        try:
            store: Any = run.module.owner()._kvstore
        except MXNetError:
            return None
        return cls(run, store) if getattr(store, "is_elastic", False) and store.begin_training() else None

    def keep(self) -> None:
        """Keep the current state for :meth:`return_to`, once every rank has taken it and its checkpoint is on disk.

        Raises:
            WorkerLostError: a rank was lost meanwhile; the earlier state stays.
        """
        state = encode_snapshot(self._run.snapshot())
        self._run.finish_writes()
        self._store.agree(f"keep the state of training after {self._run.step} updates")
        self._state = state

    def train(self, train: Callable[[], None]) -> None:
        """Call ``train`` until it returns without the loss of a rank.

        Raises:
            WorkerLostError: no replacement came in time.
        """
        store = self._store
        if store.is_alone:
            self.return_to()
        while True:
            try:
                if self._state is None:
                    self.keep()
                    store.set_joinable(True)
                train()
                store.agree("end training")
                store.set_joinable(False)
                return
            except WorkerLostError as error:
                self._run.module.logger.info("%s", error)
            self.return_to()

    def return_to(self) -> None:
        """Wait for replacements, and take the state of the lowest rank that has one."""
        while True:
            with contextlib.suppress(MXNetError):
                engine.get().wait_for_all()  # failures that were raised can be overwritten
            root = self._store.reform(has_state=self._state is not None)
            with contextlib.suppress(WorkerLostError):  # of another rank, whose replacement comes
                state = self._store.from_rank(root, self._state or b"", "join training")
                break
        self._run.go_on_from(decode_snapshot(state, _NAME))
        self._state = state
        if self._store.rank == 0:
            self._run.module.logger.warning(
                "a lost rank was replaced; all ranks train on from epoch %d, %d batches of it",
                *(self._run.epoch, self._run.batches),
            )
