"""Forks of busy processes: bulks, engines created meanwhile, concurrent forks, Ctrl-C during the wait for idleness."""

import os
import threading

import pytest

from tests.engine.test_fork import check_in_child, run_forking_program
from weftplan import engine
from weftplan.engine.edges import forking
from weftplan.errors import EngineError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
KINDS = ("ThreadedEngine", "ThreadedEnginePerDevice")


@pytest.mark.parametrize("kind", [*KINDS, "Simulator"])
def test_bulk_members_run_once_across_fork(kind):
    """Bulk members run once in total: the forking thread's before the fork, another thread's later in the parent."""
    eng = engine.create(kind)
    var, (read, write) = eng.new_variable(), os.pipe()
    collected, go = threading.Event(), threading.Event()

    def collect():
        eng.set_bulk_size(10)
        eng.push(lambda: os.write(write, b"b"), (), [var])
        collected.set()
        go.wait(60)

    def goes_on():
        assert var.version == 2
        eng.wait_for_all()
        return var.version == 2

    thread = threading.Thread(target=collect)
    thread.start()
    assert collected.wait(60)
    with eng.bulk(10):
        eng.push(lambda: os.write(write, b"a"), (), [var])
        eng.push(lambda: os.write(write, b"a"), (), [var])
        check_in_child(goes_on)
    go.set()
    thread.join(60)
    eng.wait_for_all()
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"aab"
    eng.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_engine_created_during_fork(kind):
    """A child can use an engine that another thread created while the fork waited for a first engine.

    The child must not rely on the second engine's threads, because they do not exist there.
    """
    eng, result = engine.create(kind, cpu_workers=1), []
    stop = eng.stop

    def make():
        late = engine.create(kind, cpu_workers=1)
        var = late.new_variable()
        late.push(lambda: None, (), [var])
        late.wait_for_var(var)
        result.append((late, var))

    def stop_while_another_makes_one():
        stop()
        thread = threading.Thread(target=make)
        thread.start()
        thread.join(60)

    def goes_on():
        [(late, var)] = result
        late._waiters_help = "0"
        late.push(lambda: None, (), [var])
        late.wait_for_var(var)
        return var.version == 2

    eng.stop = stop_while_another_makes_one
    check_in_child(goes_on)
    del eng.stop
    goes_on()
    result[0][0].stop()
    eng.stop()


@pytest.mark.parametrize("busy", [False, True])
def test_engine_missed_by_the_fork(monkeypatch, busy):
    """In a child, an engine that the fork missed runs operations if it was idle; else its calls raise EngineError."""
    eng, gate = engine.create("ThreadedEngine", cpu_workers=1), threading.Event()
    var, real = eng.new_variable(), forking.engines
    eng.push(lambda: None, (), [var])
    eng.wait_for_var(var)
    if busy:
        eng.push(lambda: gate.wait(60), (), [var])
    monkeypatch.setattr(forking, "engines", lambda: [e for e in real() if forking.process.in_child or e is not eng])

    def goes_on():
        eng._waiters_help = "0"
        if not busy:
            eng.push(lambda: None, (), [var])
            eng.wait_for_var(var)
            return var.version == 2
        for verb in (lambda: eng.push(lambda: None), lambda: eng.wait_for_var(var), eng.wait_for_all):
            with pytest.raises(EngineError, match="forked before it was idle"):
                verb()
        return True

    check_in_child(goes_on)
    gate.set()
    eng.wait_for_all()
    assert var.version == 1 + busy
    eng.stop()


def test_ctrl_c_ends_the_wait_before_fork():
    """Ctrl-C ends a fork's wait for a busy engine; the interrupt is raised in the parent after the fork.

    In the child, a wait on the busy engine raises EngineError; the other engines run operations. In the parent all do.
    """
    assert run_forking_program("""
        import os, signal, threading, time
        from weftplan import engine
        from weftplan.errors import EngineError

        signal.signal(signal.SIGINT, signal.default_int_handler)
        idle, busy, new = (engine.create("ThreadedEngine", cpu_workers=1) for _ in range(3))
        gate, variables = threading.Event(), [eng.new_variable() for eng in (idle, busy, new)]
        for eng, var in zip((idle, busy, new), variables):
            eng.push(lambda: None, (), [var])
            eng.wait_for_var(var)
        busy.push(gate.wait, (), variables[1:2])
        parent = os.getpid()

        def interrupt():
            while busy._fork.gate is None:
                time.sleep(0.001)
            os.kill(parent, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            os.fork()
        except KeyboardInterrupt:
            assert os.getpid() == parent
            print("interrupted", flush=True)
        if os.getpid() != parent:
            status = 1
            try:
                for eng, var in (idle, variables[0]), (new, variables[2]):
                    eng._waiters_help = "0"
                    eng.push(lambda: None, (), [var])
                    eng.wait_for_var(var)
                try:
                    busy.wait_for_var(variables[1])
                except EngineError as error:
                    assert "before it was idle" in str(error)
                    status = 0
            finally:
                os._exit(status)
        print(os.wait()[1])
        gate.set()
        for eng in (idle, busy, new):
            assert (eng._fork.gate, eng._fork.seizer, len(eng._region.token), eng._region.gate) == (None, None, 1, None)
        for eng, var in zip((idle, busy, new), variables):
            eng.push(lambda: None, (), [var])
            eng.wait_for_all()
            print(var.version)
    """).split() == ["interrupted", "0", "2", "3", "2"]


def test_two_threads_fork_concurrently(monkeypatch):
    """If two threads fork at the same time, every child can run operations on all engines, and neither thread hangs."""
    monkeypatch.setattr(forking, "_GATE_S", 3600)
    engines = [engine.create(kind, cpu_workers=1) for kind in KINDS for _ in range(2)]
    variables = [eng.new_variable() for eng in engines]
    failures = []

    def goes_on():
        for eng, var in zip(engines, variables, strict=True):
            eng._waiters_help = "0"
            before = var.version
            eng.push(lambda: None, (), [var])
            eng.wait_for_var(var)
            assert var.version == before + 1
        return True

    def work():
        try:
            for _ in range(10):
                for eng, var in zip(engines, variables, strict=True):
                    eng.push(lambda: None, (), [var])
                check_in_child(goes_on)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    for eng, var in zip(engines, variables, strict=True):
        eng.wait_for_all()
        assert (var.version, len(eng._region.token), eng._fork.gate) == (20, 1, None)
        eng.stop()
