"""Work in parts on several cores: how many are idle, and who does which part.

An operation runs on one worker. While other cores have nothing to do, a large one may hand parts of itself to helper
threads (:func:`split`). **Bits**: the number of parts depends on the work alone, never on how many cores are idle, and
a part computes the same on any thread; so a result is the same on every engine, with any number of cores.

Nobody waits for a helper that has not begun: whoever splits takes parts until none is left, so a part that no helper
takes is done by its owner, and the worst case is what happens without helpers. Helpers run parts only, so they wait for
nobody. They are threads of this module's own and not workers: an engine has one worker a device by default, and a
worker that helps could not take what becomes ready meanwhile.

Only workers of engines split, and who takes the place of one (:func:`sit`), since other threads are the user's: Naive
and the simulator promise to run everything on one thread, and so does an engine that was made with ``cpu_workers=1``.
A core counts as idle when no worker and no helper is at work on it (:func:`idle_cores`).

A thread that sleeps takes long to wake beside a part of a small network, so helpers with nothing to do, and owners that
wait for a helper, first look at a word of memory for a while (:class:`_Word`), where something compiled can. Whoever
looks can be handed parts without the interpreter (:func:`with_lookers`), so that even short ones are worth it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from ctypes import addressof, c_int64

from weftplan import config
from weftplan.locks import Lock, whole_in_children
from weftplan.support import blas_threads, slots

VARIABLE = "WEFTPLAN_KERNEL_CORES"


class _Thread(threading.local):
    worker = False
    seat: AbstractContextManager[None] | None = None


_thread = _Thread()
_NOTHING = contextlib.nullcontext()
_lent = 0
"""Helpers that splits have asked for and not got back; under ``_pool_lock``."""


def enter_worker(*, alone: bool = False) -> None:
    """Called once by each new worker thread of an engine; unless it is to work ``alone``, it may split what it runs."""
    blas_threads.enter_worker()
    _thread.worker = not alone


def sit(undisturbed: AbstractContextManager[None] | None) -> AbstractContextManager[None] | None:
    """Let the calling thread, which takes the place of a worker that sleeps, split what it runs; None: no more.

    Args:
        undisturbed: in it no signal handler raises on this thread. A split that was broken off would leave helpers at
            work on arrays that nobody holds any more.

    Returns:
        What was so before.
    """
    before, _thread.seat = _thread.seat, undisturbed
    return before


def usable_cores() -> int:
    """Cores that one operation may use: WEFTPLAN_KERNEL_CORES, else OMP_NUM_THREADS, but no more than there are.

    Raises:
        ConfigError: WEFTPLAN_KERNEL_CORES is no number of cores.
    """
    there = blas_threads.usable_cpus()
    most = int(config.process(VARIABLE))
    if not most:  # containers and scripts for MXNet say with this how many threads an operator may use
        words = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        most = int(words) if words.isdecimal() else 0
    return min(there, most) if most else there


def idle_cores() -> int:
    """How many cores could help the calling thread now; 0 on a thread that neither is a worker nor sits for one.

    A guess, since others come and go: it may decide who computes something, never what is computed.
    """
    if not _thread.worker and _thread.seat is None:
        return 0
    return max(0, usable_cores() - _lent - (0 if slots.WORKER_COUNT.value is None else slots.WORKER_COUNT.value()))


def split(work: Callable[[int], object], parts: int) -> None:
    """``work(0)`` to ``work(parts - 1)``, each once, in any order, on this thread and on idle cores.

    Args:
        work: one part; parts write different memory, and do not push, wait or split.
        parts: how many there are; must not depend on how many cores are idle, or results would.

    Returns when all parts are done, and when none of them runs any more. What a part raises is raised here; others may
    be left out then.
    """
    helpers = min(idle_cores(), parts - 1) if parts > 1 else 0
    if helpers <= 0:
        for part in range(parts):
            work(part)
        return
    global _lent
    with _thread.seat or _NOTHING:
        with _pool_lock:
            _lent += helpers
        try:
            _Job(lambda part, _: work(part), [(part, part + 1) for part in reversed(range(parts))]).run(helpers)
        finally:
            with _pool_lock:
                _lent -= helpers


def split_in_rooms(work: Callable[[int, int], None], parts: int) -> None:
    """``work(part, room)`` for all parts, each in one of as many rooms of scratch, which it has for itself.

    A thread that does several parts has the same room for each, which stays in its cache.
    """
    free = list(range(parts))

    def part(number: int) -> None:
        room = free.pop()
        work(number, room)
        free.append(room)

    split(part, parts)


def with_lookers(run: Callable[[Sequence[int]], object], most: int, *, all_or_none: bool) -> bool:
    """Call ``run`` with the addresses of the words of helpers who look at them, and do nothing else meanwhile.

    The words' meaning is agreed between ``run`` and the provider of :data:`slots.POLLING`.

    Args:
        most: helpers; no more than are idle cores.
        all_or_none: whether fewer are not enough.

    Returns:
        False where too few look; then nothing is called.
    """
    global _lent
    with _thread.seat or _NOTHING:
        with _pool_lock:
            taken = [helper for helper in _free if helper.looks][:most]
            if len(taken) < (most if all_or_none else 1):
                return False
            for helper in taken:
                _free.remove(helper)
            _lent += len(taken)
        try:
            run([helper.words for helper in taken])
        finally:
            with _pool_lock:
                _free.extend(taken)
                _lent -= len(taken)
    return True


_SOON_S = 1e-3
_AGAIN_S = 5e-3


class _Calls:
    """When something last found no helper who looked, and when one was last woken for that alone."""

    missed = woken = 0.0


def call_looker() -> None:
    """Wake a helper who sleeps, to look for a while, if that is asked for twice within a millisecond.

    For who has many short parts, for one of which waking takes too long: that costs the caller some 100 microseconds on
    a virtual machine.
    """
    now = time.monotonic()
    soon, _Calls.missed = now - _Calls.missed < _SOON_S, now
    if not soon or now - _Calls.woken < _AGAIN_S:
        return
    _Calls.woken = now
    with _thread.seat or _NOTHING, contextlib.suppress(RuntimeError):
        taken = _helpers(1)
        for helper in taken:
            helper.give(_only_look, _no_work)
        with _pool_lock:
            _free.extend(taken)


def _only_look(work: Callable[[_Word], None], at_work: _Word) -> None: ...


def _no_work(at_work: _Word) -> None: ...


def share_out(work: Callable[[int, int], None], size: int, block: int, threads: int) -> None:
    """``work(lo, hi)`` for ranges of whole blocks, ``size`` elements in all, on at most ``threads`` threads.

    Unlike :func:`split` it may be called from any thread, uses as many threads as it is told to, idle or not, and cuts
    ranges by their number: it is for work in which each block is computed alike in any range.
    """
    blocks = -(-size // block)
    workers = min(threads, blocks)
    if workers <= 1:
        work(0, size)
        return
    step = -(-blocks // (workers * _TURNS)) * block
    _Job(work, [(start, min(start + step, size)) for start in range(0, size, step)]).run(workers - 1)


_TURNS = 4
"""Ranges for each thread: one that other work holds up leaves its later ones to the rest."""


class _Job:
    """Ranges that several threads take one by one, the last of the list first; whoever waits for all takes some, too.

    A thread that comes late, or never, takes nothing, and only threads that have begun are waited for: each puts its
    lock down before it takes a range, so whoever finds no range left sees the locks of all who took one.
    """

    def __init__(self, work: Callable[[int, int], object], ranges: list[tuple[int, int]]) -> None:
        self._work = work
        self._left = deque(ranges)
        self._busy: list[tuple[Lock, _Word]] = []
        self._errors: list[BaseException] = []

    def run(self, helpers: int) -> None:
        """Do all ranges with at most so many helpers."""
        taken: list[_Helper] = []
        try:
            # Without a thread to be had (the interpreter ends, or the system's limit is reached) this one does all.
            with contextlib.suppress(RuntimeError):
                for helper in _helpers(helpers):
                    taken.append(helper)
                    # In a copy of the variables, as NumPy keeps there what it does about overflow.
                    helper.give(copy_context().run, self._help)
            self._finish()
        finally:
            # Not they themselves: they would need the interpreter for that, and the next job would not find them.
            with _pool_lock:
                _free.extend(taken)

    def _help(self, at_work: _Word) -> None:
        """Do ranges until none is left; what they raise is for :meth:`_finish`."""
        busy = Lock()
        busy.acquire()
        at_work.begin()
        self._busy.append((busy, at_work))
        try:
            self._do()
        except BaseException as error:
            self._errors.append(error)
        finally:
            busy.release()
            at_work.change()

    def _do(self) -> None:
        while True:
            try:
                lo, hi = self._left.pop()
            except IndexError:
                return
            self._work(lo, hi)

    def _finish(self) -> None:
        """Help, and return when nobody works any more: then the arrays may go. Raises what a range raised."""
        try:
            self._do()
        finally:
            self._left.clear()
            for busy, at_work in list(self._busy):
                at_work.look()
                busy.acquire()
            self._work = _nothing  # a helper that comes late holds no array
        if self._errors:
            raise self._errors[0]


def _nothing(lo: int, hi: int) -> None: ...


_TURNS_OF_LOOKS = 300
"""How long a thread looks before it sleeps: about 450 microseconds, longer than what lies between products of a small
network. An MLP's training step takes 0.98 of its time without looks where 100 turns are made, with 300 0.91 to 0.95."""
_PAUSES = 300
"""Between a change and the end of a look: about 10 microseconds, in which who made it lets go of the interpreter. Who
asks for that earlier sleeps after all: without pauses a helper begins 60 microseconds after it was called, not 35."""


