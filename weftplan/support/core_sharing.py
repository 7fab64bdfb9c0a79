"""Splitting one operation over idle cores with a pool of helper threads.

An operation runs on one worker. While other cores are idle, a large operation may hand parts of itself to helper
threads (:func:`split`). **Bits**: the number of parts depends on the operation alone, never on the number of idle
cores, and a part computes the same bits on any thread. So a result is the same on every engine and core count.

The owner never waits for a helper that has not begun: it takes parts itself until none is left. In the worst case it
does all parts, as without helpers. Helpers only run parts, so they never wait for another thread. They are threads of
this module and not workers: an engine has one worker per device by default, and a worker that helps could not take
operations that become ready meanwhile.

Only engine workers split, and threads that stand in for a worker (:func:`sit`). All other threads belong to the user:
Naive and the simulator promise to run everything on one thread, and so does an engine with ``cpu_workers=1``. A core
counts as idle if neither a worker nor a helper is running on it (:func:`idle_cores`).

Waking a sleeping thread takes long compared with one part of a small network. So idle helpers, and owners that wait for
a helper, first spin on a word of memory (:class:`_Word`) if compiled code for that is available. A spinning helper can
be handed parts without the interpreter (:func:`with_lookers`), which makes even short parts worthwhile. With 2 threads
on 2 cores this changes the time of a training step by +3 % (MLP), -7 % (LeNet), -15 % (ResNet-18, noisy) and -7 %
(LSTM), measured in pairs on 2026-11-29 on a Zen 4 with AVX-512.
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
from weftplan.locks import Lock, consistent_in_children
from weftplan.support import blas_threads, slots

VARIABLE = "WEFTPLAN_KERNEL_CORES"


class _Thread(threading.local):
    worker = False
    seat: AbstractContextManager[None] | None = None


_thread = _Thread()
_NOTHING = contextlib.nullcontext()


def enter_worker(*, alone: bool = False) -> None:
    """Register the calling thread as an engine's worker; unless ``alone``, it may split the operations that it runs.

    Each new worker thread calls this once.
    """
    blas_threads.enter_worker()
    _thread.worker = not alone


def sit(undisturbed: AbstractContextManager[None] | None) -> AbstractContextManager[None] | None:
    """Let the calling thread, which stands in for a sleeping worker, split its operations; None ends this.

    Args:
        undisturbed: a context that keeps signal handlers from raising on this thread. An interrupted split would leave
            helpers writing to arrays that have lost their last reference.

    Returns:
        The previous context.
    """
    previous, _thread.seat = _thread.seat, undisturbed
    return previous


def usable_cores() -> int:
    """Return how many cores one operation may use: WEFTPLAN_KERNEL_CORES, else OMP_NUM_THREADS, else all.

    Raises:
        ConfigError: WEFTPLAN_KERNEL_CORES is no number of cores.
    """
    cpus = blas_threads.usable_cpus()
    limit = int(config.process(VARIABLE))
    if not limit:  # containers and scripts for MXNet limit the threads of an operator with this variable
        words = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
        limit = int(words) if words.isdecimal() else 0
    return min(cpus, limit) if limit else cpus


def idle_cores() -> int:
    """Return how many cores could help the calling thread now; 0 unless it is a worker or stands in for a worker.

    This is an estimate, since other threads come and go. It may choose the thread of a computation, never its result.
    """
    if not _thread.worker and _thread.seat is None:
        return 0
    return max(0, usable_cores() - _pool.lent - (0 if slots.WORKER_COUNT.value is None else slots.WORKER_COUNT.value()))


def split(work: Callable[[int], object], parts: int) -> None:
    """Run ``work(0)`` to ``work(parts - 1)``, each once, in any order, on this thread and on idle cores.

    Args:
        work: computes one part; parts write disjoint memory, and do not push, wait or split.
        parts: the number of parts; must not depend on the number of idle cores, or results would depend on it too.

    Returns when all parts are done and none is running. An exception of a part is raised here; other parts may be
    skipped then.
    """
    helpers = min(idle_cores(), parts - 1) if parts > 1 else 0
    if helpers <= 0:
        for part in range(parts):
            work(part)
        return
    with _thread.seat or _NOTHING:
        with _pool_lock:
            _pool.lent += helpers
        try:
            _Job(lambda part, _: work(part), [(part, part + 1) for part in reversed(range(parts))]).run(helpers)
        finally:
            with _pool_lock:
                _pool.lent -= helpers


def split_in_rooms(work: Callable[[int, int], None], parts: int) -> None:
    """Run ``work(part, room)`` for all parts, each with exclusive use of one of ``parts`` scratch rooms.

    A thread that does several parts reuses the same room, which stays in its cache.
    """
    free = list(range(parts))

    def part(number: int) -> None:
        index = free.pop()
        work(number, index)
        free.append(index)

    split(part, parts)


def with_lookers(run: Callable[[Sequence[int]], object], most: int, *, all_or_none: bool) -> bool:
    """Reserve spinning helpers and call ``run`` with the addresses of the words that they poll.

    ``run`` and the provider of :data:`slots.POLLING` agree on the meaning of the words.

    Args:
        most: the largest number of helpers; at most the number of idle cores.
        all_or_none: require ``most`` helpers instead of at least one.

    Returns:
        False if too few helpers are spinning; ``run`` is not called then.
    """
    with _thread.seat or _NOTHING:
        with _pool_lock:
            lent = [helper for helper in _pool.free if helper.looks][:most]
            if len(lent) < (most if all_or_none else 1):
                return False
            for helper in lent:
                _pool.free.remove(helper)
            _pool.lent += len(lent)
        try:
            run([helper.words for helper in lent])
        finally:
            with _pool_lock:
                _pool.free.extend(lent)
                _pool.lent -= len(lent)
    return True


_SOON_S = 1e-3
"""A helper is woken to spin only after two misses within this time: then more work will follow before it gives up."""
_AGAIN_S = 5e-3
"""Minimum seconds between two such wakings, which cost about 100 microseconds each."""


class _Calls:
    """The last time that no helper was spinning, and the last time that a helper was woken just to spin."""

    missed = woken = 0.0


def call_looker() -> None:
    """Wake a sleeping helper so that it spins for a while, if this is called twice within a millisecond.

    This serves callers with many short parts. Waking a helper costs the caller about 100 microseconds on a virtual
    machine, which is too long for a single short part.
    """
    time_s = time.monotonic()
    soon, _Calls.missed = time_s - _Calls.missed < _SOON_S, time_s
    if not soon or time_s - _Calls.woken < _AGAIN_S:
        return
    _Calls.woken = time_s
    with _thread.seat or _NOTHING, contextlib.suppress(RuntimeError):
        helpers = _helpers(1)
        for helper in helpers:
            helper.give(_only_look, _no_work)
        with _pool_lock:
            _pool.free.extend(helpers)


def _only_look(work: Callable[[_Word], None], at_work: _Word) -> None: ...


def _no_work(at_work: _Word) -> None: ...


def share_out(work: Callable[[int, int], None], size: int, block: int, threads: int) -> None:
    """Run ``work(lo, hi)`` on ranges of whole blocks, ``size`` elements in all, on at most ``threads`` threads.

    Unlike :func:`split`, any thread may call this. It uses ``threads`` threads whether cores are idle or not, and the
    ranges depend on that number. So a block must compute the same bits in any range.
    """
    blocks = -(-size // block)
    workers = min(threads, blocks)
    if workers <= 1:
        work(0, size)
        return
    step = -(-blocks // (workers * _TURNS)) * block
    _Job(work, [(start, min(start + step, size)) for start in range(0, size, step)]).run(workers - 1)


_TURNS = 4
"""Ranges per thread: a thread that is delayed leaves its later ranges to the other threads."""


class _Job:
    """A list of ranges that several threads take from its end, including the thread that waits for all of them.

    A helper that starts late, or never, takes no range, and the owner waits only for helpers that have begun.

    Invariant: a helper publishes its lock before it takes a range. So when the owner finds no range left, it sees the
    locks of all helpers that have taken a range.
    """

    def __init__(self, work: Callable[[int, int], object], ranges: list[tuple[int, int]]) -> None:
        self._work = work
        self._ranges = deque(ranges)
        self._busy: list[tuple[Lock, _Word]] = []
        self._errors: list[BaseException] = []

    def run(self, helpers: int) -> None:
        """Do all ranges, with at most ``helpers`` helpers."""
        started: list[_Helper] = []
        try:
            # If no thread can start (at exit of the interpreter, or at the system's limit) the owner does all ranges.
            with contextlib.suppress(RuntimeError):
                for helper in _helpers(helpers):
                    started.append(helper)
                    # In a copy of the context variables, because NumPy keeps its error state (overflow, …) there.
                    helper.give(copy_context().run, self._help)
            self._finish()
        finally:
            # Helpers do not return themselves: they would need the interpreter, and the next job would miss them.
            with _pool_lock:
                _pool.free.extend(started)

    def _help(self, at_work: _Word) -> None:
        """Do ranges until none is left; :meth:`_finish` raises their errors."""
        busy = Lock()  # held while this helper works; :meth:`_finish` acquires it to wait for the end
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
                lo, hi = self._ranges.pop()
            except IndexError:
                return
            self._work(lo, hi)

    def _finish(self) -> None:
        """Do ranges, wait until all helpers are idle, and raise the first error.

        After this no helper uses the arrays, so they may be freed.
        """
        try:
            self._do()
        finally:
            self._ranges.clear()
            for busy, at_work in list(self._busy):
                at_work.look()
                busy.acquire()
            self._work = _nothing  # a helper that starts late holds no array
        if self._errors:
            raise self._errors[0]


def _nothing(lo: int, hi: int) -> None: ...


_TURNS_OF_LOOKS = 300
"""Polls before a thread sleeps: about 450 microseconds, longer than the gap between products of a small network. With
100 polls, an MLP's training step takes 98 % of the time that it takes without polling; with 300 polls, 91 to 95 %."""
_PAUSES = 300
"""Pauses between a seen change and the end of polling: about 10 microseconds, in which the notifying thread releases
the interpreter lock. A thread that asks for this lock earlier sleeps after all: without pauses a helper begins 60
microseconds after its call instead of 35."""


