"""Which thread of a store runs an exchange, and which thread is woken for it; without MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from weftplan.kvstore.distributed.exchange import sequencer as module
from weftplan.kvstore.distributed.exchange.sequencer import Sequencer
from weftplan.kvstore.distributed.exchange.tickets import Ticket, TicketPart

SMALL, LARGE = 4, 1 << 20


class Group:
    """A group whose exchanges move no data."""

    def __init__(self, *, shares_memory: bool) -> None:
        self.shares_memory = shares_memory

    def leave(self) -> Iterator[None]:
        yield

    def stop_listening(self) -> None:
        pass


class Exchange:
    """An exchange of one array of ``nbytes`` bytes; ``looks()`` returns its steps, by default none."""

    def __init__(self, nbytes: int = SMALL, looks: Callable[[], Iterator[None]] = lambda: iter(())) -> None:
        self.part, self.over, self._nbytes = TicketPart(), threading.Event(), nbytes
        self.ticket = Ticket("an exchange", [self.part], lambda *_: looks())

    def arrive(self) -> None:
        array = np.zeros(self._nbytes, np.uint8)
        self.part.arrive((array,), (array,), None, lambda error=None: self.over.set())


@pytest.fixture(params=[False, True])
def lazy_sequencer(request):
    """Return a lazy sequencer, whose last exchange a waiting thread ran, and the list of wake-ups of its own thread."""
    sequencer, first, rung = Sequencer(Group(shares_memory=request.param), "test"), Exchange(), []
    ring = sequencer._ring
    sequencer._ring = lambda: rung.append(ring())
    sequencer.put(first.ticket)
    sequencer._lazy = True
    yield sequencer, rung
    first.arrive()
    assert first.over.wait(60)
    sequencer.close(60)


def test_ready_exchange_is_left_to_the_caller(lazy_sequencer):
    """Queuing a ready exchange wakes no thread, because the caller waits next and runs it itself.

    Without shared memory a large exchange wakes the sequencer's thread.
    """
    sequencer, rung = lazy_sequencer
    for nbytes in (SMALL, LARGE):
        ready = Exchange(nbytes)
        ready.arrive()
        sequencer.put(ready.ticket)
    assert len(rung) == (0 if sequencer._group.shares_memory else 1)


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
def test_late_exchange_wakes_the_thread(lazy_sequencer, nbytes):
    """An exchange that becomes ready after it was queued wakes the sequencer's thread, as the program may be asleep."""
    sequencer, rung = lazy_sequencer
    late = Exchange(nbytes)
    sequencer.put(late.ticket)
    assert not rung
    late.arrive()
    assert len(rung) == 1


def test_woken_thread_polls_before_it_runs_an_exchange(monkeypatch):
    """The sequencer's thread, when woken, runs an exchange only after two polls have found it not yet taken."""
    monkeypatch.setattr(module, "_LAZY_S", 0.3)
    sequencer = Sequencer(Group(shares_memory=True), "test")
    for _ in range(2):  # also after the thread has run an exchange itself
        time.sleep(0.05)  # the thread falls asleep
        left = Exchange()
        left.arrive()
        sequencer._lazy = True
        sequencer.put(left.ticket)
        sequencer._ring()  # as a driving thread does
        assert not left.over.wait(0.1)
        assert left.over.wait(60)
    sequencer.close(60)


def test_thread_does_not_take_the_next_exchange(monkeypatch):
    """The sequencer's thread, woken for an exchange that has ended meanwhile, does not take the next exchange.

    1. The calling thread runs an exchange. 2. The sequencer's thread is woken for the same exchange and polls. 3. The
    exchange ends, and the program queues the next one, which the calling thread runs.
    """
    monkeypatch.setattr(module, "_LAZY_S", 0.3)
    sequencer = Sequencer(Group(shares_memory=True), "test")

    def looks() -> Iterator[None]:
        sequencer._ring()
        while not sequencer._bell.locked():  # unlocked until the other thread has woken
            time.sleep(0.001)
        time.sleep(0.05)
        yield

    first, following = Exchange(looks=looks), Exchange()
    for one in (first, following):
        one.arrive()
    sequencer._lazy = True  # the calling thread has to run the first exchange
    sequencer.put(first.ticket)
    sequencer._lazy = False
    sequencer.help()
    assert first.over.is_set()
    sequencer.put(following.ticket)
    assert not following.over.wait(0.1)
    sequencer.help()
    assert following.over.is_set()
    sequencer.close(60)


def test_thread_completes_an_exchange_that_is_handed_over(monkeypatch):
    """If other ranks are late, a helping thread hands its exchange to the sequencer's thread, which completes it.

    The sequencer stays lazy.
    """
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


def test_thread_runs_all_exchanges_that_were_left(monkeypatch):
    """If no helper runs queued exchanges, the sequencer's thread runs them all without sleeping in between."""
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
