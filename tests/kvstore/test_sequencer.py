"""The thread that drives an exchange, and the threads that are woken for it: without MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from weftplan.kvstore.distributed.exchange import sequencer as module
from weftplan.kvstore.distributed.exchange.sequencer import Sequencer
from weftplan.kvstore.distributed.exchange.tickets import Part, Ticket

SMALL, LARGE = 4, 1 << 20


class Group:
    """One that moves nothing."""

    def __init__(self, *, shares_memory: bool) -> None:
        self.shares_memory = shares_memory

    def leave(self) -> Iterator[None]:
        yield

    def stop_listening(self) -> None:
        pass


class Exchange:
    """An exchange of one array that only its own process can delay."""

    def __init__(self, nbytes: int = SMALL, looks: Callable[[], Iterator[None]] = lambda: iter(())) -> None:
        self.part, self.over, self._nbytes = Part(), threading.Event(), nbytes
        self.ticket = Ticket("an exchange", [self.part], lambda *_: looks())

    def arrive(self) -> None:
        array = np.zeros(self._nbytes, np.uint8)
        self.part.arrive((array,), (array,), None, lambda error=None: self.over.set())


@pytest.fixture(params=[False, True])
def others_drive(request):
    """Return a sequencer whose recent exchanges were driven by waiting threads, and the list of wake-ups of its own
    thread."""
    sequencer, first, rung = Sequencer(Group(shares_memory=request.param), "test"), Exchange(), []
    ring = sequencer._ring
    sequencer._ring = lambda: rung.append(ring())
    sequencer.put(first.ticket)
    sequencer._lazy = True
    yield sequencer, rung
    first.arrive()
    assert first.over.wait(60)
    sequencer.close(60)


def test_what_is_ready_is_left_to_the_thread_that_asks_for_it(others_drive):
    """The asking thread waits next, and exchanges it: waking another thread would cost more. Large arrays only in
    shared memory."""
    sequencer, rung = others_drive
    for nbytes in (SMALL, LARGE):
        ready = Exchange(nbytes)
        ready.arrive()
        sequencer.put(ready.ticket)
    assert len(rung) == (0 if sequencer._group.shares_memory else 1)


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_what_becomes_ready_later_wakes_the_thread(others_drive, nbytes):
    """The program may be asleep by then, and no other thread would poll for milliseconds."""
    sequencer, rung = others_drive
    late = Exchange(nbytes)
    sequencer.put(late.ticket)
    assert not rung
    late.arrive()
    assert len(rung) == 1


def test_the_thread_leaves_the_next_exchange_to_who_has_made_the_last(monkeypatch):
    """It is woken to look from now on, not to take what the program is about to make; it takes only what was left."""
    monkeypatch.setattr(module, "_LAZY_S", 0.3)
    sequencer = Sequencer(Group(shares_memory=True), "test")
    for _ in range(2):  # once more after the thread has made one itself
        time.sleep(0.05)  # it sleeps
        left = Exchange()
        left.arrive()
        sequencer._lazy = True
        sequencer.put(left.ticket)
        sequencer._ring()  # as a driving thread does
        assert not left.over.wait(0.1)
        assert left.over.wait(60)
    sequencer.close(60)


def test_the_thread_does_not_wait_behind_an_exchange_for_the_next(monkeypatch):
    """1. This thread makes an exchange. 2. The sequencer's, which was rung for the same one, looks. 3. The exchange is
    over, and the program puts the next one. It makes that itself; the other thread has not waited to come in between.
    """
    monkeypatch.setattr(module, "_LAZY_S", 0.3)
    sequencer = Sequencer(Group(shares_memory=True), "test")

    def looks() -> Iterator[None]:
        sequencer._ring()
        while not sequencer._bell.locked():  # open until the other thread has heard it
            time.sleep(0.001)
        time.sleep(0.05)
        yield

    first, following = Exchange(looks=looks), Exchange()
    for one in (first, following):
        one.arrive()
    sequencer._lazy = True  # this thread has to drive the first exchange
    sequencer.put(first.ticket)
    sequencer._lazy = False
    sequencer.help()
    assert first.over.is_set()
    sequencer.put(following.ticket)
    assert not following.over.wait(0.1)
    sequencer.help()
    assert following.over.is_set()
    sequencer.close(60)


def test_who_leaves_an_exchange_half_way_makes_the_next(monkeypatch):
    """The others are late, and the sequencer's thread waits for them; the next exchange may have another driver."""
    monkeypatch.setattr(module, "_HELPING", 5)
    sequencer, here = Sequencer(Group(shares_memory=True), "test"), threading.Event()

    def looks() -> Iterator[None]:
        while not here.is_set():
            yield

    late = Exchange(looks=looks)
    late.arrive()
    sequencer._lazy = True
    sequencer.put(late.ticket)
    sequencer.help()
    assert not late.over.is_set()
    here.set()
    assert late.over.wait(60)
    assert sequencer._lazy
    sequencer.close(60)


def test_what_is_behind_an_exchange_that_was_left_is_taken_with_it(monkeypatch):
    """No thread was woken when it was put, and the driver thread sleeps long after an exchange of its own."""
    monkeypatch.setattr(module, "_LAZY_S", 0.05)
    slept: list[float] = []

    class Bell:
        def __init__(self) -> None:
            self._lock = threading.Lock()
            self.release = self._lock.release

        def acquire(self, timeout: float) -> bool:
            slept.append(timeout)
            return self._lock.acquire(timeout=timeout)

    class Listening(Sequencer):
        def _serve(self) -> None:
            self._bell = Bell()
            super()._serve()

    def looks() -> Iterator[None]:
        before.append(len(slept))
        yield

    sequencer, before = Listening(Group(shares_memory=True), "test"), []
    left = [Exchange(looks=looks) for _ in range(3)]
    sequencer._lazy = True
    for one in left:
        one.arrive()
        sequencer.put(one.ticket)
    while not slept:
        time.sleep(0.001)
    sequencer._ring()  # as a driving thread does
    assert all(one.over.wait(60) for one in left)
    assert len(set(before)) == 1
    sequencer.close(60)
