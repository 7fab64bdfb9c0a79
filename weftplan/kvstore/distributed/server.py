"""Servers of ``dist_async``: a thread in each process that owns a part of the values, and the requests to it.

A value of at least MXNET_KVSTORE_BIGARRAY_BOUND elements is divided into one range for each server; a smaller value is
on one server. A server handles the requests of a client in order: a push does one update, a pull returns the current
values. Each answer has the *version* of the range, which is its number of updates.

A request is a header of fixed size, then optional data; an answer has the same form. Nothing is pickled.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType

import numpy as np

from weftplan.engine import get as get_engine
from weftplan.engine.factory import nested
from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.group.group import RankGroup
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.distributed.transport.mpi_types import Communicator, JobRank, MatchedMessage, Request
from weftplan.kvstore.fixed_order_sums import Array
from weftplan.kvstore.keys import Key
from weftplan.kvstore.updater import Updater
from weftplan.ndarray import NDArray, array, empty

REQUEST, REQUEST_DATA, ANSWER, ANSWER_DATA = 11, 12, 13, 14
"""MPI tags of the messages."""

TEXT = 1024
"""Maximum bytes of an error's text."""

_LAYOUT = struct.Struct("<4sHHQQdQ")
"""Fields of a header: magic, verb, whether the learning rate is valid, key number, version, rate, bytes of data."""
_MAGIC = b"WFA1"
HEADER = _LAYOUT.size


class Verb(IntEnum):
    """Kinds of requests and answers."""

    PUSH = 1
    """Request: update a range with a gradient, which follows."""
    PULL = 2
    """Request: return the current values of a range."""
    ANSWER = 3
    """Answer: the request succeeded."""
    FAILED = 4
    """Answer: the request failed; the error's text follows."""
    STATES = 5
    """Request: return the optimizer states of a range."""
    RESTORE = 6
    """Request: replace the optimizer states of a range by states that follow."""


WITH_DATA = frozenset((Verb.PUSH, Verb.RESTORE))
"""Requests that are followed by data."""


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a request or answer.

    Attributes:
        verb: kind of the request or answer.
        number: number of the key.
        version: in a request, the last version that the client has received; in an answer, the current version.
        nbytes: bytes of data after the header.
        rate: in a push, the learning rate to use; None keeps the server's rate.
    """

    verb: Verb
    number: int
    version: int = 0
    nbytes: int = 0
    rate: float | None = None

    def encode(self) -> bytes:
        """Return the bytes of the header."""
        rated = self.rate is not None
        return _LAYOUT.pack(_MAGIC, self.verb, rated, self.number, self.version, self.rate or 0.0, self.nbytes)

    @classmethod
    def decode(cls, data: bytes | bytearray, sender: int) -> Header:
        """Return the header in ``data``, sent by rank ``sender``; raise KVStoreError if the bytes are no header."""
        if len(data) != HEADER:
            raise KVStoreError(f"rank {sender} sent {len(data)} bytes, a header has {HEADER}")
        magic, verb, rated, number, version, rate, nbytes = _LAYOUT.unpack(data)
        if magic != _MAGIC or verb not in Verb._value2member_map_ or rated not in (0, 1):
            raise KVStoreError(f"rank {sender} sent a header of another kind: {bytes(data[:8])!r}")
        return cls(Verb(verb), number, version, nbytes, rate if rated else None)


@dataclass(slots=True)
class Range:
    """A part of one value, on its server.

    Attributes:
        key: the key of the value.
        values: current values: in a NumPy array before the first push, then in an array of the server's own engine.
        gradient: buffer for a pushed gradient, None before the first push.
        version: number of updates.
    """

    key: Key
    values: Array | NDArray
    gradient: NDArray | None = None
    version: int = 0


@dataclass(slots=True)
class PendingRequest:
    """A received request, whose data may not have arrived yet."""

    request: Header
    buffer: Array | None = None
    """Buffer for the data; None until the message with the data arrives."""
    receive: Request | None = None
    """MPI's receive request for the data; None until the message with the data arrives."""


