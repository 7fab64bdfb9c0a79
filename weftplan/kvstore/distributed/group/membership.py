"""Group membership: waits for members, detection of lost members, agreement on the survivors.

All messages are point-to-point, over one communicator that never changes. A dead process makes MPI's collective
functions unusable, but not messages between live processes. So the survivors only have to agree on their set
(:meth:`Members.regroup`). Each survivor sends its *view* to every other survivor: the number of the agreement (the
*epoch*) and the ranks that are gone. A survivor that receives a larger set or a later epoch adopts it and sends its new
view. Views only grow, so this terminates. A survivor is done when every rank that is not gone has sent it an equal
view. Tags contain the epoch, so a message of a lost exchange never matches a later receive.

Two survivors may finish with different views if a third process dies in between. The survivor that does not know of
this death yet learns of it in its next exchange, from MPI or from the other survivor's view, because a receive for
views is always posted.

Only the thread that drives the sequencer (``sequencer.py``) calls this module. Functions that may wait are generators
(:data:`Steps`): they yield instead of waiting, and the driving thread decides how to wait.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from weftplan.errors import KVStoreError, WorkerLostError
from weftplan.kvstore.distributed.transport.mpi_types import Connection, JobRank, Position, Request, Status
from weftplan.kvstore.distributed.transport.shutdown import note_loss
from weftplan.kvstore.distributed.transport.wire import View, view_bytes
from weftplan.support.package_log import log

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that yields whenever it has to wait, and returns its result."""

_VIEW = 1
"""Tag of views; tags of exchanges are larger."""

_PATIENCE_S = 0.01
"""Seconds of waiting after which a process begins to check for losses."""

_LOOK_S = 0.001
"""Minimum seconds between two checks for losses during a wait."""

_LOSSES_S = 0.1
"""Minimum seconds between two checks for losses in exchanges that do not wait."""

_SETTLE_S = 2.0
"""Seconds allowed for MPI to end receives of a lost exchange, or to deliver a last view."""

_NEWS_S = 0.5
"""Maximum seconds to wait, after an error of MPI, until MPI or another member's view names the lost rank."""


