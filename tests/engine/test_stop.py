"""``stop`` during pushes of other threads: it returns, pushed operations run, and no thread remains."""

import sys
import threading
import time

import pytest

from weftplan import engine

KINDS = ("ThreadedEngine", "ThreadedEnginePerDevice")


@pytest.mark.parametrize("kind", KINDS)
def test_push_while_stop_removes_the_queues(kind, monkeypatch):
    """Operations in a queue that ``stop`` has removed still run, and the queue's threads end."""
    eng = engine.create(kind, cpu_workers=4)
    a, b, c = (eng.new_variable() for _ in range(3))
    begun, gate, ran = threading.Event(), threading.Event(), []
    eng.push(lambda: (begun.set(), gate.wait()), (), [a])
    assert begun.wait(60)
    monkeypatch.setattr(eng, "_wait_idle", lambda timeout=-1: True)  # as if the pushes had come just after the wait
    queue = eng._plain_queues[engine.OprBlock]
    queue.looking = True
    eng.push(lambda: ran.append("b"), (), [b])
    eng.push(lambda: ran.append("c"), (), [c])
    stopping = threading.Thread(target=eng.stop, daemon=True)
    stopping.start()
    while eng._plain_queues:
        time.sleep(0.001)
    gate.set()
    stopping.join(60)
    assert not stopping.is_alive()
    assert sorted(ran) == ["b", "c"]
    assert not any(thread.is_alive() for thread in queue.started)


@pytest.mark.parametrize("kind", KINDS)
def test_stop_under_load(kind, switch_often):
    """Two threads push and wait while a third stops the engine repeatedly; all operations run."""
    eng = engine.create(kind, cpu_workers=4)
    over, waited, begun = threading.Event(), [], threading.Barrier(3, timeout=60)

    def push_and_wait():
        mine = [eng.new_variable() for _ in range(4)]
        begun.wait()
        while True:
            for var in mine:
                eng.push(lambda: None, (), [var])
            eng.wait_for_var(mine[0])
            if over.is_set():
                break
        eng.wait_for_all()
        waited.append(all(var.version == mine[0].version > 0 for var in mine))

    def stop():
        begun.wait()
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            eng.stop()
        over.set()

    threads = [threading.Thread(target=target, daemon=True) for target in (push_and_wait, push_and_wait, stop)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert waited == [True, True]
    eng.stop()


@pytest.fixture
def switch_often():
    """Let the interpreter switch threads every 10 microseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
