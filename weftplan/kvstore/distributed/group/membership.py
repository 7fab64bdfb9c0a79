"""Group membership: waits for members, detection of lost members, agreement on the survivors.

All messages are point-to-point, over one communicator that never changes. A dead process makes MPI's collective
functions unusable, but not messages between live processes. So nothing has to be repaired after a death; the survivors
only have to agree on their set (:meth:`Members.regroup`). Each survivor sends its *view* to every other: the number of
the agreement (the *epoch*) and the ranks that are gone. A survivor that receives a larger set or a later epoch adopts
it and sends its new view. Views only grow, so this terminates. A survivor is done when every rank that is not gone has
sent it an equal view. Epochs are part of the tags, so a message of a lost exchange never matches a later receive.

Two survivors may finish with different views if a third process dies in between. The survivor that does not know it yet
learns it in its next exchange, from the death itself or from the other's view, because a receive for views is always
posted.

Only the driving thread of the sequencer (``sequencer.py``) calls this module. Functions that take time are generators
(:data:`Steps`): they yield when they have to wait, and the driver decides how to wait.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from weftplan.errors import KVStoreError, WorkerLostError
from weftplan.kvstore.distributed.transport.mpi_types import Connection, Request, Status
from weftplan.kvstore.distributed.transport.shutdown import note_loss
from weftplan.kvstore.distributed.transport.wire import View, view_bytes
from weftplan.support.package_log import log

T = TypeVar("T")
Steps = Generator[None, None, T]

_VIEW = 1
"""Tag of views; tags of exchanges are larger."""

_PATIENCE_S = 0.01
"""Seconds of waiting before a process checks for losses."""

_LOOK_S = 0.001
"""Seconds between two checks while it waits."""

_LOSSES_S = 0.1
"""Seconds between two checks for losses in exchanges that do not wait."""

_SETTLE_S = 2.0
"""Seconds for MPI to release requests that a loss has interrupted, or to deliver a last message."""

_NEWS_S = 0.5
"""Seconds within which the report of a death may follow the first error."""


class Members:
    """The processes that share a store.

    Attributes:
        members: their ranks in the job, ascending, without those that left or died.
        rank: this process's.
        sequence: exchanges completed so far.
        timeout_s: seconds of waiting after which a process counts as lost.
    """

    def __init__(self, connection: Connection, *, stall_s: float, timeout_s: float) -> None:
        self._stall_s, self.timeout_s = stall_s, timeout_s
        self.advice = "kv.recover() goes on without"
        """Advice at the end of messages about a loss."""
        self._join(connection)

    def _join(self, connection: Connection) -> None:
        """Be a member of a connection, with all others, or alone; know nothing of an earlier one."""
        self._connection = connection
        self._mpi, self._comm, self._dead = connection.library, connection.comm, connection.dead
        self._status = self._mpi.Status()
        self._receiving: list[Request] = []
        self._sending: list[Request] = []
        """Requests of exchanges that a loss has ended; they keep their buffers, which MPI may still write and read."""
        self.rank = int(self._comm.rank)
        self.members: list[int] = [self.rank] if connection.is_alone else list(range(self._comm.size))
        self.sequence = 0
        self._epoch = 0
        self._gone: frozenset[int] = frozenset()
        self._views: dict[int, View] = {}
        """Last view of each other process."""
        self._inboxes: dict[int, tuple[Request, bytearray]] = {}
        self._looked = 0.0
        for rank in self.members:
            if rank != self.rank:
                self._listen(rank)

    @property
    def position(self) -> int:
        """Index of this process among the members."""
        return self.members.index(self.rank)

    @property
    def job_size(self) -> int:
        """The number of processes of the job, with those that have left or died."""
        return self._comm.size

    @property
    def is_alone(self) -> bool:
        """Whether this process replaces a lost one and has not met the others yet."""
        return self._connection.is_alone

    # -- waiting --------------------------------------------------------------------------------------------------

    def wait(
        self,
        receives: list[Request],
        sends: list[Request],
        ranks: list[int],
        what: str,
        arrived: Callable[[int, Status], None] | None = None,
    ) -> Steps[None]:
        """Wait for all requests; call within :meth:`losses`. After an error the requests are kept.

        Args:
            ranks: the rank of each receive, then of each send.
            arrived: called with the index of a receive and its status.

        Raises:
            WorkerLostError: a member did not answer in time.
            MPI's exception: a member is lost.
        """
        requests = [*receives, *sends]
        try:
            left, watch = list(range(len(requests))), Watch(self, what)
            while True:
                still = []
                for index in left:
                    if not self._is_done(requests[index]):
                        still.append(index)
                    elif arrived is not None and index < len(receives):
                        arrived(ranks[index], self._status)
                if not still:
                    break
                if len(still) == len(left):
                    watch.in_vain(ranks[index] for index in left)
                    yield
                left = still
            self._mpi.Request.Waitall(requests)  # all are complete, and now MPI may forget them
        except BaseException:
            self._receiving += receives
            self._sending += sends
            raise

    def _is_done(self, request: Request) -> bool:
        """Return whether a request is complete; raises MPI's exception where it has failed, and leaves it as it is.

        ``Test`` would free a request that has failed. If the transport below fails later for the same message, Open MPI
        (5.0.11) takes that for an error of a request that nobody has any more, and ends this process: "Send error after
        request freed".
        """
        status = self._status
        if not request.Get_status(status):
            return False
        error = status.error
        if error != self._mpi.SUCCESS:
            raise self._mpi.Exception(error)
        return True

    def _stalled(self, what: str, missing: set[int], waited: float) -> str:
        return f"rank {self.rank} has waited {waited:.0f} s for {_ranks(missing)} to {what} (exchange {self.sequence})"

    # -- losses ---------------------------------------------------------------------------------------------------

    def losses(self, what: str) -> _Losses:
        """Return a block that turns what MPI raises into :class:`WorkerLostError`."""
        return _Losses(self, what)

    def lost(self) -> list[int]:
        """Return the ranks of members that are known to have died."""
        return [] if self._dead is None else sorted(self._dead() & set(self.members))

    def look_for_losses(self) -> None:
        """Call :meth:`_look_for_losses`, at most every tenth of a second, in exchanges that may never wait."""
        now = time.monotonic()
        if now - self._looked > _LOSSES_S:
            self._looked = now
            self._look_for_losses()

    def _look_for_losses(self) -> None:
        """Raise MPI's exception if a member has died, or if another member has noticed a death."""
        if self.lost() or self._hear():
            raise self._mpi.Exception(getattr(self._mpi, "ERR_PROC_FAILED", self._mpi.ERR_OTHER))

    def _listen(self, rank: int) -> None:
        inbox = bytearray(view_bytes(self._comm.size))
        self._inboxes[rank] = self._comm.Irecv([inbox, self._mpi.BYTE], source=rank, tag=_VIEW), inbox

    def _hear(self) -> bool:
        """Read the views that have arrived; return whether one of them is news to this process."""
        news = False
        for rank, (request, inbox) in list(self._inboxes.items()):
            try:
                if not self._is_done(request):
                    continue
            except self._mpi.Exception:  # it is dead, which lost() tells
                del self._inboxes[rank]
                continue
            request.Wait()
            view = View.decode(inbox, rank, self._comm.size)
            self._views[rank] = view
            self._listen(rank)
            news = news or view.epoch > self._epoch or not view.gone <= self._gone
        return news

    # -- agreement ------------------------------------------------------------------------------------------------

    def regroup(self) -> Steps[int]:
        """Go on without the processes that died; returns the rank of the most advanced survivor.

        It returns when every survivor has called it or has ended.

        Raises:
            WorkerLostError: a rank neither called it nor ended in time; this may be called again.
            KVStoreError: this MPI library does not tell of deaths, or the others have gone on without this process.
        """
        if self._dead is None:
            raise KVStoreError("this mpi4py cannot go on after a death: mpi4py 4.1 and Open MPI with ULFM can")
        yield from self._settle()
        self._epoch += 1
        begun, told = time.monotonic(), None
        while True:
            self._hear()
            gone = set(self._gone).union(self.lost())
            for rank, view in self._views.items():
                if rank not in gone:
                    gone |= view.gone
                    self._epoch = max(self._epoch, view.epoch)
            self._gone = frozenset(gone)
            self.members = [rank for rank in range(self._comm.size) if rank not in gone]
            if self.rank in gone:
                raise KVStoreError("the other processes have gone on without this one")
            mine = View(self._epoch, self.sequence, self._gone)
            if mine != told:
                self._tell(mine)
                told = mine
            missing = {rank for rank in self.members if rank != self.rank and not mine.agrees(self._views.get(rank))}
            if not missing:
                break
            if time.monotonic() - begun > self.timeout_s:
                note_loss()
                raise WorkerLostError(
                    f"rank {self.rank} has waited {self.timeout_s:.0f} s for {_ranks(missing)} to go on after a death; "
                    f"gave up"
                )
            yield
        counts = {self.rank: self.sequence, **{r: self._views[r].sequence for r in self.members if r != self.rank}}
        self.sequence = max(counts.values())
        return next(rank for rank in self.members if counts[rank] == self.sequence)

    def depart(self, why: str = "") -> Steps[None]:
        """Tell the other ranks to go on without this process, after a loss or because of a failure.

        Args:
            why: the failure in one line, which the other ranks quote.
        """
        with contextlib.suppress(self._mpi.Exception):
            yield from self._settle()
            self._hear()
            gone = self._gone.union(self.lost(), *(view.gone for view in self._views.values()))
            self._gone = gone | {self.rank}
            self._tell(View(self._epoch + 1, self.sequence, self._gone, why))
            begun = time.monotonic()
            while time.monotonic() - begun < _SETTLE_S:
                self._sending = [request for request in self._sending if not self._ended(request)]
                if not self._sending:
                    break
                yield

    def without(self, ranks: set[int]) -> None:
        """Remove ranks that announced in an exchange that they leave; every remaining rank does this at that
        exchange."""
        if not ranks:
            return
        self._gone |= ranks
        self.members = [rank for rank in self.members if rank not in ranks]

    def stop_listening(self) -> None:
        """Cancel the posted receives for views; MPI cannot shut down with pending receives."""
        for request, _ in self._inboxes.values():
            with contextlib.suppress(self._mpi.Exception):
                request.Cancel()
                request.Wait()
        self._inboxes.clear()

    def _tell(self, view: View) -> None:
        data = view.encode(self._comm.size)
        for rank in self.members:
            if rank != self.rank:
                with contextlib.suppress(self._mpi.Exception):  # of one who has just died
                    self._sending.append(self._comm.Issend([data, self._mpi.BYTE], dest=rank, tag=_VIEW))

    def _settle(self) -> Steps[None]:
        """Wait until MPI writes to no buffer of a lost exchange, so that late data cannot land in the next sum.

        An unmatched receive is cancelled; a matched receive ends with its data or with its sender. Sends are kept
        forever, for the reason in :meth:`_is_done`.
        """
        for request in self._receiving:
            with contextlib.suppress(self._mpi.Exception):
                if request:
                    request.Cancel()
        begun = time.monotonic()
        while self._receiving and time.monotonic() - begun < _SETTLE_S:
            self._receiving = [request for request in self._receiving if not self._ended(request)]
            yield
        if self._receiving:
            log.warning("MPI still receives %d messages of an exchange that was lost", len(self._receiving))

    def _ended(self, request: Request) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception:
            return not request


