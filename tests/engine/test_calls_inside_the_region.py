"""Calls by destructors and signal handlers while their thread is inside the engine's region may push but not wait."""

import sys
import threading
import time

import pytest

from weftplan import engine
from weftplan.engine.operation import Waiter
from weftplan.errors import EngineError

KINDS = ("NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator")

WAITS = {
    "wait_for_var": lambda eng, var: eng.wait_for_var(var),
    "wait_for_all": lambda eng, var: eng.wait_for_all(),
    "statistics": lambda eng, var: eng.statistics(),
    "dump": lambda eng, var: eng.dump(),
    "unobserved_failures": lambda eng, var: eng.unobserved_failures(),
    "stop": lambda eng, var: eng.stop(),
}


def call_inside(eng, monkeypatch, call):
    """Run ``call`` inside the region during the next change, like a destructor; return a list that gets its error."""
    dispatch, actual = eng._dispatch, []

    def interrupted():
        monkeypatch.setattr(eng, "_dispatch", dispatch)
        try:
            call()
        except BaseException as error:
            actual.append(error)
        dispatch()

    monkeypatch.setattr(eng, "_dispatch", interrupted)
    return actual


@pytest.fixture(params=KINDS)
def eng(request):
    """An engine of each kind."""
    eng = engine.create(request.param)
    yield eng
    eng.stop()


@pytest.mark.parametrize("name", WAITS)
def test_waits_inside_are_refused(eng, monkeypatch, name):
    """A wait inside the region raises EngineError, because the thread would wait for itself; the change completes."""
    if eng.kind in ("NaiveEngine", "Simulator") and name == "stop":
        pytest.skip("its stop waits for nothing that another thread does")
    var, ran = eng.new_variable(), []
    raised = call_inside(eng, monkeypatch, lambda: WAITS[name](eng, var))
    eng.push(lambda: ran.append(1), (), [var])
    eng.wait_for_all()
    assert [type(error) for error in raised] == [EngineError]
    assert "waited while the engine was in the middle of a change on this thread" in str(raised[0])
    assert ran == [1]
    assert eng.statistics().pushed == 1


def test_waits_on_another_engine_are_allowed(eng, monkeypatch):
    """Inside the region of one engine, waits for another engine return without an error."""
    other_engine = engine.create("ThreadedEnginePerDevice")
    theirs, var = other_engine.new_variable(), eng.new_variable()
    other_engine.push(lambda: None, (), [theirs])
    raised = call_inside(eng, monkeypatch, lambda: (other_engine.wait_for_var(theirs), other_engine.wait_for_all()))
    eng.push(lambda: None, (), [var])
    eng.wait_for_all()
    assert raised == []
    assert theirs.version == 1
    other_engine.stop()


def test_pushes_from_inside_run(eng, monkeypatch):
    """A push, an asynchronous push and a delete from inside the region run after the change, in order."""
    var, log = eng.new_variable(), []

    def destructor():
        eng.push(lambda: log.append("push"), (), [var])
        eng.push_async(lambda done: (log.append("async"), done()), (), [var])
        eng.delete_variable(var, lambda: log.append("delete"))

    raised = call_inside(eng, monkeypatch, destructor)
    eng.push(lambda: log.append("first"), (), [var])
    eng.wait_for_all()
    assert raised == []
    assert log == ["first", "push", "async", "delete"]


def test_pushes_from_inside_a_request_run(eng, monkeypatch):
    """An operation pushed from inside the region, during a request that is not a push, runs once."""
    var, log = eng.new_variable(), []
    apply = eng._exclusively

    def ask():
        apply(lambda: eng.push(lambda: log.append("push"), (), [var]))

    ask()
    eng.wait_for_var(var)
    assert log == ["push"]
    ask()
    eng.wait_for_all()
    assert log == ["push", "push"]
    assert eng.statistics().pushed == 2


@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
def test_another_thread_may_wait_while_one_is_inside(kind, monkeypatch):
    """Statistics and waits block while another thread is inside the region, and return after that thread leaves."""
    eng = engine.create(kind, cpu_workers=1)
    var, inside, go, answers, dispatch = eng.new_variable(), threading.Event(), threading.Event(), [], eng._dispatch

    def slow():
        monkeypatch.setattr(eng, "_dispatch", dispatch)
        inside.set()
        go.wait(60)
        dispatch()

    def ask():
        answers.append(eng.statistics().pushed)
        eng.wait_for_var(var)
        eng.wait_for_all()
        answers.append(var.version)

    monkeypatch.setattr(eng, "_dispatch", slow)
    pusher = threading.Thread(target=lambda: eng.push(lambda: None, (), [var]))
    pusher.start()
    assert inside.wait(60)
    asker = threading.Thread(target=ask)
    asker.start()
    asker.join(0.05)
    assert answers == []
    go.set()
    asker.join(60)
    pusher.join(60)
    assert answers == [1, 1]
    eng.stop()


def test_failed_change_raises_at_its_requester(eng):
    """A KeyError inside a request is raised on the requesting thread, and all operation counts stay zero."""

    def change():
        raise KeyError("in there")

    for _ in range(2):
        with pytest.raises(KeyError, match="in there"):
            eng._exclusively(change)
    assert eng._exclusively(lambda: eng._region.pending) == 0
    counts = eng.statistics()
    assert (counts.pushed, counts.completed, counts.pending) == (0, 0, 0)


def test_interrupt_after_a_change_does_not_repeat_it(eng):
    """A KeyboardInterrupt just after a change reaches its requester; it is made once, and requests still run."""
    changes = []

    def interrupt(frame, event, called):
        if event == "c_return" and frame.f_code.co_name == "make" and called.__name__ == "extend":
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            eng._exclusively(lambda: changes.append(1))
    finally:
        sys.setprofile(before)
    assert changes == [1]
    assert eng._exclusively(lambda: "answer") == "answer"
    counts = eng.statistics()
    assert (counts.pushed, counts.completed, counts.pending) == (0, 0, 0)


def test_counts_after_a_wait_include_no_pending(eng):
    """Counts requested by a thread that was woken from a wait show no pending operation."""
    counts = []
    thread = threading.Thread(target=lambda: counts.append(eng.statistics()), daemon=True)

    def wake():
        before = len(eng._region.requests)
        thread.start()
        while len(eng._region.requests) == before:
            time.sleep(0)

    eng._region.ask(eng, Waiter(wake, (), ()))
    thread.join(60)
    [actual] = counts
    assert (actual.pending, actual.pushed, actual.completed) == (0, 0, 0)