_BOX = 3
"""Words of the box after the other words, through which a spinning thread gets a message; its first is 1 while the
thread spins."""


class _Word:
    """A counter written by one thread and polled by another for a while before it sleeps on a lock.

    It is a hint: a change that comes too early, or never, costs only time, since the lock decides.
    """

    __slots__ = ("_words", "start")

    def __init__(self) -> None:
        self._words = (c_int64 * (4 + _BOX))(0, 0, _TURNS_OF_LOOKS, _PAUSES)
        self.start = addressof(self._words)

    @property
    def is_seen(self) -> bool:
        """Whether a thread is polling the word now and can get a message through the box."""
        return self._words[4] == 1

    def begin(self) -> None:
        """Poll for changes from now on; ignore earlier changes."""
        self._words[1] = self._words[0]

    def change(self) -> None:
        """Notify the polling thread that the lock is free."""
        self._words[0] += 1

    def look(self) -> None:
        """Poll until shortly after a change, or for a limited time; return immediately without compiled polling."""
        look = None if slots.POLLING.value is None else slots.POLLING.value()
        if look is not None:
            look(self.start)


_pool_lock = consistent_in_children(Lock())
"""Guards ``_pool``. Helpers get their work after it is released, so a thread holds it for a few list operations
only."""


class _Pool:
    """The helpers of this process, under ``_pool_lock``."""

    def __init__(self) -> None:
        self.lent = 0
        """Helpers that running splits have reserved."""
        self.free: list[_Helper] = []
        """Helpers that no job has reserved."""
        self.started = 0


