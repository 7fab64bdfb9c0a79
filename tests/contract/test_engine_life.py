"""Engine contract: stop and start, threads, futures, the text of vars and engines, and ``engine.using``."""

import re
import threading
import time

import pytest

from tests.contract.engines import Boom, boom
from weftplan import engine
from weftplan.device.context import cpu


def test_stop_and_start(eng):
    """``stop`` waits for all operations; after ``start``, pushed operations run again."""
    var = eng.new_variable()
    for _ in range(3):
        for _ in range(10):
            eng.push(lambda: None, (), [var])
        eng.stop()
        eng.start()
    eng.push(lambda: None, (), [var])
    eng.wait_for_all()
    assert var.version == 31


def test_many_engines_leave_no_thread():
    """A hundred engines that were created, used and stopped leave no thread."""
    threads = set()
    for i in range(100):
        eng = engine.create("ThreadedEnginePerDevice", cpu_workers=2)
        eng.push(lambda: threads.add(threading.current_thread()), (), [eng.new_variable()], cpu(i % 3))
        eng.stop()
    threads.discard(threading.current_thread())
    assert len(threads) > 90
    assert not any(thread.is_alive() for thread in threads)


def test_future(deferred):
    """A future of a var is done when the var can be read, and raises its failure."""
    if deferred.kind == "Simulator":
        pytest.skip("nobody would run the simulator while the future is waited for")
    var = deferred.new_variable()
    deferred.push(lambda: time.sleep(0.01), (), [var])
    assert deferred.future(var).result(10) is var
    deferred.push(boom, (), [var])
    with pytest.raises(Boom):
        deferred.future(var).result(10)
    deferred.wait_for_all()


def test_repr_shows_the_state():
    """The text of a var shows its state, readers and waiting operations; that of an engine shows its counts."""
    eng = engine.create("Simulator")
    var = eng.new_variable("x")
    assert repr(var) == "<Var 'x' version 0: IDLE>"
    eng.push(lambda: None, [var])
    assert repr(var) == "<Var 'x' version 0: READING by 1>"
    eng.push(lambda: None, (), [var])
    eng.push(lambda: None, [var])
    assert repr(var) == "<Var 'x' version 0: DRAINING by 1, 1 waiting>"
    assert repr(eng) == "<Simulator: 3 pushed, 3 pending>"
    eng.wait_for_all()
    assert repr(var) == "<Var 'x' version 1: IDLE>"


def test_repr_counts_waiting_operations():
    """The text of a var counts only operations that still wait, whether the list of them was shortened or not."""
    eng = engine.create("Simulator")
    var, heads = eng.new_variable(), []
    for _ in range(100):
        eng.push(lambda: None, (), [var])
    for done in range(99):
        assert repr(var) == f"<Var version {done}: WRITING{f', {99 - done} waiting' if done < 99 else ''}>"
        assert eng.step()
        assert len(var.waiting) <= 99 - done + var.head
        assert var.head <= 50
        heads.append(var.head)
    assert max(heads) >= 32  # shortening the list each time would take quadratic time
    eng.wait_for_all()
    assert (var.waiting, var.head) == ([], 0)
    assert repr(var) == "<Var version 100: IDLE>"


def test_repr_of_failed_and_deleted_vars(deferred):
    """The text of a var shows that it has failed or was deleted."""
    var = deferred.new_variable("x")
    deferred.push(boom, (), [var], name="culprit")
    with pytest.raises(Boom):
        deferred.wait_for_all()
    assert re.fullmatch(
        r"<Var 'x' version 1: IDLE, failed: Boom: boom \(operation 'culprit', pushed at .*\)>", repr(var)
    )
    deferred.delete_variable(var)
    deferred.wait_for_all()
    assert repr(var).startswith("<Var 'x' version 2: IDLE, deleted, failed: Boom")


def test_using_an_engine_for_a_while(deferred):
    """Inside ``engine.using(eng)``, ``eng`` is the process-wide engine.

    At the end of the block its operations have ended, its failures are raised, and the previous engine is restored in
    any case.
    """
    before, var = engine.get(), deferred.new_variable()
    with engine.using(deferred) as inside:
        assert inside is engine.get() is deferred
        deferred.push(lambda: time.sleep(0.02), (), [var])
    assert (var.version, engine.get()) == (1, before)

    def fails():
        with engine.using(deferred):
            deferred.push(boom)

    def leaves():
        with engine.using(deferred):
            raise KeyError

    for call, error in ((fails, Boom), (leaves, KeyError)):
        with pytest.raises(error):
            call()
        assert engine.get() is before
