"""Recovery of a store after a lost rank: :meth:`~RecoveringStore.recover` goes on without it, and
:meth:`~RecoveringStore.reform` with a replacement, in a job of ``weftplan launch --elastic``.

``Module.fit`` drives the second way (``training/fit/rejoining.py``): it owns the state of training, and goes back to it
on every rank. After a loss every survivor calls ``reform``, and so does the replacement once it has made the same
network and the same keys. Until then the replacement is *alone*: its calls reach no other process, and it sums nothing.
"""

from __future__ import annotations

import contextlib

import numpy as np

from weftplan.engine import get as get_engine
from weftplan.errors import KVStoreError, MXNetError, WorkerLostError
from weftplan.kvstore.distributed.base import KVStoreDist, arrays_in
from weftplan.kvstore.distributed.group.group import Group
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.transport.formation import Formation
from weftplan.kvstore.updater import Updater


class RecoveringStore(KVStoreDist):
    """A store that can go on after the loss of a rank."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._runs = 0
        if self._formation is not None:
            self._group.advice = "Module.fit goes on with a replacement"

    def _check_sums(self) -> None:
        """Raise KVStoreError if this process cannot sum with the others."""
        self._sequencer.check()
        if self._group.is_alone:
            raise KVStoreError(
                f"rank {self.rank} replaces a lost rank, and joins the others in Module.fit: push and pushpull work "
                f"from then on. A program with a loop of its own is started again as a whole: weftplan launch "
                f"--restarts without --elastic"
            )

    def recover(self) -> int:
        """Go on after a :class:`~weftplan.errors.WorkerLostError`, without the dead; every survivor must call it.

        Values and optimizer states become those of the survivor that has completed most exchanges, so that all are
        equal again. A gradient whose exchange failed is gone: compute it again and push it.

        Returns:
            How many processes are left.

        Raises:
            KVStoreError: this MPI cannot go on after a death, or the job replaces a lost rank.
        """
        if self._formation is not None:
            raise KVStoreError("recover goes on without a lost rank, but weftplan launch --elastic replaces it")
        with self._turn:
            root = int(self._sequencer.call(Group.regroup, repairs=True))
            self._heal()
            for key, stored in self._stored.items():
                self._from(root, "recover", key, stored)
            if isinstance(self._updater, Updater):
                states = self.from_rank(root, self._updater.get_states(), "recover optimizer states")
                if self.rank != root:
                    self._updater.set_states(states)
        return self.num_workers

    # -- replacements ---------------------------------------------------------------------------------------------

    @property
    def is_elastic(self) -> bool:
        """Whether the job replaces a lost rank."""
        return self._formation is not None

    @property
    def is_alone(self) -> bool:
        """Whether this process replaces a lost rank and has not joined the others yet."""
        return self._group.is_alone

    def set_joinable(self, joinable: bool) -> None:
        """Say whether replacements may join from now on: every rank has a state and calls :meth:`reform` after a
        loss."""
        self._elastic().job.set_joinable(joinable)

    def begin_run(self) -> int:
        """Return the number of this training run on the store, from 1. A replacement can join its first run alone."""
        self._runs += 1
        return self._runs

    def reform(self, *, has_state: bool) -> int:
        """Wait for the replacements of lost ranks, and form the group again with them; every rank calls this.

        Stored values and optimizer states are undefined then: the caller sets them.

        Args:
            has_state: whether this process has a state that others can receive.

        Returns:
            The lowest rank that has one.

        Raises:
            WorkerLostError: a rank does not come in time, or no rank has a state.
        """
        formation = self._elastic()

        def form(group: Group) -> Steps[int]:
            while True:
                connection = yield from formation.again()
                try:
                    flags = yield from group.begin_again(connection, np.array([has_state], np.uint8))
                except WorkerLostError:  # one more; the launcher replaces it
                    continue
                if not any(flag[0] for flag in flags):
                    raise WorkerLostError("every rank was lost before a replacement had joined")
                return next(rank for rank, flag in enumerate(flags) if flag[0])

        with self._turn:
            root = int(self._sequencer.call(form, repairs=True))
            self._heal()
            self._version += 1
        return root

    def from_rank(self, root: int, data: bytes, description: str) -> bytes:
        """Return the ``data`` of rank ``root``; every rank calls this with the same description.

        Raises:
            KVStoreError: a rank does something else.
            WorkerLostError: a rank was lost.
        """
        size = np.array([len(data)], np.int64)
        self._sequencer.call(lambda group: group.broadcast(size, root, f"{description}: their size"))
        array = np.frombuffer(data, np.uint8) if self.rank == root else np.empty(int(size[0]), np.uint8)
        array = array.copy()
        self._sequencer.call(lambda group: group.broadcast(array, root, description))
        return array.tobytes()

    def _elastic(self) -> Formation:
        if self._formation is None:
            raise KVStoreError("no rank of this job is replaced: start it with weftplan launch --elastic")
        return self._formation

    def _heal(self) -> None:
        """Clear failures: the operations that should have written these arrays did not run, so their values are
        whole."""
        states = self._updater.states.values() if isinstance(self._updater, Updater) else ()
        arrays = [*self._stored.values(), *(array for state in states for array in arrays_in(state))]
        for array in arrays:
            with contextlib.suppress(MXNetError):
                array.wait_to_read()
            get_engine().push(lambda: None, (), (array.var,), array.context, name="KVStoreRecover")