_pool = _Pool()


class _Helper:
    """A thread that sleeps until it gets a task.

    Invariant: a task of a finished job does nothing, so only the last task matters.
    """

    __slots__ = ("_at_work", "_lent", "_park", "_task")

    def __init__(self, number: int) -> None:
        self._at_work, self._lent = _Word(), _Word()
        # A binary semaphore on which the helper sleeps; the thread with a task for it releases it.
        self._park = threading.Lock()
        self._park.acquire()
        self._task: deque[tuple[Callable[..., object], Callable[[_Word], None]]] = deque(maxlen=1)
        threading.Thread(target=self._live, name=f"weftplan helper {number}", daemon=True).start()

    @property
    def looks(self) -> bool:
        """Whether the helper is spinning, waiting for a task."""
        return self._lent.is_seen

    @property
    def words(self) -> int:
        """The address of the words that the helper polls."""
        return self._lent.start

    def give(self, run: Callable[..., object], work: Callable[[_Word], None]) -> None:
        """Hand the helper the task ``run(work, at_work)``, which raises nothing and changes the word at its end.

        The caller must have taken the helper out of ``_pool.free``.
        """
        self._task.append((run, work))
        with contextlib.suppress(RuntimeError):  # the helper has not reached its previous task yet
            self._park.release()
        self._lent.change()

    def _live(self) -> None:
        blas_threads.enter_worker()
        while True:
            self._lent.look()
            self._park.acquire()
            self._lent.begin()
            with contextlib.suppress(IndexError):  # the task is done already
                run, work = self._task.popleft()
                run(work, self._at_work)
                del run, work  # hold no reference while asleep


def _helpers(count: int) -> list[_Helper]:
    """Take up to ``count`` free helpers; start new threads while the pool has fewer than ``count`` in all.

    Raises:
        RuntimeError: no thread can be started.
    """
    with _pool_lock:
        while len(_pool.free) < count and _pool.started < count:
            _pool.free.append(_Helper(_pool.started))
            _pool.started += 1
        helpers = _pool.free[:count]
        del _pool.free[:count]
        return helpers


def _forget_helpers() -> None:
    """Clear the pool in a forked child, which has none of the threads; new helpers start on demand."""
    _pool.free.clear()
    _pool.lent = _pool.started = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)