_BOX = 3
"""Words of a box, behind the others, in which whoever looks can be told something; the first is 1 while it looks."""


class _Word:
    """What one thread changes, and another one looks at for a while before it sleeps until a lock is free.

    It is a hint: a change that comes too early, or never, costs time alone, since the lock decides.
    """

    __slots__ = ("_words", "start")

    def __init__(self) -> None:
        self._words = (c_int64 * (4 + _BOX))(0, 0, _TURNS_OF_LOOKS, _PAUSES)
        self.start = addressof(self._words)

    @property
    def is_seen(self) -> bool:
        """Whether somebody looks at it now, who can be told something there."""
        return self._words[4] == 1

    def begin(self) -> None:
        """Changes count from here on."""
        self._words[1] = self._words[0]

    def change(self) -> None:
        """The lock is free."""
        self._words[0] += 1

    def look(self) -> None:
        """Return soon after a change, or after a while; at once where nothing can look without the interpreter."""
        look = None if slots.POLLING.value is None else slots.POLLING.value()
        if look is not None:
            look(self.start)


_pool_lock = whole_in_children(Lock())
_free: list[_Helper] = []
"""Helpers whom no job has; like ``_started``, under ``_pool_lock``."""
_started = 0


class _Helper:
    """A thread that sleeps until it is given something to do.

    Invariant: what it is given of a job that is over does nothing, so the last thing given is all that counts.
    """

    __slots__ = ("_at_work", "_given", "_park", "_task")

    def __init__(self, number: int) -> None:
        self._at_work, self._given = _Word(), _Word()
        self._park = threading.Lock()
        self._park.acquire()
        self._task: deque[tuple[Callable[..., object], Callable[[_Word], None]]] = deque(maxlen=1)
        threading.Thread(target=self._live, name=f"weftplan helper {number}", daemon=True).start()

    @property
    def looks(self) -> bool:
        """Whether it looks for something to do."""
        return self._given.is_seen

    @property
    def words(self) -> int:
        """The address of the words that it looks at."""
        return self._given.start

    def give(self, run: Callable[..., object], work: Callable[[_Word], None]) -> None:
        """``run(work, at_work)``, which raises nothing and changes the word when it has ended. For whoever has taken it
        out of ``_free``."""
        self._task.append((run, work))
        with contextlib.suppress(RuntimeError):  # it has not come yet to what it was given last
            self._park.release()
        self._given.change()

    def _live(self) -> None:
        blas_threads.enter_worker()
        while True:
            self._given.look()
            self._park.acquire()
            self._given.begin()
            with contextlib.suppress(IndexError):  # it has been done already
                run, work = self._task.popleft()
                run(work, self._at_work)
                del run, work  # nothing is held in sleep


def _helpers(wanted: int) -> list[_Helper]:
    """As many helpers as are free, started where there are fewer than ``wanted`` in all.

    Raises:
        RuntimeError: no thread can be started.
    """
    global _started
    with _pool_lock:
        while len(_free) < wanted and _started < wanted:
            _free.append(_Helper(_started))
            _started += 1
        found = _free[:wanted]
        del _free[:wanted]
        return found


def _forget_helpers() -> None:
    """After a fork the child has none of the threads; new ones are started at need."""
    global _lent, _started
    _free.clear()
    _lent = _started = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)