class Watch:
    """Supervision of one wait: warns about late members, and raises if a member is lost or too late."""

    __slots__ = ("_begun", "_members", "_warned", "_what")

    def __init__(self, members: Members, what: str) -> None:
        self._members, self._what = members, what
        self._begun, self._warned = 0.0, False

    def in_vain(self, missing: Iterable[int]) -> None:
        """Record a poll without progress, and check for losses and time-outs."""
        now, members = time.monotonic(), self._members
        if not self._begun:
            self._begun = now
            return
        waited = now - self._begun
        if waited <= _PATIENCE_S or now - members._looked <= _LOOK_S:
            return
        members._look_for_losses()
        members._looked = now
        if waited > members._stall_s and not self._warned:
            self._warned = True
            log.warning("%s", members._stalled(self._what, set(missing), waited))
        if waited > members.timeout_s:
            note_loss()
            raise WorkerLostError(f"{members._stalled(self._what, set(missing), waited)}; gave up")


class _Losses:
    """Context manager that turns MPI's exceptions into :class:`WorkerLostError`."""

    def __init__(self, group: Members, what: str) -> None:
        self._group, self._what = group, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        group = self._group
        if error is None or not isinstance(error, group._mpi.Exception):
            return
        begun = time.monotonic()
        while True:
            dead = set(group.lost())
            group._hear()
            heard = {rank for teller, view in group._views.items() for rank in view.gone - {teller}}
            heard &= set(group.members)
            failed = {rank: view.why for rank, view in group._views.items() if view.why and rank in group.members}
            if dead or heard or failed or time.monotonic() - begun > _NEWS_S:
                break
            time.sleep(0.01)
        note_loss()
        told = [f"rank {rank} ended by {why}" for rank, why in sorted(failed.items())]
        silent = (dead | heard) - set(failed)
        if silent:
            told.append(f"{_ranks(silent)} died")
        who = "; ".join(told) or f"a rank was lost ({error})"
        raise WorkerLostError(f"{self._what}: {who}; {group.advice}") from error


def _ranks(ranks: set[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