class Members:
    """The processes that share a store, as seen by this process.

    Guarantees:

    * After :meth:`regroup` all survivors have equal members, epochs and sequence numbers, unless another process dies
      meanwhile; the next exchange then fails.
    * A message of a lost exchange matches no later receive. Its receives have ended before :meth:`regroup` returns, or
      a warning says that MPI did not end them.
    * No wait for a message of another process is longer than ``timeout_s``.

    The rank, the size of the job and the time-outs are fixed. Members only leave: between two connections ``members``
    shrinks, ``_gone`` and ``_epoch`` grow. :meth:`_join` resets all of it for a new connection.

    Attributes:
        members: ranks of the current members in the job, ascending.
        rank: rank of this process in the job. Compare it with ranks only: it is a :attr:`position` only before a loss.
        sequence: number of exchanges completed, including those that failed on all members.
        timeout_s: seconds of waiting after which a process counts as lost.
    """

    def __init__(self, connection: Connection, *, stall_s: float, timeout_s: float) -> None:
        self._stall_s, self.timeout_s = stall_s, timeout_s
        self.advice = "kv.recover() goes on without the lost ranks"
        """Advice at the end of error messages about a loss."""
        self._join(connection)

    def _join(self, connection: Connection) -> None:
        """Reset all state for a connection; its processes, or this process alone, become the members."""
        self._connection = connection
        self._mpi, self._comm, self._dead = connection.library, connection.comm, connection.dead
        self._status = self._mpi.Status()
        self._receiving: list[Request] = []
        """Receives of lost exchanges, whose buffers MPI may still write to."""
        self._sending: list[Request] = []
        """Sends of lost exchanges, and of views, whose buffers MPI may still read."""
        self.rank = JobRank(self._comm.rank)
        self.members = [self.rank] if connection.is_alone else self._ranks_of_job()
        self.sequence = 0
        self._epoch = 0
        self._departed: frozenset[JobRank] = frozenset()
        self._views: dict[JobRank, View] = {}
        """Last view received from each other process."""
        self._inboxes: dict[JobRank, tuple[Request, bytearray]] = {}
        """The posted receive for the next view of each other rank, with the buffer."""
        self._looked = 0.0
        """``time.monotonic()`` of the last check for losses."""
        for rank in self.members:
            if rank != self.rank:
                self._listen(rank)

    @property
    def position(self) -> Position:
        """Index of this process among the members."""
        return Position(self.members.index(self.rank))

    @property
    def job_size(self) -> int:
        """The number of processes with which the job started, including those that have left or died."""
        return self._comm.size

    def _ranks_of_job(self) -> list[JobRank]:
        return [JobRank(rank) for rank in range(self._comm.size)]

    @property
    def is_alone(self) -> bool:
        """Whether this process replaces a lost process and has not joined the other processes yet."""
        return self._connection.is_alone

    # -- waiting --------------------------------------------------------------------------------------------------

    def wait(
        self,
        receives: list[Request],
        sends: list[Request],
        ranks: list[JobRank],
        what: str,
        arrived: Callable[[JobRank, Status], None] | None = None,
    ) -> Steps[None]:
        """Wait for all requests; to be called inside :meth:`losses`.

        Args:
            receives: receive requests.
            sends: send requests.
            ranks: the source rank of each receive, then the target rank of each send.
            what: description of the exchange for errors.
            arrived: function called with the source rank and the status of each completed receive.

        Raises:
            WorkerLostError: a member is too late.
            MPI's exception: a member is lost.
        """
        requests = [*receives, *sends]
        try:
            pending, watch = list(range(len(requests))), LossWatch(self, what)
            while True:
                still = []
                for index in pending:
                    if not self._is_over(requests[index]):
                        still.append(index)
                    elif arrived is not None and index < len(receives):
                        arrived(ranks[index], self._status)
                if not still:
                    break
                if len(still) == len(pending):
                    watch.in_vain(ranks[index] for index in pending)
                    yield
                pending = still
            self._mpi.Request.Waitall(requests)  # all are complete; this lets MPI free them
        except BaseException:
            # MPI may still access the buffers of unfinished requests: keep them alive.
            self._receiving += receives
            self._sending += sends
            raise

    def _is_over(self, request: Request) -> bool:
        """Return whether a request is complete; raise MPI's exception if it has failed. The request is not freed."""
        # `Test` would free a failed request. If the transport then fails for the same message, Open MPI (5.0.11) finds
        # no request for the error and ends this process with "Send error after request freed".
        status = self._status
        if not request.Get_status(status):
            return False
        error = status.error
        if error != self._mpi.SUCCESS:
            raise self._mpi.Exception(error)
        return True

    def _stalled(self, what: str, missing: set[JobRank], waited: float) -> str:
        return f"rank {self.rank} has waited {waited:.0f} s for {_ranks(missing)} to {what} (exchange {self.sequence})"

    # -- losses ---------------------------------------------------------------------------------------------------

    def losses(self, what: str) -> _Losses:
        """Return a context manager that turns MPI's exceptions into a :class:`WorkerLostError` about ``what``."""
        return _Losses(self, what)

    def lost(self) -> list[JobRank]:
        """Return the members that MPI reports as dead; an empty list if MPI cannot report deaths."""
        return [] if self._dead is None else sorted(self._dead() & set(self.members))

    def look_for_losses(self) -> None:
        """Check for losses, at most every 0.1 s; for exchanges that may never wait.

        Raises:
            MPI's exception: a member has died, or another member has reported a loss or its own failure.
        """
        now_s = time.monotonic()
        if now_s - self._looked > _LOSSES_S:
            self._looked = now_s
            self._look_for_losses()

    def _look_for_losses(self) -> None:
        """Raise MPI's exception if a member has died, or if another member has reported a loss or its own failure."""
        if self.lost() or self._hear():
            raise self._mpi.Exception(getattr(self._mpi, "ERR_PROC_FAILED", self._mpi.ERR_OTHER))

    def _listen(self, rank: JobRank) -> None:
        inbox = bytearray(view_bytes(self._comm.size))
        self._inboxes[rank] = self._comm.Irecv([inbox, self._mpi.BYTE], source=rank, tag=_VIEW), inbox

    def _hear(self) -> bool:
        """Read the views that have arrived; return whether a view reports a later epoch or a further lost rank."""
        news = False
        for rank, (request, inbox) in list(self._inboxes.items()):
            try:
                if not self._is_over(request):
                    continue
            except self._mpi.Exception:  # the sender is dead; lost() reports it
                del self._inboxes[rank]
                continue
            request.Wait()
            view = View.decode(inbox, rank, self._comm.size)
            self._views[rank] = view
            self._listen(rank)
            news = news or view.epoch > self._epoch or not view.departed <= self._departed
        return news

    # -- agreement ------------------------------------------------------------------------------------------------

    def regroup(self) -> Steps[JobRank]:
        """Agree with all survivors on the set of members, without the dead; every survivor calls this.

        Returns:
            The lowest rank among the survivors that have completed the most exchanges.

        Raises:
            WorkerLostError: a rank neither called this nor ended in time; the caller may try again.
            KVStoreError: this MPI library does not report deaths, or the others have gone on without this process.
        """
        if self._dead is None:
            raise KVStoreError("this mpi4py cannot go on after a death: mpi4py 4.1 and Open MPI with ULFM can")
        yield from self._settle()
        self._epoch += 1
        # Adopt everything that others report, send each changed view, and stop when all members' views are equal.
        begun, previous_report = time.monotonic(), None
        while True:
            self._hear()
            departed = set(self._departed).union(self.lost())
            for rank, view in self._views.items():
                if rank not in departed:
                    departed |= view.departed
                    self._epoch = max(self._epoch, view.epoch)
            self._departed = frozenset(departed)
            self.members = [rank for rank in self._ranks_of_job() if rank not in departed]
            if self.rank in departed:
                raise KVStoreError("the other processes have gone on without this one")
            mine = View(self._epoch, self.sequence, self._departed)
            if mine != previous_report:
                self._tell(mine)
                previous_report = mine
            missing = {rank for rank in self.members if rank != self.rank and not mine.agrees(self._views.get(rank))}
            if not missing:
                break
            if time.monotonic() - begun > self.timeout_s:
                note_loss(missing)
                raise WorkerLostError(
                    f"rank {self.rank} has waited {self.timeout_s:.0f} s for {_ranks(missing)} to go on after a death; "
                    f"gave up"
                )
            yield
        # Counters may differ by one, if a survivor completed the last exchange and another did not.
        counts = {self.rank: self.sequence, **{r: self._views[r].sequence for r in self.members if r != self.rank}}
        self.sequence = max(counts.values())
        return next(rank for rank in self.members if counts[rank] == self.sequence)

    def depart(self, why: str = "") -> Steps[None]:
        """Notify the other ranks that this process leaves, after a loss or because of a failure.

        Args:
            why: the failure of this process in one line, which the other ranks quote; empty without a failure.
        """
        with contextlib.suppress(self._mpi.Exception):
            yield from self._settle()
            self._hear()
            departed = self._departed.union(self.lost(), *(view.departed for view in self._views.values()))
            self._departed = departed | {self.rank}
            self._tell(View(self._epoch + 1, self.sequence, self._departed, why))
            begun = time.monotonic()
            while time.monotonic() - begun < _SETTLE_S:
                self._sending = [request for request in self._sending if not self._ended(request)]
                if not self._sending:
                    break
                yield

    def without(self, ranks: set[JobRank]) -> None:
        """Remove ranks that have announced in an exchange that they leave; all remaining ranks call this then."""
        if not ranks:
            return
        self._departed |= ranks
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
                with contextlib.suppress(self._mpi.Exception):  # the rank has just died
                    self._sending.append(self._comm.Issend([data, self._mpi.BYTE], dest=rank, tag=_VIEW))

    def _settle(self) -> Steps[None]:
        """Cancel the receives of lost exchanges, and wait at most ``_SETTLE_S`` seconds until all of them have ended.

        MPI then writes to their buffers no more, so late data cannot get into the next sum.
        """
        # An unmatched receive is cancelled; a matched receive ends with its data or with its sender's death. Sends are
        # kept alive for ever, for the reason in _is_done.
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


