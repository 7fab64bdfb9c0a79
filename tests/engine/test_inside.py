"""What destructors and signal handlers may do while their thread is inside the region: push, and not wait."""

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


def from_inside(eng, monkeypatch, call):
    """Let ``call`` be made in the middle of the next change, as by a destructor; returns what it raised."""
    dispatch, found = eng._dispatch, []

    def interrupted():
        monkeypatch.setattr(eng, "_dispatch", dispatch)
        try:
            call()
        except BaseException as error:
            found.append(error)
        dispatch()

    monkeypatch.setattr(eng, "_dispatch", interrupted)
    return found


@pytest.fixture(params=KINDS)
def eng(request):
    """An engine of each kind."""
    made = engine.create(request.param)
    yield made
    made.stop()


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_refused(eng, monkeypatch, name):
    """They could only wait for themselves: an error says so, and the engine goes on as if nothing had been asked."""
    if eng.kind in ("NaiveEngine", "Simulator") and name == "stop":
        pytest.skip("its stop waits for nothing that another thread does")
    var, ran = eng.new_variable(), []
    found = from_inside(eng, monkeypatch, lambda: WAITS[name](eng, var))
    eng.push(lambda: ran.append(1), (), [var])
    eng.wait_for_all()
    assert [type(error) for error in found] == [EngineError]
    assert "waited while the engine was in the middle of a change on this thread" in str(found[0])
    assert ran == [1]
    assert eng.statistics().pushed == 1


def test_waits_on_another_engine_are_fine(eng, monkeypatch):
    """Only this engine is in the middle of a change."""
    other = engine.create("ThreadedEnginePerDevice")
    theirs, var = other.new_variable(), eng.new_variable()
    other.push(lambda: None, (), [theirs])
    found = from_inside(eng, monkeypatch, lambda: (other.wait_for_var(theirs), other.wait_for_all()))
    eng.push(lambda: None, (), [var])
    eng.wait_for_all()
    assert found == []
    assert theirs.version == 1
    other.stop()


def test_pushes_are_taken(eng, monkeypatch):
    """A push, an asynchronous one and a delete from inside run after the change, in order."""
    var, log = eng.new_variable(), []

    def destructor():
        eng.push(lambda: log.append("push"), (), [var])
        eng.push_async(lambda done: (log.append("async"), done()), (), [var])
        eng.delete_variable(var, lambda: log.append("delete"))

    found = from_inside(eng, monkeypatch, destructor)
    eng.push(lambda: log.append("first"), (), [var])
    eng.wait_for_all()
    assert found == []
    assert log == ["first", "push", "async", "delete"]


def test_pushes_from_inside_a_question(eng, monkeypatch):
    """The thread is inside for a wait or to count, not for a push: what comes from inside runs all the same."""
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
def test_another_thread_may_wait_meanwhile(kind, monkeypatch):
    """It is not inside: its questions are answered when the one inside has finished."""
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


def test_a_change_that_raises(eng):
    """Whoever asked for it gets the error, and nobody else; what is counted stays right."""

    def change():
        raise KeyError("in there")

    for _ in range(2):
        with pytest.raises(KeyError, match="in there"):
            eng._exclusively(change)
    assert eng._exclusively(lambda: eng._region.pending) == 0
    counts = eng.statistics()
    assert (counts.pushed, counts.completed, counts.pending) == (0, 0, 0)


def test_an_interrupt_just_after_a_change(eng):
    """The change is made once, whoever asked gets the interrupt, and the next one gets an answer."""
    made = []

    def interrupt(frame, event, called):
        if event == "c_return" and frame.f_code.co_name == "make" and called.__name__ == "extend":
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            eng._exclusively(lambda: made.append(1))
    finally:
        sys.setprofile(before)
    assert made == [1]
    assert eng._exclusively(lambda: "answer") == "answer"
    counts = eng.statistics()
    assert (counts.pushed, counts.completed, counts.pending) == (0, 0, 0)


def test_what_is_counted_by_a_thread_that_has_just_been_woken(eng):
    """
    1. the thread inside wakes a waiting one  2. that one asks for counts  3. the thread inside goes on: the wait is
    over before it answers, so that nothing is pending after a wait.
    """
    counts = []
    thread = threading.Thread(target=lambda: counts.append(eng.statistics()), daemon=True)

    def wake():
        before = len(eng._region.requests)
        thread.start()
        while len(eng._region.requests) == before:
            time.sleep(0)

    eng._region.ask(eng, Waiter(wake, (), ()))
    thread.join(60)
    [found] = counts
    assert (found.pending, found.pushed, found.completed) == (0, 0, 0)
