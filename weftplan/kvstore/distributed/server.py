"""The server half of ``dist_async``: one thread in every process, which owns a share of the values.

A small value lives on one server whole; one of at least MXNET_KVSTORE_BIGARRAY_BOUND elements is cut into one range
for each. Requests are answered one at a time, in the order in which they come: a push is one update, a pull returns
what the updates so far have made. Every answer tells the version of the range, which is the number of its updates.

A request is a header of fixed size, then data where the header says so; an answer likewise. Nothing is a pickle.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from weftplan.errors import KVStoreError
from weftplan.kvstore.distributed.group.group import Group
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.kvstore.keys import Key
from weftplan.kvstore.reduce import Array
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
    """What a client asks, and how a server answers."""

    PUSH = 1
    PULL = 2
    DONE = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class Header:
    """One request or answer.

    Attributes:
        verb: what is asked or answered.
        number: number of the key.
        version: of a push, the version that the client saw last; of an answer, the range's version now.
        nbytes: bytes of data behind the header.
        rate: of a push, the learning rate to use; None leaves it.
    """

    verb: Verb
    number: int
    version: int = 0
    nbytes: int = 0
    rate: float | None = None

    def encode(self) -> bytes:
        """The bytes to send."""
        rated = self.rate is not None
        return _LAYOUT.pack(_MAGIC, self.verb, rated, self.number, self.version, self.rate or 0.0, self.nbytes)

    @classmethod
    def decode(cls, data: bytes | bytearray, sender: int) -> Header:
        """The header in ``data``; raises KVStoreError, which names the sender, where there is none."""
        if len(data) != HEADER:
            raise KVStoreError(f"rank {sender} sent {len(data)} bytes, a header has {HEADER}")
        magic, verb, rated, number, version, rate, nbytes = _LAYOUT.unpack(data)
        if magic != _MAGIC or verb not in Verb._value2member_map_ or rated not in (0, 1):
            raise KVStoreError(f"rank {sender} sent a header of another kind: {bytes(data[:8])!r}")
        return cls(Verb(verb), number, version, nbytes, rate if rated else None)


@dataclass(slots=True)
class Range:
    """A part of one value on its server, with the number of updates that made it."""

    key: Key
    weight: NDArray
    gradient: NDArray
    version: int = 0


def placement(number: int, size: int, servers: int, bound: int) -> list[tuple[int, int, int]]:
    """(server, first element, end) for each range of the value with key ``number``, as MXNet places them.

    >>> placement(1, 10, 3, 100), placement(1, 10, 3, 5)
    ([(1, 0, 10)], [(0, 0, 3), (1, 3, 7), (2, 7, 10)])
    """
    if size < bound or servers == 1:
        return [((number * 9973) % servers, 0, size)]
    bounds = [round(size / servers * part) for part in range(servers + 1)]
    return [(server, bounds[server], bounds[server + 1]) for server in range(servers)]


class Server:
    """The thread. ``add`` and ``use`` are called by the program before any client can ask for what they change."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._ranges: dict[int, Range] = {}
        self._update: Callable[[Any, NDArray, NDArray], None] | None = None
        self._set_rate: Callable[[float], None] | None = None
        self._ending: Any = None
        self._sending: list[tuple[Any, Any]] = []
        """Requests of answers under way, each with the bytes that it sends."""
        self._undelivered: list[tuple[Any, Any]] = []
        """The same of answers to the dead."""
        self.pushes = 0
        self.staleness_max = 0
        self.staleness_sum = 0
        self._thread = threading.Thread(target=self._run, name="weftplan-server", daemon=True)
        self._thread.start()

    def add(self, number: int, key: Key, values: Array) -> None:
        """Own a range with these values."""
        weight = array(values, dtype=values.dtype)
        self._ranges[number] = Range(key, weight, empty(values.shape, dtype=values.dtype))

    def use(self, update: Callable[[Any, NDArray, NDArray], None], set_rate: Callable[[float], None]) -> None:
        """Apply ``update(key, gradient, weight)`` to every push; ``set_rate`` takes a client's learning rate."""
        self._update, self._set_rate = update, set_rate

    @property
    def nbytes(self) -> int:
        """Bytes of the ranges and of one gradient for each."""
        return sum(one.weight.nbytes + one.gradient.nbytes for one in list(self._ranges.values()))

    def end(self, timeout: float) -> None:
        """Serve until every process has called this, then stop; at once where one has died."""
        if not self._thread.is_alive():  # in a forked child, too
            return
        try:
            self._ending = self._comm.Ibarrier()
        except self._mpi.Exception:
            self._ending = self._mpi.REQUEST_NULL
        self._thread.join(timeout)

    def _sent(self, answer: tuple[Any, Any]) -> bool:
        """Whether an answer is under way no more. One that cannot go out is kept for good, as in ``Group.wait``."""
        request, status = answer[0], self._mpi.Status()
        if not request.Get_status(status):
            return False
        if status.Get_error() == self._mpi.SUCCESS:
            request.Wait()
        else:
            self._undelivered.append(answer)
        return True

    def _run(self) -> None:
        mpi, idle = self._mpi, 0
        status = mpi.Status()
        while True:
            try:
                message = self._comm.Improbe(source=mpi.ANY_SOURCE, tag=REQUEST, status=status)
                self._sending = [pair for pair in self._sending if not self._sent(pair)]
                if message is not None:
                    idle = 0
                    self._serve(message, status.Get_source())
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

    def _serve(self, message: Any, client: int) -> None:
        raw = bytearray(HEADER)
        message.Recv([raw, self._mpi.BYTE])
        data: Any = b""
        try:
            request = Header.decode(raw, client)
            part = self._ranges.get(request.number)
            if part is None:
                self._drop(request, client)
                raise KVStoreError(f"rank {client} asks for key number {request.number}, which is not here")
            if request.verb is Verb.PUSH:
                self._push(part, request, client)
            elif request.verb is Verb.PULL:
                data = part.weight.asnumpy()
            else:
                raise KVStoreError(f"rank {client} asks a server to {request.verb.name}")
            answer = Header(Verb.DONE, request.number, part.version, len(data) and data.nbytes)
        except Exception as error:
            data = f"{type(error).__name__}: {error}".encode()[:TEXT]
            answer = Header(Verb.FAILED, 0, 0, len(data))
        # A server that waited for a client to take its answer, while that one waits for another server, could wait for
        # ever. MPI reads the bytes later, so they are kept.
        byte, head = self._mpi.BYTE, answer.encode()
        self._sending.append((self._comm.Isend([head, byte], dest=client, tag=ANSWER), head))
        if answer.nbytes:
            self._sending.append((self._comm.Isend([data, byte], dest=client, tag=ANSWER_DATA), data))

    def _drop(self, request: Header, client: int) -> None:
        """Receive what comes behind a push that is refused: the next one would take it for its own."""
        if request.verb is Verb.PUSH:
            status = self._mpi.Status()
            data = self._comm.Mprobe(source=client, tag=REQUEST_DATA, status=status)
            data.Recv([bytearray(status.Get_count(self._mpi.BYTE)), self._mpi.BYTE])

    def _push(self, part: Range, request: Header, client: int) -> None:
        gradient = np.empty(part.weight.shape, part.weight.dtype)
        if request.nbytes != gradient.nbytes:
            self._drop(request, client)
            raise KVStoreError(f"{part.key!r} has {gradient.nbytes} bytes here, rank {client} pushes {request.nbytes}")
        self._comm.Recv([gradient.view(np.uint8), self._mpi.BYTE], source=client, tag=REQUEST_DATA)
        if self._update is None:
            raise KVStoreError("dist_async needs an optimizer: call set_optimizer on every rank before push")
        if request.rate is not None and self._set_rate is not None:
            self._set_rate(request.rate)
        part.gradient[:] = gradient
        self._update(part.key, part.gradient, part.weight)
        part.weight.wait_to_read()
        late = part.version - request.version
        self.pushes, self.staleness_sum = self.pushes + 1, self.staleness_sum + late
        self.staleness_max = max(self.staleness_max, late)
        part.version += 1