class LossWatch:
    """Supervisor of one wait: it warns about late members, and raises if a member is lost or too late."""

    __slots__ = ("_begun", "_members", "_warned", "_what")

    def __init__(self, members: Members, what: str) -> None:
        self._members, self._what = members, what
        self._begun, self._warned = 0.0, False

    def in_vain(self, missing: Iterable[JobRank]) -> None:
        """Check for losses and time-outs after a poll without progress; ``missing`` are the awaited ranks.

        Raises:
            WorkerLostError: a member is too late.
            MPI's exception: a member is lost.
        """
        now_s, members = time.monotonic(), self._members
        if not self._begun:
            self._begun = now_s
            return
        waited = now_s - self._begun
        if waited <= _PATIENCE_S or now_s - members._looked <= _LOOK_S:
            return
        members._look_for_losses()
        members._looked = now_s
        if waited > members._stall_s and not self._warned:
            self._warned = True
            log.warning("%s", members._stalled(self._what, set(missing), waited))
        if waited > members.timeout_s:
            late = set(missing)
            note_loss(late)
            raise WorkerLostError(f"{members._stalled(self._what, late, waited)}; gave up")


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
        # MPI's exception does not name the lost rank. Wait a little for MPI's report or another member's view.
        begun = time.monotonic()
        while True:
            dead = set(group.lost())
            group._hear()
            heard = {rank for teller, view in group._views.items() for rank in view.departed - {teller}}
            heard &= set(group.members)
            failed = {rank: view.why for rank, view in group._views.items() if view.why and rank in group.members}
            if dead or heard or failed or time.monotonic() - begun > _NEWS_S:
                break
            time.sleep(0.01)
        note_loss()
        reports = [f"rank {rank} ended by {why}" for rank, why in sorted(failed.items())]
        silent = (dead | heard) - set(failed)
        if silent:
            reports.append(f"{_ranks(silent)} died")
        who = "; ".join(reports) or f"a rank was lost ({error})"
        raise WorkerLostError(f"{self._what}: {who}; {group.advice}") from error


def _ranks(ranks: set[JobRank]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"
