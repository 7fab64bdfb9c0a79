"""The sequencer: it runs a store's exchanges one at a time, in program order.

Engine operations become ready in an order that depends on threads and priorities and differs between processes. If each
process ran its first ready exchange, two processes could wait for each other forever. Therefore exchanges are queued
when the *program* requests them, in the same order on every rank. The head of the queue runs as soon as its arrays are
ready on this rank. The thread that runs (*drives*) it holds the lock ``_driving``, so one thread at a time calls MPI.

Three kinds of threads drive:

* the store's own thread;
* a *helper*, which is about to sleep in a wait of the engine (:meth:`Sequencer.help`), because a small exchange takes
  less time than a hand-over to another thread and back. If the other ranks are late, the helper hands the started
  exchange to the store's thread;
* a thread that pulls (:meth:`Sequencer.hurry`), with a smaller limit, because a pull must not wait.

While helpers run the exchanges, the sequencer is *lazy*: an exchange that is ready when it is queued does not wake the
store's thread. Unless it is woken, for example by a hand-over, this thread then runs only an exchange that it finds at
the head of the queue in two successive polls, :data:`_LAZY_S` apart.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from weftplan.engine import get as get_engine
from weftplan.engine.shield import shielded, unbroken
from weftplan.errors import KVStoreError, WorkerLostError
from weftplan.kvstore.distributed.exchange.tickets import SequencedCall, Ticket, give_up
from weftplan.kvstore.distributed.group.group import RankGroup
from weftplan.kvstore.distributed.group.membership import Steps
from weftplan.locks import Lock, members

_SPINS = 2000
"""Number of polls of an exchange after which the store's thread sleeps between polls."""

_LAZY_S = 0.002
"""Seconds between two polls of the queue by the store's thread while the sequencer is lazy."""

_LAZY_LOOKS = 50
"""Number of polls of an empty queue after which the sequencer is no longer lazy."""

_HELPING = 500
"""Number of polls, a few hundred microseconds, after which a helper hands the exchange to the store's thread."""

_POLITE = 60
"""Number of polls after which a helper yields the core between polls, and after which a pull gives up."""


_all: weakref.WeakSet[Sequencer] = weakref.WeakSet()


T = TypeVar("T")


