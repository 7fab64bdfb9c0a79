"""Survivors agree on the remaining members after deaths, tested with a model of MPI in many random orders."""

from __future__ import annotations

import random
from collections.abc import Generator
from types import ModuleType
from typing import Any

import pytest

from tests.support.together import together
from weftplan.errors import KVStoreError, WorkerLostError
from weftplan.kvstore.distributed.group.membership import Members
from weftplan.kvstore.distributed.transport.mpi_types import Connection
from weftplan.kvstore.distributed.transport.wire import View


class Refused(Exception):
    """Error of the modelled MPI for a message to a dead process, and for an exchange after a loss."""


class Request:
    """A request of the modelled MPI: a receive of one message, or a send, which is always complete."""

    def __init__(self, world: World, me: int, source: int | None = None, room: bytearray | None = None) -> None:
        self.world, self.me, self.source, self.room = world, me, source, room

    def Get_status(self, status: Any) -> bool:
        if self.source is None or self.room is None:
            return True
        queue = self.world.sent[self.source, self.me]
        if queue:
            self.room[:] = queue.pop(0)
            self.room, status.error = None, 0
            return True
        status.error = 1
        return self.source in self.world.known[self.me]

    def Wait(self) -> None: ...

    def Test(self) -> bool:
        return True

    def Cancel(self) -> None: ...


class World:
    """The modelled MPI: its processes, the dead processes, the deaths that each process knows, and pending messages.

    Messages between two processes stay in order.
    """

    SUCCESS, ERR_OTHER = 0, 16
    BYTE = None
    Exception = Refused
    Status = type("Status", (), {"error": 0})

    def __init__(self, size: int) -> None:
        self.size = size
        self.dead: set[int] = set()
        self.known: list[set[int]] = [set() for _ in range(size)]
        self.sent: dict[tuple[int, int], list[bytes]] = {(a, b): [] for a in range(size) for b in range(size)}


class Comm:
    """The communicator as one process sees it."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size

    def Irecv(self, buffer: list[Any], source: int, tag: int) -> Request:
        return Request(self.world, self.rank, source, buffer[0])

    def Issend(self, buffer: list[Any], dest: int, tag: int) -> Request:
        if dest in self.world.known[self.rank]:
            raise Refused
        self.world.sent[self.rank, dest].append(bytes(buffer[0]))
        return Request(self.world, self.rank)


class Member(Members):
    """A member whose MPI is the model."""

    def __init__(self, world: World, rank: int, sequence: int) -> None:
        library = ModuleType("model")
        vars(library).update(vars(World))
        connection = Connection(library, Comm(world, rank), set, lambda: None)
        super().__init__(connection, stall_s=60, timeout_s=60)
        self.world = world
        self.sequence = sequence

    def lost(self) -> list[int]:
        return sorted(self.world.known[self.rank] & set(self.members))


@together()
@pytest.mark.parametrize("seed", range(60))
def test_survivors_agree_whatever_dies_when(seed: int):
    """Survivors of random deaths end with the same members, epoch, position in the program and leader.

    Members die at random moments, also during an agreement, and each other member learns of the death at a random later
    moment. A member that has finished checks for losses, as an exchange does, and takes part again after a loss.
    """
    chance = random.Random(seed)
    size = chance.randint(2, 7)
    world = World(size)
    members = [Member(world, rank, chance.randint(4, 5)) for rank in range(size)]
    running: dict[int, Generator[None, None, int]] = {}
    leaders: dict[int, int] = {}
    toll = chance.sample(range(size), chance.randint(1, size - 1))
    steps = 0
    while True:
        living = [rank for rank in range(size) if rank not in world.dead]
        if toll and chance.random() < 0.05:
            world.dead.add(toll[-1])
            running.pop(toll.pop(), None)
            continue
        rank = chance.choice(living)
        untold = sorted(world.dead - world.known[rank])
        if untold and chance.random() < 0.1:
            world.known[rank].add(chance.choice(untold))
        if rank in running:
            try:
                next(running[rank])
            except StopIteration as end:
                leaders[rank] = end.value
                del running[rank]
        else:
            try:
                members[rank]._look_for_losses()
            except Refused:
                running[rank] = members[rank].regroup()
        steps += 1
        assert steps < 100_000
        over = not toll and not running and all(world.known[one] >= world.dead for one in living)
        if over and all(set(members[one].members) == set(living) for one in living):
            break
    assert len({(members[one]._epoch, members[one].sequence) for one in living}) == 1
    assert len({leaders[one] for one in living}) == 1
    assert leaders[living[0]] in living


def test_waits_end_and_lost_member_gets_an_error():
    """A wait for missing members raises after the timeout; a member that the others count as lost gets an error."""
    world = World(3)
    first, third = Member(world, 0, 0), Member(world, 2, 0)
    first.timeout_s = 0
    with pytest.raises(WorkerLostError, match="ranks 1, 2 to go on after a death"):
        for _ in first.regroup():
            pass
    world.sent[1, 2].append(View(1, 0, frozenset({2})).encode(3))
    with pytest.raises(KVStoreError, match="have gone on without this one"):
        for _ in third.regroup():
            pass
