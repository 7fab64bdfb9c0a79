"""The processes that share a store: messages between them, sums over them, and what happens when one is lost.

A :class:`Group` belongs to the one thread that uses it (``sequencer.py``). Every exchange begins with a message from
each process to each other; as all of them see the same messages, all of them decide the same: to exchange the data, to
fail with the same error, or to go on without those who leave. Only then does data move.

A sum is made in rank order for every element, so its bits depend neither on who comes first nor on how gradients are
cut or joined: each process receives everybody's part of one range, adds them from left to right, and sends the result
to all. Arrays that fit into a message are sent to everybody at once.

All waiting is bounded: after ``stall_s`` a warning names the ranks that have not come, after ``timeout_s`` an error.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from weftplan.errors import KVStoreError, WorkerLostError
from weftplan.kvstore.distributed.mpi import note_loss
from weftplan.kvstore.distributed.wire import INLINE, SIZE, Kind, Message, clip, decode, digest
from weftplan.kvstore.reduce import Array

log = logging.getLogger("weftplan")

_HEADER, _DATA = 1, 2
"""Tags."""

_LOOKS = 50
"""Looks, 10 ms apart, for who has died."""

_SETTLE_S = 2.0
"""Seconds that a process gives MPI to let go of what a loss has interrupted."""

_SPINS = 2000
"""Looks at the requests before a waiting thread sleeps between them."""


class Group:
    """The members of a store.

    Attributes:
        members: their ranks in the job, ascending; positions in this list are MPI's ranks of the communicator.
        sequence: exchanges completed so far.
        timeout_s: seconds of waiting after which a process counts as lost.

    ``add(shares, total)`` makes ``total`` the sum of arrays from left to right.
    """

    def __init__(self, mpi: Any, comm: Any, *, stall_s: float, timeout_s: float, add: Callable[..., None]) -> None:
        self._mpi = mpi
        self._comm = comm
        self._stall_s, self.timeout_s = stall_s, timeout_s
        self._add = add
        self._scratch = np.empty(0, np.uint8)
        self._receiving: list[Any] = []
        self._sending: list[Any] = []
        """Requests of exchanges that a loss has ended; they keep their buffers, which MPI may still write and read."""
        self.members: list[int] = list(range(comm.size))
        self.sequence = 0

    @property
    def position(self) -> int:
        """This process's place among the members."""
        return int(self._comm.rank)

    @property
    def world_rank(self) -> int:
        """This process's rank in the job, which never changes."""
        return self.members[self.position]

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept for parts of other processes' arrays."""
        return self._scratch.nbytes

    # -- exchanges ------------------------------------------------------------------------------------------------

    def sum(self, array: Array, description: str, failure: str | None = None) -> None:
        """Replace a contiguous ``array`` by its sum over all members.

        Args:
            array: this process's share. Its values are undefined after an error.
            description: what is summed; must be the same everywhere.
            failure: why this process has no share. Everybody's call raises then.

        Raises:
            KVStoreError: a member failed, exchanges something else, or did not come in time.
            WorkerLostError: a member died.
        """
        data = _bytes(array)
        messages = self._meet(description, failure, data, inline=True)
        if len(self.members) > 1 and array.size:
            if data.nbytes <= INLINE:
                shares = [np.frombuffer(message.payload, array.dtype) for message in messages]
                total = np.empty(array.size, array.dtype)
                self._add(shares, total)
                array.reshape(-1)[...] = total
            else:
                self._sum_ranges(array.reshape(-1), description)
        self.sequence += 1

    def broadcast(self, array: Array, root: int, description: str, failure: str | None = None) -> None:
        """Replace a contiguous ``array`` by that of rank ``root``; raises as :meth:`sum` does.

        Where that rank has left meanwhile, the first member's array is taken.
        """
        data = _bytes(array)
        messages = self._meet(description, failure, data, inline=True)
        place = self.members.index(root) if root in self.members else 0
        if self.position == place:
            if data.nbytes > INLINE:
                self._move(dict.fromkeys(self._others(), data), {}, description)
        elif data.nbytes > INLINE:
            self._move({}, {place: data}, description)
        else:
            data[:] = messages[place].payload
        self.sequence += 1

    def gather(self, array: Array, description: str, failure: str | None = None) -> list[Array]:
        """Every member's ``array``, by position; they are valid until the next exchange. Raises as :meth:`sum` does."""
        data = _bytes(array)
        messages = self._meet(description, failure, data, inline=True)
        self.sequence += 1
        if data.nbytes <= INLINE:
            return [np.frombuffer(message.payload, array.dtype) for message in messages]
        rows = self._room((len(self.members), array.size), array.dtype)
        self._move(
            dict.fromkeys(self._others(), data), {place: _bytes(rows[place]) for place in self._others()}, description
        )
        return [array if place == self.position else rows[place] for place in range(len(self.members))]

    def meet(self, description: str) -> None:
        """Return when every member is here; raises as :meth:`sum` does."""
        self._meet(description, None, memoryview(b""), inline=False)
        self.sequence += 1

    def leave(self) -> None:
        """Take part in nothing any more; the others go on without this process at their next exchange."""
        self._swap(Message(Kind.LEAVE, self.sequence, bytes(8)), "the end of its work")

    def shrink(self) -> int:
        """Go on without the processes that died; returns the rank of the most advanced survivor.

        It returns when every survivor has called it or has ended.

        Raises:
            WorkerLostError: another process died meanwhile; this may be called again.
            KVStoreError: this MPI library cannot do that.
        """
        if not hasattr(self._comm, "Shrink"):
            raise KVStoreError("this mpi4py cannot go on after a death: mpi4py 4.1 and Open MPI with ULFM can")
        with self.losses("go on after a death"):
            self._comm.Revoke()
            self._settle()
            self._renew(self._comm.Shrink())  # Ishrink would let us look at the clock, but ends in an error (5.0.11)
            counts = np.zeros(len(self.members), np.int64)
            self._comm.Allgather(np.array([self.sequence], np.int64), counts)
        self.sequence = int(counts.max())
        return self.members[int(counts.argmax())]

    # -- messages -------------------------------------------------------------------------------------------------

    def _meet(self, description: str, failure: str | None, data: memoryview, *, inline: bool) -> list[Message]:
        """Exchange messages until all who are left want the same; returns them by position, one's own included."""
        mark = digest(description)
        if failure is None:
            payload = bytes(data) if inline and data.nbytes <= INLINE else b""
            own = Message(Kind.READY, self.sequence, mark, data.nbytes, payload)
        else:
            own = Message(Kind.FAILED, self.sequence, mark, data.nbytes, clip(failure))
        while True:
            messages = self._swap(own, description)
            leaving = [place for place, message in enumerate(messages) if message.kind is Kind.LEAVE]
            if not leaving:
                break
            self._go_on_without(leaving)
        failed = [(self.members[p], message.text) for p, message in enumerate(messages) if message.kind is Kind.FAILED]
        sizes = {message.nbytes for message in messages if message.kind is Kind.READY}
        if len({message.digest for message in messages}) > 1 or len(sizes) > 1:
            self.sequence += 1
            raise self._difference(description)
        if failed:
            self.sequence += 1
            rank, reason = failed[0]
            raise KVStoreError(f"{description}: rank {rank} has no value for it: {reason}")
        return messages

    def _swap(self, own: Message, what: str) -> list[Message]:
        """Send one message to every member, receive one from each.

        Sends are synchronous. A small one would otherwise be complete before it has left this process, and what
        :meth:`_is_done` avoids could happen to it.
        """
        mpi, others = self._mpi, self._others()
        encoded = own.encode()
        found: dict[int, Message] = {self.position: own}
        inbox = {place: bytearray(SIZE) for place in others}

        def arrived(place: int, status: Any) -> None:
            count = status.Get_count(mpi.BYTE)
            found[place] = decode(memoryview(inbox[place])[:count], self.members[place])

        with self.losses(what):
            receives = [self._comm.Irecv([inbox[p], mpi.BYTE], source=p, tag=_HEADER) for p in others]
            sends = [self._comm.Issend([encoded, mpi.BYTE], dest=p, tag=_HEADER) for p in others]
            self.wait(receives, sends, [*others, *others], what, arrived)
        return [found[place] for place in range(len(self.members))]

    def _difference(self, description: str) -> KVStoreError:
        """What the members wanted instead of the same."""
        texts = [
            message.text
            for message in self._swap(
                Message(Kind.TEXT, self.sequence, bytes(8), payload=clip(description)), description
            )
        ]
        rank, other = next(
            ((self.members[p], text) for p, text in enumerate(texts) if text != description),
            (self.members[0], "arrays of other sizes"),
        )
        return KVStoreError(
            f"the processes do not do the same: rank {self.members[self.position]} wants to {description}, rank {rank} "
            f"to {other}. Make the same calls of the store, in the same order, on every rank"
        )

    def _others(self) -> list[int]:
        """Every other position, beginning behind one's own, so that not everybody sends to the same one first."""
        size = len(self.members)
        return [(self.position + step) % size for step in range(1, size)]

    # -- data -----------------------------------------------------------------------------------------------------

    def _sum_ranges(self, flat: Array, description: str) -> None:
        size, me = len(self.members), self.position
        bounds = [flat.size * place // size for place in range(size + 1)]
        mine = flat[bounds[me] : bounds[me + 1]]
        rows = self._room((size, mine.size), flat.dtype)
        ranges = {place: flat[bounds[place] : bounds[place + 1]] for place in range(size)}
        self._move(
            {place: _bytes(ranges[place]) for place in self._others()},
            {place: _bytes(rows[place]) for place in self._others()},
            description,
        )
        # Rank order, and the sum goes into the row that nobody sent: `mine` must be whole until all is added.
        self._add([mine if place == me else rows[place] for place in range(size)], rows[me])
        self._move(
            dict.fromkeys(self._others(), _bytes(rows[me])),
            {place: _bytes(ranges[place]) for place in self._others()},
            description,
        )
        mine[...] = rows[me]

    def _move(self, outgoing: Mapping[int, memoryview], incoming: Mapping[int, memoryview], what: str) -> None:
        """Send and receive data, all at once."""
        byte = self._mpi.BYTE
        with self.losses(what):
            receives = [self._comm.Irecv([data, byte], source=p, tag=_DATA) for p, data in incoming.items()]
            sends = [self._comm.Issend([data, byte], dest=p, tag=_DATA) for p, data in outgoing.items()]
            self.wait(receives, sends, [*incoming, *outgoing], what)

    def _room(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
        """Scratch for that many elements, kept for the next time."""
        nbytes = shape[0] * shape[1] * dtype.itemsize
        if self._scratch.nbytes < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch[:nbytes].view(dtype).reshape(shape)

    # -- waiting, and losses --------------------------------------------------------------------------------------

    def wait(
        self,
        receives: list[Any],
        sends: list[Any],
        places: list[int],
        what: str,
        arrived: Callable[[int, Any], None] | None = None,
    ) -> None:
        """Until all requests are done; ``places`` are those of both, and ``arrived`` hears of each receive's status.

        To be called within :meth:`losses`. Raises MPI's exception where a member is lost, and WorkerLostError where one
        does not come in time; the requests are then kept.
        """
        try:
            self._wait_for([*receives, *sends], len(receives), places, what, arrived)
        except BaseException:
            self._receiving += receives
            self._sending += sends
            raise

    def _wait_for(
        self,
        requests: list[Any],
        first_send: int,
        places: list[int],
        what: str,
        arrived: Callable[[int, Any], None] | None,
    ) -> None:
        mpi, status = self._mpi, self._mpi.Status()
        left, spins = set(range(len(requests))), 0
        begun = time.monotonic()
        warned = False
        while left:
            done = []
            for index in left:
                if self._is_done(requests[index], status):
                    done.append(index)
                    if arrived is not None and index < first_send:
                        arrived(places[index], status)
            left.difference_update(done)
            if done:
                continue
            spins += 1
            if spins < _SPINS:
                os.sched_yield()
                continue
            self._look_for_losses()
            time.sleep(0.0001 if spins < 2 * _SPINS else 0.001)
            waited = time.monotonic() - begun
            if waited > self._stall_s and not warned:
                warned = True
                log.warning("%s", self._stalled(what, left, places, waited))
            if waited > self.timeout_s:
                raise WorkerLostError(f"{self._stalled(what, left, places, waited)}; gave up")
        mpi.Request.Waitall(requests)  # all are complete, and now MPI may forget them

    def _is_done(self, request: Any, status: Any) -> bool:
        """Whether a request is complete; raises MPI's exception where it has failed, and leaves it as it is.

        ``Test`` would free a request that has failed. If the transport below fails later for the same message, Open MPI
        (5.0.11) takes that for an error of a request that nobody has any more, and ends this process: "Send error after
        request freed".
        """
        if not request.Get_status(status):
            return False
        error = status.Get_error()
        if error != self._mpi.SUCCESS:
            raise self._mpi.Exception(error)
        return True

    def _look_for_losses(self) -> None:
        """Raise MPI's exception where a member has died or another one has noticed that."""
        if self.lost() or (hasattr(self._comm, "Is_revoked") and self._comm.Is_revoked()):
            raise self._mpi.Exception(getattr(self._mpi, "ERR_PROC_FAILED", self._mpi.ERR_OTHER))

    def _stalled(self, what: str, left: set[int], places: list[int], waited: float) -> str:
        ranks = sorted({self.members[places[index]] for index in left})
        return (
            f"rank {self.members[self.position]} has waited {waited:.0f} s for rank"
            f"{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} to {what} (exchange {self.sequence})"
        )

    def _settle(self) -> None:
        """Until MPI writes to no buffer of a lost exchange any more: late data must not land in the next sum.

        Sends are kept for good, for the reason that :meth:`_is_done` gives.
        """
        begun = time.monotonic()
        while self._receiving and time.monotonic() - begun < _SETTLE_S:
            self._receiving = [request for request in self._receiving if not self._ended(request)]
        if self._receiving:
            log.warning("MPI still receives %d messages of an exchange that was lost", len(self._receiving))

    def _ended(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception:
            return not request

    def losses(self, what: str) -> _Losses:
        """A block that turns what MPI raises into :class:`WorkerLostError`."""
        return _Losses(self, what)

    def lost(self) -> list[int]:
        """Ranks of members that are known to have died."""
        world = self._mpi.COMM_WORLD  # its ranks are those of `members`, and it still works when another is revoked
        if not hasattr(world, "Get_failed"):
            return []
        world.Iprobe(source=world.rank)  # lets MPI take in the news
        dead = world.Get_failed()
        ranks = self._mpi.Group.Translate_ranks(dead, list(range(dead.size)), world.group)
        return sorted(set(ranks) & set(self.members))

    def _go_on_without(self, leaving: Sequence[int]) -> None:
        rest = [place for place in range(len(self.members)) if place not in leaving]
        self._renew(self._comm.Create_group(self._comm.group.Incl(rest)))

    def _renew(self, comm: Any) -> None:
        """Go on with a communicator of some of the members."""
        places = self._mpi.Group.Translate_ranks(comm.group, list(range(comm.size)), self._comm.group)
        self.members = [self.members[place] for place in places]
        self._comm = comm


class _Losses:
    """Turns what MPI raises in a block into :class:`WorkerLostError`."""

    def __init__(self, group: Group, what: str) -> None:
        self._group, self._what = group, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, self._group._mpi.Exception):
            return
        for _ in range(_LOOKS):  # the news that a process is dead may come after the first error
            dead = self._group.lost()
            if dead:
                break
            time.sleep(0.01)
        note_loss()
        who = f"rank{'s' * (len(dead) > 1)} {', '.join(map(str, dead))} died" if dead else f"a rank was lost ({error})"
        raise WorkerLostError(f"{self._what}: {who}; kv.recover() goes on without") from error


def _bytes(array: Array) -> memoryview:
    """The bytes of a contiguous array."""
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)
