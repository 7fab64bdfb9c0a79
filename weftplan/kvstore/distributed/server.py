"""The server half of ``dist_async``: a thread in every process, which owns a share of the values.

A small value lives on one server whole; one of at least MXNET_KVSTORE_BIGARRAY_BOUND elements is cut into one range
for each. Requests of a client are answered in order, one at a time: a push is one update, a pull returns the current
values. Every answer has the version of the range, which is the number of its updates.

A request is a header of fixed size, then optional data; an answer likewise. Nothing is pickled.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType

import numpy as np

from weftplan.engine import get as get_engine
from weftplan.engine.factory import nested
from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.group.group import Group
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.transport.mpi_types import Communicator, Message, Request
from weftplan.kvstore.keys import Key
from weftplan.kvstore.reduce import Array
from weftplan.kvstore.updater import Updater
from weftplan.ndarray import NDArray, array, empty

REQUEST, REQUEST_DATA, ANSWER, ANSWER_DATA = 11, 12, 13, 14
"""Tags."""

TEXT = 1024
"""Bytes of an error's text at most."""

_LAYOUT = struct.Struct("<4sHHQQdQ")
"""Magic, verb, whether a rate follows, key number, version, learning rate, bytes of data."""
_MAGIC = b"WFA1"
HEADER = _LAYOUT.size


class Verb(IntEnum):
    """Kinds of requests and answers."""

    PUSH = 1
    PULL = 2
    DONE = 3
    FAILED = 4
    STATES = 5
    """Answer with the optimizer's states of a range."""
    RESTORE = 6
    """Take over states of a range, which follow."""


WITH_DATA = frozenset((Verb.PUSH, Verb.RESTORE))
"""Requests that are followed by data."""


@dataclass(frozen=True, slots=True)
class Header:
    """One request or answer.

    Attributes:
        verb: kind of the request or answer.
        number: number of the key.
        version: of a push, the version that the client saw last; of an answer, the range's version now.
        nbytes: bytes of data after the header.
        rate: of a push, the learning rate to use; None keeps it.
    """

    verb: Verb
    number: int
    version: int = 0
    nbytes: int = 0
    rate: float | None = None

    def encode(self) -> bytes:
        """Return the bytes to send."""
        rated = self.rate is not None
        return _LAYOUT.pack(_MAGIC, self.verb, rated, self.number, self.version, self.rate or 0.0, self.nbytes)

    @classmethod
    def decode(cls, data: bytes | bytearray, sender: int) -> Header:
        """Return the header in ``data``; raise KVStoreError, which names the sender, if there is none."""
        if len(data) != HEADER:
            raise KVStoreError(f"rank {sender} sent {len(data)} bytes, a header has {HEADER}")
        magic, verb, rated, number, version, rate, nbytes = _LAYOUT.unpack(data)
        if magic != _MAGIC or verb not in Verb._value2member_map_ or rated not in (0, 1):
            raise KVStoreError(f"rank {sender} sent a header of another kind: {bytes(data[:8])!r}")
        return cls(Verb(verb), number, version, nbytes, rate if rated else None)


@dataclass(slots=True)
class Range:
    """A part of one value on its server, with the number of updates that made it.

    Attributes:
        values: initial values.
        weight, gradient: arrays of the server's thread, created by the first push.
    """

    key: Key
    values: Array
    weight: NDArray | None = None
    gradient: NDArray | None = None
    version: int = 0


def placement(number: int, size: int, servers: int, bound: int) -> list[tuple[int, int, int]]:
    """Return (server, first element, end) for each range of the value with key ``number``, as MXNet places them.

    >>> placement(1, 10, 3, 100), placement(1, 10, 3, 5)
    ([(1, 0, 10)], [(0, 0, 3), (1, 3, 7), (2, 7, 10)])
    """
    if size < bound or servers == 1:
        return [((number * 9973) % servers, 0, size)]
    bounds = [round(size / servers * part) for part in range(servers + 1)]
    return [(server, bounds[server], bounds[server + 1]) for server in range(servers)]


@dataclass(slots=True)
class Pending:
    """A request of a client whose data have not arrived; the client's later requests wait for it."""

    request: Header
    room: Array | None = None
    """Buffer that MPI fills, once the data's message was matched."""
    receive: Request | None = None
    """MPI's request for it."""