def ask(
    mpi: Any, comm: Any, requests: Sequence[tuple[int, Header, Array]], group: Group, what: str
) -> Steps[list[Header]]:
    """Send each (server, header, its array) at once and wait for all answers.

    Args:
        requests: the array is what is pushed, or what a pull fills.
        group: knows how to wait, and who is lost.
        what: for messages.

    Raises:
        KVStoreError: a server could not do it.
        WorkerLostError: a server has died, or did not answer in time.
    """
    byte = mpi.BYTE
    with group.losses(what):
        sent, answers, headers, servers = [], [], [], []
        for server, header, values in requests:
            raw = bytearray(HEADER)
            answers.append(raw)
            servers.append(server)
            headers.append(comm.Irecv([raw, byte], source=server, tag=ANSWER))
            sent.append(comm.Isend([header.encode(), byte], dest=server, tag=REQUEST))
            if header.verb is Verb.PUSH:
                sent.append(comm.Isend([values.view(np.uint8), byte], dest=server, tag=REQUEST_DATA))
        yield from group.wait(headers, [], servers, what)
        found, errors, data, senders = [], [], [], []
        for (server, header, values), raw in zip(requests, answers, strict=True):
            answer = Header.decode(raw, server)
            found.append(answer)
            if answer.verb is Verb.FAILED:
                text = bytearray(min(answer.nbytes, TEXT))
                errors.append((server, text))
                data.append(comm.Irecv([text, byte], source=server, tag=ANSWER_DATA))
                senders.append(server)
            elif header.verb is Verb.PULL:
                if answer.nbytes != values.nbytes:
                    raise KVStoreError(f"{what}: server {server} holds {answer.nbytes} bytes, expected {values.nbytes}")
                if answer.nbytes:
                    data.append(comm.Irecv([values.view(np.uint8), byte], source=server, tag=ANSWER_DATA))
                    senders.append(server)
        going = [] if errors else sent
        yield from group.wait(data, going, [*senders, *(servers[0] for _ in going)], what)
    if errors:
        server, text = errors[0]
        raise KVStoreError(f"{what}: server {server} says {text.decode(errors='replace')}")
    return found
