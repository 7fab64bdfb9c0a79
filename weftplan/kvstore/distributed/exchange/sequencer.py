"""Sequencer: runs a store's exchanges one at a time, in program order.

Engine operations become ready in an order that depends on threads and priorities and differs between processes. If
each process ran the first ready exchange, two processes could wait for each other for ever. Therefore an exchange is
queued when the *program* requests it, which happens in the same order on every rank. The driving thread takes the head
of the queue as soon as its arrays are ready on this rank, and exchanges with the other ranks. It holds the lock
``_driving``, so one thread at a time calls MPI.

Three kinds of threads drive:

* the store's own thread;
* a thread about to sleep in a wait of the engine (:meth:`Sequencer.help`), because a small exchange takes less time
  than a hand-over to another thread and back. If the other ranks are late, it hands a started exchange to the store's
  thread;
* a thread that pulls (:meth:`Sequencer.hurry`), with a smaller limit, because a pull does not wait.

As long as helpers run the exchanges, the sequencer is *lazy*: an exchange that is ready when it is queued does not wake
the store's thread. That thread takes exchanges handed to it, and polls every few milliseconds for an exchange that no
helper has taken, which is at the head of the queue in two successive polls.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from weftplan.engine import get as get_engine
from weftplan.engine.shield import shielded, unbroken
from weftplan.errors import KVStoreError, WorkerLostError
from weftplan.kvstore.distributed.exchange.tickets import Call, Ticket, give_up
from weftplan.kvstore.distributed.group.group import Group
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.locks import Lock, members

_SPINS = 2000
"""Polls of an exchange by the store's thread before it sleeps between polls."""

_LAZY_S = 0.002
"""Seconds between two polls of the queue by the store's thread while the sequencer is lazy."""

_LAZY_LOOKS = 50
"""Polls of an empty queue after which the sequencer stops being lazy."""

_HELPING = 500
"""Polls by a helping thread, a few hundred microseconds, before it hands the exchange to the store's thread."""

_POLITE = 60
"""Polls by a helping thread before it yields the core between polls."""


_all: weakref.WeakSet[Sequencer] = weakref.WeakSet()


