"""Group membership: waits for members, detection of lost members, agreement on the survivors.

All messages go from one process to another, over one communicator that never changes. A process that dies makes MPI's
functions over *all* processes unusable, but not messages between those that live, so nothing has to be repaired after a
death: the survivors only have to agree on who they are (:meth:`Members.regroup`). Each tells every other its *view*:
the number of the agreement (the *epoch*) and who is gone. Whoever hears of somebody gone, or of a later epoch, takes
that over and tells its new view. Views only grow, so this ends; it is over for a process when all who are not gone have
told it the view that it has itself. Epochs are part of the tags, so a message of an exchange that was lost meets no
receive of a later one.

Two survivors may end with different views when a third one dies in between. The one that does not know yet learns it in
its next exchange, by the death itself or by the other's view, for which a receive always stands.

Everything here belongs to whoever drives the exchanges (``sequencer.py``), one thread at a time. What takes time is a
generator (:data:`Steps`): it yields where it has to wait, so the driver decides how.
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
"""Tag of views; those of exchanges are larger."""

_PATIENCE_S = 0.01
"""Seconds of waiting after which a process begins to look for losses."""

_LOOK_S = 0.001
"""Seconds between two looks."""

_LOSSES_S = 0.1
"""Seconds between two looks for losses of exchanges that do not wait."""

_SETTLE_S = 2.0
"""Seconds that a process gives MPI to let go of what a loss has interrupted, or to deliver its last word."""

_NEWS_S = 0.5
"""Seconds in which the news of a death may come after the first error."""


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
        """What follows from a loss, in words."""
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
        """The last one of each other process."""
        self._inboxes: dict[int, tuple[Request, bytearray]] = {}
        self._looked = 0.0
        for rank in self.members:
            if rank != self.rank:
                self._listen(rank)

    @property
    def position(self) -> int:
        """This process's place among the members."""
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
        """Until all requests are done; ``ranks`` are those of both, and ``arrived`` hears of each receive's status.

        To be run within :meth:`losses`. Raises MPI's exception where a member is lost, and WorkerLostError where one
        does not come in time; the requests are then kept.
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
        """Ranks of members that are known to have died."""
        return [] if self._dead is None else sorted(self._dead() & set(self.members))

    def look_for_losses(self) -> None:
        """As :meth:`_look_for_losses`, at most every tenth of a second: for exchanges that may never have to wait."""
        now = time.monotonic()
        if now - self._looked > _LOSSES_S:
            self._looked = now
            self._look_for_losses()

    def _look_for_losses(self) -> None:
        """Raise MPI's exception where a member has died or another one has noticed that."""
        if self.lost() or self._hear():
            raise self._mpi.Exception(getattr(self._mpi, "ERR_PROC_FAILED", self._mpi.ERR_OTHER))

    def _listen(self, rank: int) -> None:
        inbox = bytearray(view_bytes(self._comm.size))
        self._inboxes[rank] = self._comm.Irecv([inbox, self._mpi.BYTE], source=rank, tag=_VIEW), inbox

    def _hear(self) -> bool:
        """Take in the views that have come; True when one of them says what this process does not know."""
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
            WorkerLostError: somebody neither came nor ended in time; this may be called again.
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
        """Tell the others to go on without this process, after a loss or because it fails; else its end tells them.

        Args:
            why: how it fails, in one line; the others quote it.
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
        """Go on without those that have said in an exchange that they leave; all who are left do this at once."""
        if not ranks:
            return
        self._gone |= ranks
        self.members = [rank for rank in self.members if rank not in ranks]

    def stop_listening(self) -> None:
        """Take back the receives that stand for views: MPI ends only when there are none."""
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
        """Until MPI writes to no buffer of a lost exchange any more: late data must not land in the next sum.

        A receive that met no message is taken back; one that did ends with its data or with its sender. Sends are kept
        for good, for the reason that :meth:`_is_done` gives.
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
    """Keeps an eye on a wait: raises where a member is lost or does not come in time, and warns before."""

    __slots__ = ("_begun", "_members", "_warned", "_what")

    def __init__(self, members: Members, what: str) -> None:
        self._members, self._what = members, what
        self._begun, self._warned = 0.0, False

    def in_vain(self, missing: Iterable[int]) -> None:
        """Nothing has come since the last look."""
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
    """Turns what MPI raises in a block into :class:`WorkerLostError`."""

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
