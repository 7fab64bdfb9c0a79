"""Messages of a mesh of sockets, and the formation of meshes over generations, tested in one process."""

from __future__ import annotations

import os
import random
import socket
import warnings
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from weftplan.errors import KVStoreError, WorkerLostError
from weftplan.kvstore.distributed.transport.elastic_job import ElasticJob, in_elastic_job, is_joining
from weftplan.kvstore.distributed.transport.formation import Formation
from weftplan.kvstore.distributed.transport.mesh import (
    ERR_OTHER,
    ERR_PROC_FAILED,
    Mesh,
    MeshError,
    MeshRequest,
    MeshStatus,
)
from weftplan.kvstore.distributed.transport.mpi_types import Connection


@pytest.fixture
def pair() -> Iterator[tuple[Mesh, Mesh]]:
    """The meshes of two connected processes."""
    left, right = socket.socketpair()
    meshes = Mesh(0, 2, {1: left}), Mesh(1, 2, {0: right})
    yield meshes
    for mesh in meshes:
        mesh.close()


def status_of(request: MeshRequest) -> tuple[bool, int, int]:
    """Return (whether ``request`` is complete, its error code or 0, the number of bytes that it received)."""
    status = MeshStatus()
    return request.Get_status(status), status.error, status.Get_count(None)


@pytest.mark.parametrize("seed", range(20))
def test_messages_arrive_in_order_by_tag(pair: tuple[Mesh, Mesh], seed: int) -> None:
    """Random sends and receives in both directions, of 0 to 900,000 bytes, keep the order of messages of each tag."""
    chance = random.Random(seed)
    meshes = pair
    sent: dict[tuple[int, int], list[bytes]] = {}
    received: dict[tuple[int, int], list[tuple[MeshRequest, bytearray]]] = {}
    sends = []
    for _ in range(60):
        sender, tag = chance.randrange(2), chance.randrange(3)
        if chance.random() < 0.5:
            data = random.Random(chance.random()).randbytes(chance.choice((0, 1, 500, 70_000, 900_000)))
            sent.setdefault((sender, tag), []).append(data)
            sends.append(meshes[sender].Issend([data], 1 - sender, tag))
        else:
            room = bytearray(1_000_000)
            request = meshes[1 - sender].Irecv([room], sender, tag)
            received.setdefault((sender, tag), []).append((request, room))
        if chance.random() < 0.3:
            meshes[chance.randrange(2)].move()
    for _ in range(1000):
        meshes[0].move()
        meshes[1].move()
    assert all(status_of(request) == (True, 0, 0) for request in sends)
    met = 0
    for key, requests in received.items():
        for (request, room), data in zip(requests, sent.get(key, []), strict=False):
            assert status_of(request) == (True, 0, len(data))
            assert room[: len(data)] == data
            met += 1
        assert not any(status_of(request)[0] for request, _ in requests[len(sent.get(key, [])) :])
    assert met


def test_a_withdrawn_receive_takes_no_message(pair: tuple[Mesh, Mesh]) -> None:
    """A cancelled receive completes without data, and the next receive gets the message."""
    one, other = pair
    rooms = bytearray(3), bytearray(3)
    first, second = (other.Irecv([room], 0, 7) for room in rooms)
    assert bool(first)
    first.Cancel()
    assert first.Test()
    assert not first
    one.Issend([b"abc"], 1, 7)
    assert second.Test()
    assert rooms == (b"\0\0\0", b"abc")


def test_a_message_that_does_not_fit(pair: tuple[Mesh, Mesh]) -> None:
    """A message longer than its buffer fails its receive, and the next message arrives unchanged."""
    one, other = pair
    small, room = other.Irecv([bytearray(2)], 0, 7), bytearray(3)
    one.Issend([b"abc"], 1, 7)
    one.Issend([b"xyz"], 1, 7)
    assert status_of(small) == (True, ERR_OTHER, 0)
    with pytest.raises(MeshError):
        small.Wait()
    assert other.Irecv([room], 0, 7).Test()
    assert room == b"xyz"
    with pytest.raises(KVStoreError, match="a message must be bytes, got list"):
        one.Issend([[1]], 1, 7)


def test_the_end_of_a_process(pair: tuple[Mesh, Mesh]) -> None:
    """After a process closes its mesh, its sent messages arrive; waiting requests and new sends of the other mesh fail.

    The second call of ``dead()`` reports the rank of the closed mesh.
    """
    one, other = pair
    rooms = bytearray(3), bytearray(3)
    one.Issend([b"abc"], 1, 7)
    one.close()
    assert other.Irecv([rooms[0]], 0, 7).Test()
    assert rooms[0] == b"abc"
    waiting = other.Irecv([rooms[1]], 0, 7)
    assert status_of(waiting) == (True, ERR_PROC_FAILED, 0)
    assert other.dead() == set()
    assert other.dead() == {0}
    assert status_of(other.Irecv([rooms[1]], 0, 8)) == (True, ERR_PROC_FAILED, 0)
    with pytest.raises(MeshError):
        other.Issend([b"abc"], 0, 7)


