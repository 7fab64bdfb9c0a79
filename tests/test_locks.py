"""The lock of the package under signals: whoever is interrupted leaves it free."""

import signal
import subprocess
import sys
import threading

import pytest

from weftplan.locks import Lock, ReentrantLock


def test_it_excludes_and_is_not_reentrant():
    """As a lock does: taken by ``with`` or ``acquire``, free afterwards, also after an error."""
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


def test_its_thread_may_take_the_reentrant_one_again():
    """Others get it when it has been released as often."""
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
def test_threads_take_turns(make):
    """Four threads count to 20,000 together; each reads, gives way, writes."""
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
def test_an_interrupt_leaves_it_free(work, make):
    """2,000 signals anywhere in a loop that does little but take the lock and let it go, in a process of its own."""
    command = [sys.executable, "-c", SCRIPT.replace("WORK", WORK[work]).replace("MAKE", make)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
