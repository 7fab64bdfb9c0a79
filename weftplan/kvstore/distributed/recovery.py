"""Recovery of a store after the loss of a rank: :meth:`~RecoveringStore.recover` continues without the lost rank,
:meth:`~RecoveringStore.reform` with a replacement.

``reform`` is for jobs of ``weftplan launch --elastic``. ``Module.fit`` calls it (``training/fit/rejoining.py``), and
restores the last state of training on every rank. After a loss, every survivor calls ``reform``, and so does the
replacement once it has created the same network and keys. Before that the replacement is *alone*: its calls reach no
other process, and it cannot push.
"""

from __future__ import annotations

import contextlib

import numpy as np

from weftplan.engine import get as get_engine
from weftplan.errors import KVStoreError, MXNetError, WorkerLostError
from weftplan.kvstore.distributed.base import KVStoreDist, arrays_in
from weftplan.kvstore.distributed.group.group import RankGroup
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.transport.elastic_job import note_sharing
from weftplan.kvstore.distributed.transport.formation import Formation
from weftplan.kvstore.distributed.transport.mpi_types import JobRank
from weftplan.kvstore.updater import Updater


class RecoveringStore(KVStoreDist):
    """Base class of stores that can continue after the loss of a rank."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        if self._formation is not None:
            self._group.advice = "Module.fit goes on with a replacement"

    def _check_sums(self) -> None:
        """Raise KVStoreError if the store is closed, or this process is a replacement that has not joined yet."""
        self._sequencer.check()
        if self._formation is not None:
            note_sharing()
        if self._group.is_alone:
            raise KVStoreError(
                f"rank {self.rank} replaces a lost rank, and joins the others in Module.fit: push and pushpull work "
                f"from then on. A program with a loop of its own is started again as a whole: weftplan launch "
                f"--restarts without --elastic"
            )

    def recover(self) -> int:
        """Continue without the dead processes after a :class:`~weftplan.errors.WorkerLostError`; all survivors call it.

        All survivors get the values and optimizer states of the survivor that has completed the most exchanges. A
        gradient whose exchange failed is lost: compute and push it again.

        Returns:
            The number of remaining processes.

        Raises:
            KVStoreError: this MPI library does not support it, or the job is elastic.
            WorkerLostError: another process does not call it in time.
        """
        if self._formation is not None:
            raise KVStoreError("recover goes on without a lost rank, but weftplan launch --elastic replaces it")
        with self._turn:
            root: JobRank = self._sequencer.call(RankGroup.regroup, repairs=True)
            self._heal()
            for key, stored in self._stored.items():
                self._from(root, "recover", key, stored)
            if isinstance(self._updater, Updater):
                states = self.from_rank(root, self._updater.get_states(), "recover optimizer states")
                if self._group.rank != root:
                    self._updater.set_states(states)
        return self.num_workers

    # -- replacements ---------------------------------------------------------------------------------------------

    @property
    def is_elastic(self) -> bool:
        """Whether the job is elastic: it replaces lost ranks."""
        return self._formation is not None

    @property
    def is_alone(self) -> bool:
        """Whether this process is a replacement that has not joined the other processes yet."""
        return self._group.is_alone

    def set_joinable(self, joinable: bool) -> None:
        """Set whether replacements may join from now on.

        Set True only when every rank has a training state and calls :meth:`reform` after a loss.
        """
        self._elastic().job.set_joinable(joinable)

    def begin_training(self) -> bool:
        """Return whether replacements can join in the training that begins now.

        They can in the first training of a program that has summed nothing before: a replacement runs the program from
        its beginning, and until it has joined it can neither sum nor train. Call this once for each training.
        """
        return note_sharing()

    def reform(self, *, has_state: bool) -> JobRank:
        """Wait for the replacements of lost ranks and form the group again with them; every rank calls this.

        Afterwards stored values and optimizer states are undefined; the caller sets them.

        Args:
            has_state: whether this process has a training state that it can send.

        Returns:
            The lowest rank that has a training state.

        Raises:
            WorkerLostError: a rank does not join in time, or no rank has a training state.
        """
        formation = self._elastic()

        def form(group: RankGroup) -> Steps[JobRank]:
            while True:
                connection = yield from formation.reconnect()
                try:
                    flags = yield from group.begin_again(connection, np.array([has_state], np.uint8))
                except WorkerLostError:  # another rank was lost; the launcher replaces it in the next generation
                    continue
                if not any(flag[0] for flag in flags):
                    raise WorkerLostError("every rank was lost before a replacement had joined")
                return next(rank for rank, flag in zip(group.members, flags, strict=True) if flag[0])

        with self._turn:
            root: JobRank = self._sequencer.call(form, repairs=True)
            self._heal()
            self._version += 1
        return root

    def from_rank(self, root: JobRank, data: bytes, description: str) -> bytes:
        """Return the ``data`` of rank ``root``; every rank calls this with the same description.

        ``data`` is ignored on other ranks.

        Raises:
            KVStoreError: a rank makes another call.
            WorkerLostError: a rank was lost.
        """
        return self._sequencer.call(lambda group: group.broadcast_bytes(data, root, description))

    def _elastic(self) -> Formation:
        if self._formation is None:
            raise KVStoreError("no rank of this job is replaced: start it with weftplan launch --elastic")
        return self._formation

    def _heal(self) -> None:
        """Clear the failures of stored values and optimizer states, so that operations can use the arrays again.

        The failed operations did not run, so the arrays have their old values.
        """
        states = self._updater.states.values() if isinstance(self._updater, Updater) else ()
        arrays = [*self._stored.values(), *(array for state in states for array in arrays_in(state))]
        for array in arrays:
            with contextlib.suppress(MXNetError):
                array.wait_to_read()
            # A successful write, even of nothing, clears the failure of a var whose error was raised before.
            get_engine().push(lambda: None, (), (array.var,), array.context, name="KVStoreRecover")