class Sequencer:
    """The queue of a store's exchanges, with the store's thread that runs them."""

    def __init__(self, group: RankGroup, name: str) -> None:
        self._group = group
        self._items: deque[Ticket | SequencedCall] = deque()
        # Held by the thread that drives the first item. Any thread may append; only the holder removes items, except
        # for _refuse after the end.
        self._driving = Lock()
        self._steps: Iterable[None] | None = None
        """Remaining steps of the first item, if started; guarded by `_driving`."""
        self._bell = threading.Lock()
        """Binary semaphore: released to wake the store's thread, which acquires it; repeated rings are merged."""
        self._lazy = False
        """Whether helpers run the exchanges, so that ready exchanges do not wake the store's thread."""
        self._helped = False
        """Whether a helper is running an exchange now."""
        self._handed_over: Ticket | SequencedCall | None = None
        """Exchange that a helper has started and handed to the store's thread."""
        self._broken: KVStoreError | None = None
        """The loss after which no exchange runs until a call with ``repairs`` succeeds."""
        self._final_call: SequencedCall | None = None
        """Last call of the queue, after which the store's thread ends."""
        self.closed = False
        """True after a call of :meth:`close`, after the end of the store's thread, and in a forked child."""
        self._why_closed = "this store was closed: it exchanges nothing any more"
        self._ended = threading.Event()
        """Set when :meth:`close` has waited too long: the thread then fails exchanges that are not ready."""
        self._thread = threading.Thread(target=self._run, name=f"weftplan-{name}", daemon=True)
        self._thread.start()
        _all.add(self)

    def check(self) -> None:
        """Raise KVStoreError if the sequencer is closed; call this before pushing a part to the engine."""
        if self.closed:
            raise KVStoreError(self._why_closed)

    def put(self, ticket: Ticket) -> None:
        """Append an exchange to the queue; every rank must append the same exchanges in the same order."""
        ticket.ring = self._ring
        self._items.append(ticket)
        for part in ticket.parts:
            part.ticket = ticket
        # Interleaving: the ending thread sets `closed`, then empties the queue; this thread appends, then reads
        # `closed`. So at least one of the two threads fails the ticket, and it cannot stay queued for ever.
        if self.closed:
            self._refuse()
            return
        # While lazy, do not ring for a ready exchange: the program will next wait for it or pull, and run it as a
        # helper. A ticket that becomes ready later rings in `Part.arrive`, because the program may be asleep by then.
        if ticket.ready() and not (self._lazy and (self._group.shares_memory or ticket.small)):
            self._ring()

    def call(self, work: Callable[[RankGroup], Steps[T]], *, repairs: bool = False) -> T:
        """Run ``work`` after all queued exchanges, wait for it, and return its result or raise its error.

        Args:
            work: function of the group, which may be a generator function of steps; its waits must have time-outs.
            repairs: whether to run it even after the loss of a process; if it succeeds, exchanges can run again.

        Raises:
            KVStoreError: the store was closed, or an earlier exchange waits too long for this process's own arrays.
        """
        self.check()
        call = SequencedCall(work, repairs=repairs)
        self._items.append(call)
        if self.closed:
            self._refuse()
        self._ring()
        # Give up if the same unready item stays first for `timeout_s`: no operation of this process readies its arrays.
        head, since = None, time.monotonic()
        while not wait_driving(call.completed, 1.0):
            if not self._thread.is_alive() and not call.completed.is_set():
                raise KVStoreError("the thread of this store has ended")
            previous, head = head, next(iter(tuple(self._items)), None)
            if head is None or head is not previous or head.ready() or len(self._group.members) == 1:
                since = time.monotonic()
            elif time.monotonic() - since > self._group.timeout_s:
                raise KVStoreError(
                    f"rank {self._group.rank} has waited {self._group.timeout_s:.0f} s for arrays of its own to "
                    f"{head.description}: no operation has made them ready; gave up. WEFTPLAN_KVSTORE_TIMEOUT is the "
                    f"time that other processes wait for them, too"
                )
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def close(self, timeout: float, why: str | None = None) -> None:
        """Run the queued exchanges, notify the other ranks that this rank leaves, and end the store's thread.

        Args:
            timeout: seconds allowed for the queued exchanges.
            why: the failure of this process, which the other ranks then report as a loss; None without a failure.
        """
        if self.closed:
            return

        def leave(group: RankGroup) -> Steps[None]:
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

        self._final_call = SequencedCall(leave, repairs=True)
        self._items.append(self._final_call)
        self.closed = True
        self._ring()
        if not wait_driving(self._final_call.completed, timeout):
            # Some array never became ready: fail its exchange on all ranks.
            self._ended.set()
            self._ring()
        self._thread.join(1.0)

    def help(self) -> None:
        """Run ready exchanges on the calling thread, which is about to wait, as long as the other ranks are not late.

        Large exchanges are included only if the ranks share memory, so that no transfer of messages delays the thread.
        """
        if self._items:
            self._drive_ready(_HELPING, large=self._group.shares_memory)

    def hurry(self) -> None:
        """Run small ready exchanges on the calling thread, which is about to read results; give up after a few µs."""
        try:
            item = self._items[0]
        except IndexError:
            return
        if item.ready() and item.small:
            self._drive_ready(_POLITE, large=False)

    def _drive_ready(self, max_polls: int, *, large: bool) -> None:
        """Run ready items from the head of the queue, as a helper, with at most ``max_polls`` polls for each.

        If ``large``, also run exchanges that do not fit into messages.
        """
        with shielded():
            while True:
                unbroken()  # Ctrl-C in the middle of an exchange would leave the other ranks waiting for this rank
                if not self._driving.acquire(blocking=False):
                    return
                try:
                    item = self._items[0] if self._items else None
                    if item is None or not item.ready():
                        return
                    if not item.small and not (large and isinstance(item, Ticket)):
                        if not isinstance(item, Ticket):
                            # The store's thread ignored a ring while `_helped` was set; ring again.
                            self._ring()
                        return
                    self._helped = True
                    over, error = self._drive(item, max_polls)
                finally:
                    self._helped = False
                    self._driving.release()
                if not over and self._lazy and max_polls < _HELPING:
                    return  # this thread's next wait, or a poll of the store's thread, resumes the started exchange
                if not over:
                    self._handed_over = item
                    self._ring()
                    return
                if not self._lazy:
                    self._lazy = True
                    self._ring()  # wakes the store's thread, which sleeps for 1 s and must poll more often from now on
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
        """Fail all queued items with the reason why the store is closed."""
        while self._items:
            with contextlib.suppress(IndexError):  # another thread may empty the queue at the same time
                self._items.popleft().tell(KVStoreError(self._why_closed))

    def forked(self) -> None:
        """Close the sequencer in a forked child; the other ranks would take its messages for the parent's."""
        self.closed = True
        self._why_closed = "this store belongs to the process from which this one was forked: it exchanges nothing here"
        self._items.clear()

    def _serve(self) -> None:
        """Run the store's thread: wait for rings or poll, and drive items that no helper takes."""
        idle, lazy, seen = 0, False, None
        while True:
            rung = self._bell.acquire(timeout=_LAZY_S if lazy else 1.0)
            began, lazy = self._lazy and not lazy, self._lazy
            if rung or self._items:
                idle = 0
            elif lazy:
                idle += 1
                lazy = self._lazy = idle < _LAZY_LOOKS
            handed_over, self._handed_over = self._handed_over, None
            only: Ticket | SequencedCall | None = None
            # Do not wait on `_driving` for the end of a helper's exchange. This thread would get the lock before the
            # program could read the result, queue the next exchange and run it. Both threads would then alternate, each
            # waiting for the other to wake it.
            if handed_over is None and self._helped:
                self._lazy = lazy = True
                seen = None
                continue
            if handed_over is None and (began or (lazy and not rung)):
                # The program that queued the first exchange is about to run it as a helper. Take the exchange only if
                # the second poll finds it again, so that no helper has taken it; taking it earlier delays the program.
                previous, seen = seen, next(iter(tuple(self._items)), None)  # `tuple` is atomic; other threads append
                if began or seen is not previous:
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
                    only = None  # no helper runs exchanges, so take the following exchanges, too
                    if item is not handed_over:
                        self._lazy = lazy = False
                    _, error = self._drive(item, None)
                item.tell(error)
                if item is self._final_call:
                    return

    def _drive(self, item: Ticket | SequencedCall, max_polls: int | None) -> tuple[bool, BaseException | None]:
        """Start or resume the first item; return whether it has ended, and its error.

        An ended item is removed from the queue. ``max_polls`` is the number of polls after which an unfinished item is
        left as it is; None: no limit. The caller holds ``_driving``.
        """
        looks = 0
        try:
            if self._steps is None:
                if self._broken is not None and not item.repairs:
                    raise self._broken  # no exchange after a loss, until a call repairs the group
                self._steps = item.steps(self._group)
            for _ in self._steps:
                looks += 1
                if max_polls is not None:
                    if looks == max_polls:
                        return False, None
                    if looks > _POLITE:
                        os.sched_yield()
                else:
                    pause(looks)
            error: BaseException | None = None
            if item.repairs:
                self._broken = None
        except BaseException as raised:
            error = raised
            if isinstance(error, WorkerLostError):  # a death, or a time-out in the middle of an exchange
                self._broken = error
        # Remove the item before its operations complete (the caller calls `tell` after releasing `_driving`), so that a
        # program that they wake finds its next exchange at the head.
        self._steps = None
        self._items.popleft()
        return True, error


def wait_driving(event: threading.Event, seconds: float) -> bool:
    """Wait for an event for at most ``seconds``; return whether it is set.

    An engine without threads runs its operations meanwhile.
    """
    until = time.monotonic() + seconds
    while get_engine().drive(event.is_set):
        if event.wait(0.001):
            return True
        if time.monotonic() > until:
            return False
    return event.wait(max(0.0, until - time.monotonic()))


def pause(looks: int) -> None:
    """Yield the core, or sleep after many polls, between two polls; ``looks`` is the number of polls so far."""
    if looks < _SPINS:
        os.sched_yield()
    else:
        time.sleep(0.0001 if looks < 2 * _SPINS else 0.001)


def _forked() -> None:
    for sequencer in members(_all):
        sequencer.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