class Sequencer:
    """Queue of exchanges with its thread."""

    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._items: deque[Ticket | Call] = deque()
        self._driving = Lock()
        self._steps: Iterable[None] | None = None
        """Remaining steps of a started first item; protected by `_driving`."""
        self._bell = threading.Lock()
        """Unlocked to wake the store's thread."""
        self._lazy = False
        """Whether a helper ran the last exchange, so the store's thread polls and is not rung for ready exchanges."""
        self._helped = False
        """Whether a helper is running an exchange now."""
        self._left: Ticket | Call | None = None
        """Exchange started by a helper and handed to the store's thread."""
        self._broken: KVStoreError | None = None
        self._last: Call | None = None
        """Last call of the queue; the thread ends after it."""
        self.closed = False
        """True from the call of :meth:`close`, or from the end of the thread."""
        self._why_closed = "this store was closed: it exchanges nothing any more"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weftplan-{name}", daemon=True)
        self._thread.start()
        _all.add(self)

    def check(self) -> None:
        """Raise KVStoreError if the sequencer is closed; call this before any part is pushed to the engine."""
        if self.closed:
            raise KVStoreError(self._why_closed)

    def put(self, ticket: Ticket) -> None:
        """Append an exchange to the queue; every rank must append the same exchanges in the same order."""
        ticket.ring = self._ring
        self._items.append(ticket)
        for part in ticket.parts:
            part.ticket = ticket
        if self.closed:  # read after the append, as the ending thread sets `closed` before it empties the queue
            self._refuse()
            return
        # A program that has queued a ready exchange will wait for it or pull it next, and so run it itself. A ticket
        # that becomes ready later rings in `Part.arrive`, because the program may be asleep by then.
        if ticket.ready() and not (self._lazy and (self._group.shares_memory or ticket.small)):
            self._ring()

    def call(self, work: Callable[[Group], object], *, repairs: bool = False) -> Any:
        """Run ``work`` after all queued exchanges, wait for it, and return its result or raise its error.

        Args:
            work: a function or a generator function of steps; it must bound its own waits.
            repairs: run it even after the loss of a process; its success allows exchanges again.

        Raises:
            KVStoreError: the store was closed, or its thread has ended. Errors of ``work`` are raised unchanged.
        """
        self.check()
        call = Call(work, repairs=repairs)
        self._items.append(call)
        if self.closed:
            self._refuse()
        self._ring()
        first, since = None, time.monotonic()
        while not wait_driving(call.done, 1.0):
            if not self._thread.is_alive() and not call.done.is_set():
                raise KVStoreError("the thread of this store has ended")
            before, first = first, next(iter(tuple(self._items)), None)
            if first is None or first is not before or first.ready() or len(self._group.members) == 1:
                since = time.monotonic()
            elif time.monotonic() - since > self._group.timeout_s:
                raise KVStoreError(
                    f"rank {self._group.rank} has waited {self._group.timeout_s:.0f} s for arrays of its own to "
                    f"{first.description}: no operation has made them ready; gave up. WEFTPLAN_KVSTORE_TIMEOUT is the "
                    f"time that other processes wait for them, too"
                )
        if call.error is not None:
            raise call.error
        return call.result

    def close(self, timeout: float, why: str | None = None) -> None:
        """Run the queued exchanges, tell the other ranks that this one leaves, and end the thread.

        Args:
            timeout: seconds allowed for the queued exchanges.
            why: reason of failure of this process; the other ranks then treat its end as a loss.
        """
        if self.closed:
            return

        def leave(group: Group) -> Steps[None]:
            lost = self._broken is not None
            with contextlib.suppress(Exception):
                if not lost and why is None:
                    try:
                        yield from group.leave()
                    except WorkerLostError:
                        lost = True
                if lost or why is not None:
                    yield from group.depart(why or "")
            group.stop_listening()

        self._last = Call(leave, repairs=True)
        self._items.append(self._last)
        self.closed = True
        self._ring()
        if not wait_driving(self._last.done, timeout):  # an array that will never be ready: tell the other ranks
            self._ended.set()
            self._ring()
        self._thread.join(1.0)

    def help(self) -> None:
        """Run ready exchanges on a thread that is about to wait, as long as the other ranks are not late.

        Large exchanges are included only if the ranks share memory, so no copy through messages delays the thread.
        """
        if self._items:
            self._take_on(_HELPING, large=self._group.shares_memory)

    def hurry(self) -> None:
        """Run small ready exchanges on a thread that is about to read results; gives up after a few microseconds."""
        try:
            item = self._items[0]
        except IndexError:
            return
        if item.ready() and item.small:
            self._take_on(_POLITE, large=False)

    def _take_on(self, most: int, *, large: bool) -> None:
        with shielded():
            while True:
                unbroken()  # an interrupt in the middle of an exchange would leave the other ranks waiting for this one
                if not self._driving.acquire(blocking=False):
                    return
                try:
                    item = self._items[0] if self._items else None
                    if item is None or not item.ready():
                        return
                    if not item.small and not (large and isinstance(item, Ticket)):
                        if not isinstance(item, Ticket):
                            self._ring()  # a ring during the previous exchange had no effect
                        return
                    self._helped = True
                    over, error = self._drive(item, most)
                finally:
                    self._helped = False
                    self._driving.release()
                if not over and self._lazy and most < _HELPING:
                    return  # the next wait of this thread, or a poll of the store's thread, goes on with it
                if not over:
                    self._left = item
                    self._ring()
                    return
                if not self._lazy:
                    self._lazy = True
                    self._ring()  # wakes the store's thread, which polls from now on
                item.tell(error)
                if not self._items:
                    return

    def _ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # unlocked already
            self._bell.release()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self.closed = True
            self._refuse()

    def _refuse(self) -> None:
        """Fail all queued items, which came after the end of the store."""
        while self._items:
            with contextlib.suppress(IndexError):  # another thread may empty the queue at the same time
                self._items.popleft().tell(KVStoreError(self._why_closed))

    def forked(self) -> None:
        """Close the sequencer in a forked child, whose messages the other ranks would take for the parent's."""
        self.closed = True
        self._why_closed = "this store belongs to the process from which this one was forked: it exchanges nothing here"
        self._items.clear()

    def _serve(self) -> None:
        idle, lazy, seen = 0, False, None
        while True:
            rung = self._bell.acquire(timeout=_LAZY_S if lazy else 1.0)
            began, lazy = self._lazy and not lazy, self._lazy
            if rung or self._items:
                idle = 0
            elif lazy:
                idle += 1
                lazy = self._lazy = idle < _LAZY_LOOKS
            left, self._left = self._left, None
            only: Ticket | Call | None = None
            # Do not wait on `_driving` for the end of a helper's exchange. This thread would get the lock before the
            # program could read the result, queue the next exchange and run it; both threads would then alternate, each
            # waiting for a wake-up by the other.
            if left is None and self._helped:
                self._lazy = lazy = True
                seen = None
                continue
            if left is None and (began or (lazy and not rung)):
                # The thread that queued the first exchange is about to run it. If the second poll finds it again, no
                # helper has taken it; to take a newer exchange would delay the program.
                before, seen = seen, next(iter(tuple(self._items)), None)  # `tuple` is atomic; other threads append
                if began or seen is not before:
                    continue
                only = seen
            seen = None  # keep no reference to a completed exchange
            while self._items:
                with self._driving:
                    item = self._items[0] if self._items else None
                    if item is None or (only is not None and item is not only):
                        break
                    if not item.ready():
                        if not self._ended.is_set():
                            break
                        give_up(item)
                    only = None  # no helper runs exchanges, so this thread takes the following exchanges, too
                    if item is not left:
                        self._lazy = lazy = False
                    _, error = self._drive(item, None)
                item.tell(error)
                if item is self._last:
                    return

    def _drive(self, item: Ticket | Call, most: int | None) -> tuple[bool, BaseException | None]:
        """Run the first item; return whether it is complete, and its error.

        ``most`` is the number of polls after which an incomplete exchange is left; None stands for no limit.
        """
        looks = 0
        try:
            if self._steps is None:
                if self._broken is not None and not item.repairs:
                    raise self._broken  # no exchange after a loss, until a call repairs the group
                self._steps = item.steps(self._group)
            for _ in self._steps:
                looks += 1
                if most is not None:
                    if looks == most:
                        return False, None
                    if looks > _POLITE:
                        os.sched_yield()
                else:
                    rest(looks)
            error: BaseException | None = None
            if item.repairs:
                self._broken = None
        except BaseException as raised:
            error = raised
            if isinstance(error, WorkerLostError):  # a death, or a time-out in the middle of an exchange
                self._broken = error
        self._steps = None
        self._items.popleft()
        return True, error


def wait_driving(event: threading.Event, seconds: float) -> bool:
    """Wait for an event for at most ``seconds``; an engine without threads runs its operations meanwhile."""
    until = time.monotonic() + seconds
    while get_engine().drive(event.is_set):
        if event.wait(0.001):
            return True
        if time.monotonic() > until:
            return False
    return event.wait(max(0.0, until - time.monotonic()))


def rest(looks: int) -> None:
    """Yield the core or sleep between two polls, longer after many polls."""
    if looks < _SPINS:
        os.sched_yield()
    else:
        time.sleep(0.0001 if looks < 2 * _SPINS else 0.001)


def _forked() -> None:
    for sequencer in members(_all):
        sequencer.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