class Server:
    """The server thread. The program calls ``add`` and ``use`` before any client can request their values.

    No receive blocks: a client that is stopped between a header and its data holds up its own requests only.
    """

    def __init__(self, mpi: ModuleType, comm: Communicator) -> None:
        self._mpi, self._comm = mpi, comm
        self._status = mpi.Status()
        self._ranges: dict[int, Range] = {}
        self._updater: Updater | None = None
        self._ending: Request | None = None
        self._waiting: dict[int, deque[Pending]] = {}
        """Requests of each client, in order of arrival."""
        self._sending: list[tuple[Request, object]] = []
        """Requests of answers under way, each with the bytes that it sends."""
        self._undelivered: list[tuple[Request, object]] = []
        """Requests that the death of a client has ended; they keep their buffers."""
        self.pushes = 0
        self.staleness_max = 0
        self.staleness_sum = 0
        self._thread = threading.Thread(target=self._run, name="weftplan-server", daemon=True)
        self._thread.start()

    def add(self, number: int, key: Key, values: Array) -> None:
        """Own a range with these values."""
        self._ranges[number] = Range(key, values.copy())

    def use(self, updater: Updater) -> None:
        """Apply ``updater(key, gradient, weight)`` to every push."""
        self._updater = updater

    @property
    def nbytes(self) -> int:
        """Bytes of the ranges and of one gradient for each."""
        return sum(2 * one.values.nbytes for one in list(self._ranges.values()))

    def end(self, timeout: float, *, failed: bool) -> None:
        """Serve until every process has called this, then stop; stop at once after a death or if this process
        ``failed``."""
        if not self._thread.is_alive():  # in a forked child, too
            return
        try:
            self._ending = self._mpi.REQUEST_NULL if failed else self._comm.Ibarrier()
        except self._mpi.Exception:
            self._ending = self._mpi.REQUEST_NULL
        self._thread.join(timeout)

    def _is_over(self, request: Request, kept: tuple[Request, object]) -> bool | None:
        """Return whether a request is complete; None if it has failed, and is kept for good, as in ``Members.wait``."""
        if not request.Get_status(self._status):
            return False
        if self._status.Get_error() == self._mpi.SUCCESS:
            request.Wait()
            return True
        self._undelivered.append(kept)
        return None

    def _run(self) -> None:
        # An engine on one thread cannot serve a second one: the arrays are then those of an engine of this thread.
        with nullcontext() if get_engine().has_threads else nested():
            self._serve_all()

    def _serve_all(self) -> None:
        mpi, idle = self._mpi, 0
        status = mpi.Status()
        while True:
            try:
                message = self._comm.Improbe(source=mpi.ANY_SOURCE, tag=REQUEST, status=status)
                if message is not None:
                    self._take(message, status.Get_source(), status.Get_count(mpi.BYTE))
                self._sending = [pair for pair in self._sending if self._is_over(pair[0], pair) is False]
                served = self._serve_waiting()
                if message is not None or served:
                    idle = 0
                    continue
                if self._ending is not None and not self._sending and self._ending.Test():
                    return
            except mpi.Exception:
                time.sleep(0.05)  # a client died in the middle: the others still want answers
                if self._ending is not None:
                    return
            idle += 1
            if idle < 500:
                os.sched_yield()
            else:
                time.sleep(0.0005)

    def _take(self, message: Message, client: int, size: int) -> None:
        """Receive a header, whose message has come."""
        raw = bytearray(min(size, 2 * HEADER))
        try:
            message.Recv([raw, self._mpi.BYTE])
            request = Header.decode(raw, client)
        except KVStoreError as error:
            self._answer(client, error)
            return
        self._waiting.setdefault(client, deque()).append(Pending(request))

    def _serve_waiting(self) -> bool:
        """Answer the requests that are there with their data; returns whether there was one."""
        served = False
        for client, requests in list(self._waiting.items()):
            while requests:
                arrived = self._arrived(requests[0], client)
                if arrived is False:
                    break
                pending = requests.popleft()
                served = True
                if arrived:
                    self._serve(pending, client)
            if not requests:
                del self._waiting[client]
        return served

    def _arrived(self, pending: Pending, client: int) -> bool | None:
        """Return whether the data of a request are here; None if they never will be. No size is taken from the
        header."""
        if pending.request.verb not in WITH_DATA:
            return True
        byte = self._mpi.BYTE
        if pending.receive is None:
            status = self._mpi.Status()
            message = self._comm.Improbe(source=client, tag=REQUEST_DATA, status=status)
            if message is None:
                return False
            pending.room = np.empty(status.Get_count(byte), np.uint8)
            pending.receive = message.Irecv([pending.room, byte])
        return self._is_over(pending.receive, (pending.receive, pending.room))

    def _serve(self, pending: Pending, client: int) -> None:
        request, data = pending.request, pending.room
        try:
            part = self._ranges.get(request.number)
            if part is None:
                raise KVStoreError(f"rank {client} asks for key number {request.number}, which is not here")
            answer: Array | None = None
            if request.verb is Verb.PUSH:
                self._push(part, request, data, client)
            elif request.verb is Verb.PULL:
                answer = part.values if part.weight is None else part.weight.asnumpy()
            elif request.verb is Verb.STATES:
                answer = np.frombuffer(self._used().get_states(keys=[part.key]), np.uint8)
            elif request.verb is Verb.RESTORE:
                assert data is not None
                self._used().add_states(data.tobytes())
            else:
                raise KVStoreError(f"rank {client} asks a server to {request.verb.name}")
        except Exception as error:
            self._answer(client, error)
            return
        size = 0 if answer is None else answer.nbytes
        self._send(client, Header(Verb.DONE, request.number, part.version, size), answer)

    def _answer(self, client: int, error: Exception) -> None:
        text = np.frombuffer(f"{type(error).__name__}: {error}".encode()[:TEXT], np.uint8)
        self._send(client, Header(Verb.FAILED, 0, 0, text.nbytes), text)

    def _send(self, client: int, header: Header, data: Array | None) -> None:
        # Never wait for a client to take its answer: the client may be waiting for another server, which would
        # deadlock. MPI reads the bytes later, so they are kept.
        byte, head = self._mpi.BYTE, header.encode()
        self._sending.append((self._comm.Isend([head, byte], dest=client, tag=ANSWER), head))
        if data is not None and data.nbytes:
            self._sending.append((self._comm.Isend([data, byte], dest=client, tag=ANSWER_DATA), data))

    def _used(self) -> Updater:
        if self._updater is None:
            raise KVStoreError("dist_async needs an optimizer: call set_optimizer on every rank before push")
        return self._updater

    def _push(self, part: Range, request: Header, data: Array | None, client: int) -> None:
        values = part.values
        if data is None or data.nbytes != values.nbytes or request.nbytes != values.nbytes:
            size = max(request.nbytes, 0 if data is None else data.nbytes)
            raise KVStoreError(f"{part.key!r} has {values.nbytes} bytes here, rank {client} pushes {size}")
        updater = self._used()
        if request.rate is not None:
            updater.optimizer.lr = request.rate  # type: ignore[attr-defined]
        if part.weight is None or part.gradient is None:
            part.weight = array(values, dtype=values.dtype)
            part.gradient = empty(values.shape, dtype=values.dtype)
        part.gradient[:] = data.view(values.dtype)
        updater(part.key, part.gradient, part.weight)
        part.weight.wait_to_read()
        late = part.version - request.version
        self.pushes, self.staleness_sum = self.pushes + 1, self.staleness_sum + late
        self.staleness_max = max(self.staleness_max, late)
        part.version += 1