class Server:
    """The server of this process, with its thread.

    The program calls ``add`` and ``use`` before any client can make requests that need them. No receive blocks: a
    client that stops between a header and its data delays its own requests only.
    """

    def __init__(self, mpi: ModuleType, comm: Communicator) -> None:
        self._mpi, self._comm = mpi, comm
        self._status = mpi.Status()
        self._ranges: dict[int, Range] = {}
        self._updater: Updater | None = None
        self._ending: Request | None = None
        self._waiting: dict[JobRank, deque[PendingRequest]] = {}
        """Requests that were not handled yet, by client and in order of arrival."""
        self._sending: list[tuple[Request, object]] = []
        """MPI requests of unfinished sends, with the buffers, which must stay alive."""
        self._undelivered: list[tuple[Request, object]] = []
        """Failed MPI requests to dead clients, with their buffers; never freed, as ``Members._is_done`` explains."""
        self.pushes = 0
        self.staleness_max = 0
        self.staleness_sum = 0
        self._thread = threading.Thread(target=self._run, name="weftplan-server", daemon=True)
        self._thread.start()

    def add(self, number: int, key: Key, values: Array) -> None:
        """Add a range with these initial values, which are copied."""
        self._ranges[number] = Range(key, values.copy())

    @contextmanager
    def rollback(self) -> Iterator[None]:
        """Take back calls of ``add`` and ``use`` if the body of the ``with`` statement raises."""
        numbers, updater = set(self._ranges), self._updater
        try:
            yield
        except BaseException:
            self._updater = updater
            for number in self._ranges.keys() - numbers:
                del self._ranges[number]
            raise

    def use(self, updater: Updater) -> None:
        """Set the updater that is applied to each push."""
        self._updater = updater

    @property
    def nbytes(self) -> int:
        """Bytes of the values and one gradient of all ranges."""
        return sum(2 * entry.values.nbytes for entry in list(self._ranges.values()))

    def end(self, timeout: float, *, failed: bool) -> None:
        """End the server thread once every process has called this; wait for its end for at most ``timeout`` seconds.

        After a death, or if this process has ``failed``, the thread ends without waiting for the other processes.
        """
        if not self._thread.is_alive():  # also in a forked child, which has no server thread
            return
        try:
            self._ending = self._mpi.REQUEST_NULL if failed else self._comm.Ibarrier()
        except self._mpi.Exception:
            self._ending = self._mpi.REQUEST_NULL
        self._thread.join(timeout)

    def _is_over(self, request: Request, buffers: tuple[Request, object]) -> bool | None:
        """Return whether an MPI request is complete; None if it has failed.

        ``buffers``, the request and its buffer, is then stored in ``_undelivered`` and never freed.
        """
        if not request.Get_status(self._status):
            return False
        if self._status.Get_error() == self._mpi.SUCCESS:
            request.Wait()
            return True
        self._undelivered.append(buffers)
        return None

    def _run(self) -> None:
        # An engine that runs on one thread cannot be used from this thread, which then has an engine of its own.
        with nullcontext() if get_engine().has_threads else nested():
            self._serve_all()

    def _serve_all(self) -> None:
        mpi, idle = self._mpi, 0
        status = mpi.Status()
        while True:
            try:
                message = self._comm.Improbe(source=mpi.ANY_SOURCE, tag=REQUEST, status=status)
                if message is not None:
                    self._take(message, JobRank(status.Get_source()), status.Get_count(mpi.BYTE))
                self._sending = [pair for pair in self._sending if self._is_over(pair[0], pair) is False]
                served = self._serve_waiting()
                if message is not None or served:
                    idle = 0
                    continue
                # All clients have entered the barrier, so no request can follow; all answers were sent.
                if self._ending is not None and not self._sending and self._ending.Test():
                    return
            except mpi.Exception:
                time.sleep(0.05)  # a client died; go on serving the others
                if self._ending is not None:
                    return
            # Spin for a while first: a sleep would delay the next request by at least its duration.
            idle += 1
            if idle < 500:
                os.sched_yield()
            else:
                time.sleep(0.0005)

    def _take(self, message: MatchedMessage, client: JobRank, size: int) -> None:
        """Receive the header in an arrived ``message`` of ``size`` bytes, and add its request to the client's queue."""
        raw = bytearray(min(size, 2 * HEADER))
        try:
            message.Recv([raw, self._mpi.BYTE])
            request = Header.decode(raw, client)
        except KVStoreError as error:
            self._answer(client, error)
            return
        self._waiting.setdefault(client, deque()).append(PendingRequest(request))

    def _serve_waiting(self) -> bool:
        """Handle all requests whose data have arrived; return whether there were any."""
        # In order for each client: a request without its data stops the later requests of this client, and no others.
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

    def _arrived(self, pending: PendingRequest, client: JobRank) -> bool | None:
        """Return whether the data of a request have arrived; None if receiving them has failed."""
        if pending.request.verb not in WITH_DATA:
            return True
        byte = self._mpi.BYTE
        if pending.receive is None:
            status = self._mpi.Status()
            message = self._comm.Improbe(source=client, tag=REQUEST_DATA, status=status)
            if message is None:
                return False
            # The size is MPI's, not the header's, which a faulty client may set to any number.
            pending.buffer = np.empty(status.Get_count(byte), np.uint8)
            pending.receive = message.Irecv([pending.buffer, byte])
        return self._is_over(pending.receive, (pending.receive, pending.buffer))

    def _serve(self, pending: PendingRequest, client: JobRank) -> None:
        request, data = pending.request, pending.buffer
        try:
            part = self._ranges.get(request.number)
            if part is None:
                raise KVStoreError(f"rank {client} asks for key number {request.number}, which is not here")
            answer: Array | None = None
            if request.verb is Verb.PUSH:
                self._push(part, request, data, client)
            elif request.verb is Verb.PULL:
                answer = part.values.asnumpy() if isinstance(part.values, NDArray) else part.values
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
        self._send(client, Header(Verb.ANSWER, request.number, part.version, size), answer)

    def _answer(self, client: JobRank, error: Exception) -> None:
        text = np.frombuffer(f"{type(error).__name__}: {error}".encode()[:TEXT], np.uint8)
        self._send(client, Header(Verb.FAILED, 0, 0, text.nbytes), text)

    def _send(self, client: JobRank, header: Header, data: Array | None) -> None:
        # Do not wait for the client to receive its answer. It may wait for another server, whose process may wait for
        # this server: a deadlock. MPI reads the bytes later, so `_sending` keeps them.
        byte, head = self._mpi.BYTE, header.encode()
        self._sending.append((self._comm.Isend([head, byte], dest=client, tag=ANSWER), head))
        if data is not None and data.nbytes:
            self._sending.append((self._comm.Isend([data, byte], dest=client, tag=ANSWER_DATA), data))

    def _used(self) -> Updater:
        if self._updater is None:
            raise KVStoreError("dist_async needs an optimizer: call set_optimizer on every rank before push")
        return self._updater

    def _push(self, part: Range, request: Header, data: Array | None, client: JobRank) -> None:
        weight = part.values
        if data is None or data.nbytes != weight.nbytes or request.nbytes != weight.nbytes:
            size = max(request.nbytes, 0 if data is None else data.nbytes)
            raise KVStoreError(f"{part.key!r} has {weight.nbytes} bytes here, rank {client} pushes {size}")
        updater = self._used()
        if request.rate is not None:
            updater.optimizer.lr = request.rate  # type: ignore[attr-defined]
        if not isinstance(weight, NDArray):
            weight = part.values = array(weight, dtype=weight.dtype)
        if part.gradient is None:
            part.gradient = empty(weight.shape, dtype=weight.np_dtype)
        part.gradient[:] = data.view(weight.np_dtype)
        updater(part.key, part.gradient, weight)
        weight.wait_to_read()
        late = part.version - request.version
        self.pushes, self.staleness_sum = self.pushes + 1, self.staleness_sum + late
        self.staleness_max = max(self.staleness_max, late)
        part.version += 1


def ask(
    mpi: ModuleType, comm: Communicator, requests: Sequence[tuple[JobRank, Header, Array]], group: RankGroup, what: str
) -> Steps[list[tuple[Header, Array]]]:
    """Send requests to servers concurrently, wait for all answers, and return (answer header, its data) of each.

    Args:
        mpi: the module ``mpi4py.MPI``.
        comm: the communicator of the store.
        requests: (rank of the server, header, array); the array is sent by a push or restore and filled by a pull.
        group: waits, and detects lost ranks.
        what: description of the requests for errors.

    Raises:
        KVStoreError: a server has answered with an error.
        WorkerLostError: a server has died, or does not answer in time.
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
        # A server that refused a request may never receive its data, so after an error do not wait for the sends.
        going, receivers = ([], []) if errors else (sent, taking)
        yield from group.wait(data, going, [*senders, *receivers], f"answer {what}")
    if errors:
        server, text = errors[0]
        raise KVStoreError(f"{what}: server {server} says {text.decode(errors='replace')}")
    return replies
