"""The sequencer: makes a store's exchanges one at a time, in program order.

Engine operations become ready in an order that depends on threads and priorities, and differs between processes. If
each process exchanged what is ready first, two could wait for each other for ever. So an exchange gets its place in a
queue when the *program* asks for it, which happens in the same order on every rank. Whoever *drives* takes the first
one when its arrays are ready here, and meets the other processes.

A thread of the store drives. A thread that is about to sleep in a wait of the engine may do it instead
(:meth:`Sequencer.help`), for what is small and as long as the others come soon: to wake a thread and be woken by it
takes longer than a small exchange. It leaves what it has begun to the store's thread. A thread that pulls does the same
(:meth:`Sequencer.hurry`), for a shorter time, since a pull is not a wait. While exchanges are made in this way the
store's thread is not woken for what is ready when the program asks for it. It takes what it was told is left, and looks
every few milliseconds whether something is left of which nobody has told: two looks find the same exchange then.

It does not wait for the end of an exchange that another thread makes. It would be next, before the program could look
at what it has, put one more and come to make it; so both would take turns, and each would wait to be woken by the
other. The lock ``_driving`` is held by whoever drives, so MPI is called by one thread at a time.
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
"""Looks at what is to come before the store's thread sleeps between them."""

_LAZY_S = 0.002
"""Seconds between two looks of the store's thread while others drive, and after so many in vain it sleeps again:"""
_LAZY_LOOKS = 50

_HELPING = 500
"""Looks of a thread that helps, a few hundred microseconds, before it leaves the exchange to the store's thread."""

_POLITE = 60
"""Looks of such a thread before it lets others have the core between them."""


_all: weakref.WeakSet[Sequencer] = weakref.WeakSet()