def ask(
    mpi: ModuleType, comm: Communicator, requests: Sequence[tuple[int, Header, Array]], group: Group, what: str
) -> Steps[list[tuple[Header, Array]]]:
    """Send each (server, header, its array) at once and wait for all answers.

    Args:
        requests: the array is pushed or restored, or filled by a pull.
        group: knows how to wait, and which ranks are lost.
        what: for messages.

    Returns:
        (answer, its data) of each request.

    Raises:
        KVStoreError: a server could not do it.
        WorkerLostError: a server has died, or did not answer in time.
    """
    byte = mpi.BYTE
    with group.losses(what):
        group.look_for_losses()
        sent, taking, answers, headers, servers = [], [], [], [], []
        for server, header, values in requests:
            raw = bytearray(HEADER)
            answers.append(raw)
            servers.append(server)
            headers.append(comm.Irecv([raw, byte], source=server, tag=ANSWER))
            sent.append(comm.Isend([header.encode(), byte], dest=server, tag=REQUEST))
            taking.append(server)
            if header.verb in WITH_DATA:
                sent.append(comm.Isend([values.reshape(-1).view(np.uint8), byte], dest=server, tag=REQUEST_DATA))
                taking.append(server)
        yield from group.wait(headers, [], servers, f"answer {what}")
        replies: list[tuple[Header, Array]] = []
        errors, data, senders = [], [], []
        for (server, header, values), raw in zip(requests, answers, strict=True):
            answer = Header.decode(raw, server)
            replies.append((answer, values))
            if answer.verb is Verb.FAILED:
                text = bytearray(min(answer.nbytes, TEXT))
                errors.append((server, text))
                data.append(comm.Irecv([text, byte], source=server, tag=ANSWER_DATA))
                senders.append(server)
            elif header.verb is Verb.STATES:
                states = np.empty(answer.nbytes, np.uint8)
                replies[-1] = answer, states
                data.append(comm.Irecv([states, byte], source=server, tag=ANSWER_DATA))
                senders.append(server)
            elif header.verb is Verb.PULL:
                if answer.nbytes != values.nbytes:
                    raise KVStoreError(f"{what}: server {server} holds {answer.nbytes} bytes, expected {values.nbytes}")
                if answer.nbytes:
                    data.append(comm.Irecv([values.view(np.uint8), byte], source=server, tag=ANSWER_DATA))
                    senders.append(server)
        going, receivers = ([], []) if errors else (sent, taking)
        yield from group.wait(data, going, [*senders, *receivers], f"answer {what}")
    if errors:
        server, text = errors[0]
        raise KVStoreError(f"{what}: server {server} says {text.decode(errors='replace')}")
    return replies
