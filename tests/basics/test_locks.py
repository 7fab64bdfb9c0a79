"""Locks of the package: an interrupt leaves them free, and a forked child finds them free."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest

from weftplan import locks
from weftplan.locks import Lock, ReentrantLock, consistent_in_children, free_in_children


def test_lock_excludes_and_is_not_reentrant():
    """A Lock is held between acquire and release or inside ``with``, also if an error ends it; it is not reentrant."""
    lock = Lock()
    with lock:
        assert lock.locked()
        assert not lock.acquire(blocking=False)
    assert lock.acquire(blocking=False)
    assert not lock.acquire(blocking=False)
    lock.release()
    assert lock.acquire()
    lock.release()
    with pytest.raises(ZeroDivisionError), lock:
        1 / 0  # noqa: B018
    assert not lock.locked()


def test_reentrant_lock_is_reentrant():
    """A thread can acquire its ReentrantLock repeatedly; other threads get it after the last release."""
    lock, got = ReentrantLock(), []

    def other():
        got.append(lock.acquire(blocking=False))
        if got[-1]:
            lock.release()

    def ask():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return got[-1]

    with lock:
        with lock:
            assert lock.acquire(blocking=False)
            lock.release()
            assert not ask()
        assert not ask()
    assert ask()


@pytest.mark.parametrize("make", [Lock, ReentrantLock])
def test_lock_excludes_threads(make):
    """Four threads that each increment a counter 5,000 times under the lock lose no increment."""
    lock, count = make(), [0]

    def work():
        for _ in range(5000):
            with lock:
                value = count[0]
                for _ in range(3):
                    pass
                count[0] = value + 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count == [20_000]


WORK = {
    "entering": """
        with lock:
            len("")
    """,
    "trying": """
        if lock.acquire(blocking=False):
            try:
                len("")
            finally:
                lock.release()
    """,
    "waiting": """
        lock.acquire()
        try:
            len("")
        finally:
            lock.release()
    """,
}

SCRIPT = """
import random, signal
import threading
from weftplan.locks import Lock, ReentrantLock

def work(lock):
    while True:WORK

def handler(*_):
    raise KeyboardInterrupt

lock, draw, free = MAKE(), random.Random(1), []

def look():
    while True:
        asked.acquire()
        free.append(lock.acquire(blocking=False) and lock.release() is None)
        told.release()

asked, told = threading.Lock(), threading.Lock()
asked.acquire()
told.acquire()
threading.Thread(target=look, daemon=True).start()
signal.signal(signal.SIGALRM, handler)
for number in range(2000):
    try:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(2e-5, 2e-4))
        work(lock)
    except KeyboardInterrupt:
        pass
    asked.release()
    told.acquire()
    assert free.pop(), f"signal {number} left the lock taken"
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers that send signals")
@pytest.mark.parametrize("make", ["Lock", "ReentrantLock"])
@pytest.mark.parametrize("work", WORK)
def test_interrupt_leaves_the_lock_free(work, make):
    """After each of 2,000 signals in a loop that acquires and releases the lock, the lock is free."""
    command = [sys.executable, "-c", SCRIPT.replace("WORK", WORK[work]).replace("MAKE", make)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]


def in_child(check):
    """Return the result of ``check()``, a number below 128, in a forked child; None if the child hangs for a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about forks of multi-threaded processes
        pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os._exit(int(check()))
    status = os.waitpid(pid, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


class Holder(threading.Thread):
    """A thread that holds a lock between the two steps of a change, until ``go`` is set."""

    def __init__(self, lock):
        super().__init__()
        self.lock, self.steps = lock, 0
        self.halfway, self.go = threading.Event(), threading.Event()

    def run(self):
        with self.lock:
            self.steps += 1
            self.halfway.set()
            self.go.wait(60)
            self.steps += 1


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@needs_fork
@pytest.mark.parametrize("make", [Lock, ReentrantLock])
def test_a_fork_waits_for_the_holder(make):
    """A fork waits for a thread that holds the lock: the child sees its complete change and a free lock."""
    holder = Holder(consistent_in_children(make()))
    holder.start()
    assert holder.halfway.wait(60)
    threading.Timer(0.05, holder.go.set).start()
    assert in_child(lambda: holder.steps if holder.lock.acquire(blocking=False) else 100) == 2
    holder.join()
    assert holder.lock.acquire(blocking=False)


@needs_fork
@pytest.mark.parametrize("keep", [free_in_children, consistent_in_children])
def test_endless_holder_does_not_hang_a_child(keep):
    """If a thread holds a lock for long, a forked child still gets it free, and the parent's lock stays held."""
    holder = Holder(keep(Lock()))
    holder.start()
    assert holder.halfway.wait(60)
    assert in_child(lambda: holder.lock.acquire(blocking=False)) == 1
    assert holder.lock.locked()
    holder.go.set()
    holder.join()
    assert not holder.lock.locked()


@needs_fork
def test_a_fork_under_its_own_lock():
    """A thread that holds locks may fork; they are free in the child."""
    plain, repeated = consistent_in_children(Lock()), consistent_in_children(ReentrantLock())
    with plain, repeated:
        assert in_child(lambda: plain.acquire(blocking=False) and repeated.acquire(blocking=False)) == 1
        assert plain.locked()
    assert not plain.locked()


@needs_fork
def test_fork_and_a_thread_with_two_locks():
    """Forking does not deadlock with a thread that acquires one lock while it holds another."""
    one, two = consistent_in_children(Lock()), consistent_in_children(Lock())
    stop, rounds = threading.Event(), [0]

    def work(first, second):
        while not stop.is_set():
            with first:
                time.sleep(0)
                with second:
                    rounds[0] += 1

    def fork():
        for _ in range(10):
            seen.append(in_child(lambda: one.acquire(blocking=False) and two.acquire(blocking=False)))

    seen = []
    thread = threading.Thread(target=work, args=(one, two))
    thread.start()
    fork()
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert seen == [1] * 10
    assert rounds[0] > 0


@needs_fork
def test_two_threads_fork_concurrently():
    """Two threads that fork at the same time both get children with a free lock."""
    lock, seen = consistent_in_children(Lock()), []
    threads = [
        threading.Thread(target=lambda: seen.extend(in_child(lambda: lock.acquire(blocking=False)) for _ in range(10)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1] * 20
    assert not lock.locked()


def test_dropped_lock_is_forgotten():
    """A lock that is deleted is removed from the set of locks that a fork acquires."""
    lock = consistent_in_children(Lock())
    assert lock in locks._consistent
    before = len(locks._consistent)
    del lock
    assert len(locks._consistent) == before - 1


def test_members_of_a_set_that_another_thread_changes():
    """``members`` of a set that grows during iteration reads the set again."""

    class Item:
        pass

    held = [Item(), Item()]

    class Growing(weakref.WeakSet):
        reads = 0

        def __iter__(self):
            Growing.reads += 1
            for item in super().__iter__():
                if Growing.reads == 1:
                    held.append(Item())
                    self.data.add(weakref.ref(held[-1]))
                yield item

    items = locks.members(Growing(held))
    assert Growing.reads == 2
    assert set(items) == set(held)
    assert len(held) == 3