def test_the_end_in_the_middle_of_a_message() -> None:
    """If a process exits in the middle of a message, its receive fails, and so do sends that have not left yet."""
    left, right = socket.socketpair()
    mesh = Mesh(1, 2, {0: right})
    receiving, sending = mesh.Irecv([bytearray(100)], 0, 7), mesh.Issend([bytes(10**7)], 0, 7)
    left.sendall((7).to_bytes(8, "little") + (100).to_bytes(8, "little") + bytes(50))
    mesh.move()
    receiving.Cancel()
    assert not status_of(receiving)[0]
    left.close()
    mesh.move()
    assert status_of(receiving) == (True, ERR_PROC_FAILED, 0)
    assert status_of(sending) == (True, ERR_PROC_FAILED, 0)
    with pytest.raises(MeshError):
        receiving.Test()


def make_formations(folder: Path, size: int, *, replaces: tuple[int, ...] = ()) -> list[Formation]:
    """Return the formations of all ranks of a new job in ``folder``; the ranks ``replaces`` are replacements."""
    ElasticJob.create(folder, size)
    made = []
    for rank in range(size):
        formation = Formation(ElasticJob(folder, size, rank, replaces=rank in replaces))
        formation._store = 1
        made.append(formation)
    return made


def run_formations(steps: dict[int, Generator[None, None, Connection]]) -> dict[int, Connection]:
    """Advance formations in turn until each has returned its connection, and return the connections by rank."""
    connections: dict[int, Connection] = {}
    for _ in range(10_000):
        for rank in list(steps):
            try:
                next(steps[rank])
            except StopIteration as end:
                connections[rank] = end.value
                del steps[rank]
        if not steps:
            return connections
    raise AssertionError(f"no end of {sorted(steps)}")


def test_a_later_generation_replaces_one_that_forms(tmp_path: Path) -> None:
    """If a rank is lost while a generation forms, all ranks meet in the generation of its replacement."""
    first, second, lost = make_formations(tmp_path, 3)
    first.job.set_joinable(True)
    steps = {0: first.reconnect(), 1: second.reconnect()}
    dying = lost.reconnect()
    for _ in range(3):
        for one in steps.values():
            next(one)
    with pytest.raises(StopIteration) as end:  # all three have come, so it is connected
        next(dying)
    end.value.value.close()
    first.job.begin_generation()
    replacement = Formation(ElasticJob(tmp_path, 3, 2, replaces=True))
    replacement._store = 1
    alone = replacement.connect()
    assert alone.is_alone
    assert alone.comm.size == 3
    steps[2] = replacement.reconnect()
    connections = run_formations(steps)
    assert sorted(connections) == [0, 1, 2]
    assert {first._generation, second._generation, replacement._generation} == {1}
    room = bytearray(2)
    connections[2].comm.Issend([b"hi"], 0, 1)
    assert connections[0].comm.Irecv([room], 2, 1).Test()
    assert room == b"hi"
    for connection in connections.values():
        connection.close()
    assert not [name for name in os.listdir(tmp_path) if name[0].isdigit()]


def test_a_connection_without_a_name_is_closed(tmp_path: Path) -> None:
    """A connection that ends before it has sent its rank is closed, and the ranks still connect to each other."""
    first, second = make_formations(tmp_path, 2)
    steps = first.reconnect()
    next(steps)
    with socket.socket(socket.AF_UNIX) as unnamed:
        unnamed.connect(first.job.socket_path(1, 0, 0))
        next(steps)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always", ResourceWarning)
        next(steps)
    assert not raised
    for connection in run_formations({0: steps, 1: second.reconnect()}).values():
        connection.close()


def test_waits_for_others_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait raises after the timeout and names the missing ranks, the missing replacement, or the end of training."""
    monkeypatch.setenv("WEFTPLAN_KVSTORE_TIMEOUT", "0.05")
    first, *_ = make_formations(tmp_path, 3)
    with pytest.raises(WorkerLostError, match="rank 0 has waited 0 s for ranks 1, 2 of generation 0; gave up"):
        run_formations({0: first.reconnect()})
    first._generation = 0
    first.job.set_joinable(True)
    with pytest.raises(WorkerLostError, match="for a replacement of a lost rank; gave up"):
        run_formations({0: first.reconnect()})
    first.job.set_joinable(False)
    with pytest.raises(WorkerLostError, match="another rank has come to the end of its training"):
        run_formations({0: first.reconnect()})


def test_only_processes_of_the_launcher_belong_to_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a child of the launcher belongs to its elastic job; any other process gets an error.

    A folder whose path is too long for a socket raises an error, too.
    """
    job = ElasticJob.create(tmp_path, 2)
    assert ElasticJob.of_this_process() is None
    for name, value in job.environment(1, replaces=True).items():
        monkeypatch.setenv(name, value)
    assert (in_elastic_job(), is_joining()) == (False, False)
    with pytest.raises(KVStoreError, match="a process of an elastic job has started or forked this one"):
        ElasticJob.of_this_process()
    monkeypatch.setattr(os, "getppid", os.getpid)
    assert (in_elastic_job(), is_joining()) == (True, True)
    assert ElasticJob.of_this_process() == ElasticJob(tmp_path, 2, 1, replaces=True)
    long = tmp_path / ("x" * 100)
    with pytest.raises(KVStoreError, match="set TMPDIR to a shorter one"):
        ElasticJob.create(long, 2)