class Sequencer:
    """The queue, and the thread behind it."""

    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._items: deque[Ticket | Call] = deque()
        self._driving = Lock()
        self._steps: Iterable[None] | None = None
        """Of the first item, where somebody has begun it; belongs to whoever drives."""
        self._bell = threading.Lock()
        """Open when the store's thread is to look."""
        self._lazy = False
        """A thread that waited has made the last exchange; the store's thread then looks now and then, unasked."""
        self._helped = False
        """Such a thread makes one now."""
        self._left: Ticket | Call | None = None
        """What such a thread has begun and left to the store's thread."""
        self._broken: KVStoreError | None = None
        self._last: Call | None = None
        """After it the thread ends."""
        self.closed = False
        """True once the thread has ended or is about to."""
        self._why_closed = "this store was closed: it exchanges nothing any more"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"weftplan-{name}", daemon=True)
        self._thread.start()
        _all.add(self)

    def check(self) -> None:
        """Raise KVStoreError where nothing can be exchanged any more; to be called before any part is pushed."""
        if self.closed:
            raise KVStoreError(self._why_closed)

    def put(self, ticket: Ticket) -> None:
        """Put an exchange behind all others: where ranks must agree, in the order of the program."""
        ticket.ring = self._ring
        self._items.append(ticket)
        for part in ticket.parts:
            part.ticket = ticket
        if self.closed:  # looked at behind the queue, as the thread looks at the queue behind it
            self._refuse()
            return
        # A program that has put what is ready waits for it next, or pulls it. What becomes ready later, while the
        # program may be asleep, rings.
        if ticket.ready() and not (self._lazy and (self._group.shares_memory or ticket.small)):
            self._ring()

    def call(self, work: Callable[[Group], object], *, repairs: bool = False) -> Any:
        """Let the thread do ``work`` behind all exchanges, wait for it, and return or raise what it does.

        Args:
            work: what to do: a function, or one that returns steps; it bounds its waits itself.
            repairs: do it after a lost process, too; if it succeeds, exchanges go on.

        Raises:
            KVStoreError: the store was closed, or its thread has ended; and whatever ``work`` raises.
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
        """Tell the others that this process takes part no more, and end the thread; what is queued comes first.

        Args:
            timeout: seconds for what is queued.
            why: this process fails; the others are to hear it as a loss.
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
        if not wait_driving(self._last.done, timeout):  # an array that will never be ready: let the others know
            self._ended.set()
            self._ring()
        self._thread.join(1.0)

    def help(self) -> None:
        """On a thread that is about to wait: exchange what is ready, as long as the others come soon.

        What is large only where nothing but the others holds it up.
        """
        if self._items:
            self._take_on(_HELPING, large=self._group.shares_memory)

    def hurry(self) -> None:
        """On a thread that is about to use what is exchanged: the same for a moment, and for what is small."""
        try:
            item = self._items[0]
        except IndexError:
            return
        if item.ready() and item.small:
            self._take_on(_POLITE, large=False)

    def _take_on(self, most: int, *, large: bool) -> None:
        with shielded():
            while True:
                unbroken()  # an exchange that is made on one side only is never made on the other
                if not self._driving.acquire(blocking=False):
                    return
                try:
                    item = self._items[0] if self._items else None
                    if item is None or not item.ready():
                        return
                    if not item.small and not (large and isinstance(item, Ticket)):
                        if not isinstance(item, Ticket):
                            self._ring()  # it may have been rung for while this thread made another one
                        return
                    self._helped = True
                    over, error = self._drive(item, most)
                finally:
                    self._helped = False
                    self._driving.release()
                if not over and self._lazy and most < _HELPING:
                    return  # the store's thread comes by, or this one waits next
                if not over:
                    self._left = item
                    self._ring()
                    return
                if not self._lazy:
                    self._lazy = True
                    self._ring()  # it is to look from now on
                item.tell(error)
                if not self._items:
                    return

    def _ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is open
            self._bell.release()

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self.closed = True
            self._refuse()

    def _refuse(self) -> None:
        """Tell whatever came behind the end of the store."""
        while self._items:
            with contextlib.suppress(IndexError):  # another thread does the same
                self._items.popleft().tell(KVStoreError(self._why_closed))

    def forked(self) -> None:
        """In a forked child: exchange nothing, since others would take that for what the parent says."""
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
            if left is None and self._helped:  # not to wait for its end; see above
                self._lazy = lazy = True
                seen = None
                continue
            if left is None and (began or (lazy and not rung)):
                # Whoever put the first exchange is about to make it. Only one that is still there at the second look
                # was left, and to take another would only be in the way.
                before, seen = seen, next(iter(tuple(self._items)), None)  # in one step: others change the queue
                if began or seen is not before:
                    continue
                only = seen
            seen = None  # what is over is kept no longer
            while self._items:
                with self._driving:
                    item = self._items[0] if self._items else None
                    if item is None or (only is not None and item is not only):
                        break
                    if not item.ready():
                        if not self._ended.is_set():
                            break
                        give_up(item)
                    only = None  # whatever is behind it has been left, too
                    if item is not left:
                        self._lazy = lazy = False
                    _, error = self._drive(item, None)
                item.tell(error)
                if item is self._last:
                    return

    def _drive(self, item: Ticket | Call, most: int | None) -> tuple[bool, BaseException | None]:
        """Whether the first item is over, and its error; ``most``: looks after which to leave it."""
        looks = 0
        try:
            if self._steps is None:
                if self._broken is not None and not item.repairs:
                    raise self._broken  # who has lost another process exchanges nothing
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
            if isinstance(error, WorkerLostError):  # or a wait that was given up half way
                self._broken = error
        self._steps = None
        self._items.popleft()
        return True, error


def wait_driving(event: threading.Event, seconds: float) -> bool:
    """Wait for an event for at most ``seconds``, and run operations meanwhile on an engine that has no threads."""
    until = time.monotonic() + seconds
    while get_engine().drive(event.is_set):
        if event.wait(0.001):
            return True
        if time.monotonic() > until:
            return False
    return event.wait(max(0.0, until - time.monotonic()))


def rest(looks: int) -> None:
    """Let others have the core between two looks at what is to come, as the store's thread does."""
    if looks < _SPINS:
        os.sched_yield()
    else:
        time.sleep(0.0001 if looks < 2 * _SPINS else 0.001)


def _forked() -> None:
    for sequencer in members(_all):
        sequencer.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
