"""No thread serves all the others for long, and a bound keeps pushes from running away from the workers."""

import threading

import pytest

from tests.contract.engines import together
from weftplan import engine
from weftplan.engine import region, waiting
from weftplan.engine.edges import forking
from weftplan.errors import EngineError

KINDS = ("ThreadedEngine", "ThreadedEnginePerDevice")


@pytest.mark.parametrize("kind", KINDS)
def test_the_region_is_left_in_the_middle_of_a_storm(kind, monkeypatch):
    """
    1. the thread inside finds a new request after each that it carries out, for ever
    2. after so many it gives the token back and lets others run
    3. one of them comes, finds the token, and the first has nothing more to do
    """
    eng = engine.create(kind, cpu_workers=1)
    busy, gate = threading.Event(), threading.Event()
    eng.push(lambda: (busy.set(), gate.wait(60)))  # or the worker's requests count, too
    assert busy.wait(60)
    monkeypatch.setattr(eng, "_dispatch", dispatch := Storm(eng))
    pauses = []

    def another_comes(seconds):
        pauses.append(dispatch.left)
        dispatch.left = 0
        gate.set()

    monkeypatch.setattr(region, "sleep", another_comes)
    eng.push(lambda: None)
    assert pauses == [10_000 - region.MOST_AT_ONCE]
    eng.wait_for_all()
    eng.stop()


class Storm:
    """Dispatches, and pushes one more each time, as other threads would."""

    def __init__(self, eng):
        self.engine = eng
        self.dispatch = eng._dispatch
        self.left = 10_000

    def __call__(self):
        self.dispatch()
        if self.left:
            self.left -= 1
            self.engine.push(lambda: None)


@pytest.fixture
def bounded(monkeypatch):
    """Makes engines with at most eight pending operations."""
    monkeypatch.setenv("WEFTPLAN_ENGINE_MAX_PENDING", "8")
    return lambda kind, **options: engine.create(kind, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.shows("WEFTPLAN_ENGINE_MAX_PENDING")
def test_a_push_waits_while_too_many_are_pending(bounded, kind):
    """From one thread and from four; the bound is that of each thread's push, so a push of each may come on top."""
    eng = bounded(kind, cpu_workers=1)
    var, most = eng.new_variable(), []

    def load():
        for _ in range(200):
            eng.push(lambda: most.append(eng._region.pending), (), [var])

    load()
    eng.wait_for_all()
    assert max(most) <= 8
    most.clear()
    together(load, 4)
    eng.wait_for_all()
    assert len(most) == 800
    assert max(most) <= 8 + 4
    eng.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_pushes_wait_while_the_thread_inside_is_held_up(bounded, kind, monkeypatch):
    """What nobody has carried out counts as pending: the bound holds although nothing is admitted meanwhile."""
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.02)  # until they look again for what nobody has carried out
    eng = bounded(kind, cpu_workers=1)
    var, ran = eng.new_variable(), []
    forking.seize(eng)  # as if the system had taken the processor away from a thread that is inside
    pushing = [
        threading.Thread(target=lambda: [eng.push(lambda: ran.append(1), (), [var]) for _ in range(200)])
        for _ in range(4)
    ]
    for thread in pushing:
        thread.start()
    for thread in pushing:
        thread.join(0.05)  # too little for what must wait, enough for what would not
    left = len(eng._region.requests)
    forking.leave(eng)
    for thread in pushing:
        thread.join()
    eng.wait_for_all()
    assert left <= 8 + 4
    assert len(ran) == 800
    eng.stop()


@pytest.mark.parametrize("wait", ["settle", "_wait_idle"])
def test_a_wait_with_a_limit_looks_again_as_one_without(wait, monkeypatch):
    """It is in pieces, too: here the operation ends only when the wait has looked a second time. So Ctrl-C that comes
    just before Python blocks, and does not wake it, is noticed after a piece and not at the end of the limit."""
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.02)
    eng, go, looks = engine.create("ThreadedEngine", cpu_workers=1), threading.Event(), []

    def look():
        looks.append(1)
        if len(looks) == 2:
            go.set()

    monkeypatch.setattr(eng, "_look_after_workers", look)
    eng.push(lambda: go.wait(60), (), [eng.new_variable()])
    assert getattr(eng, wait)(60)
    assert len(looks) >= 2
    eng.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_pushes_inside_operations_never_wait(bounded, kind):
    """The operation itself is pending, so it might wait for ever."""
    eng = bounded(kind, cpu_workers=1)
    var, ran = eng.new_variable(), []

    def outer():
        for i in range(50):
            eng.push(lambda i=i: ran.append(i), (), [var])

    eng.push(outer)
    eng.wait_for_all()
    assert ran == list(range(50))
    eng.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_bound_nobody_waits(kind):
    """The default."""
    eng = engine.create(kind, cpu_workers=1)
    gate = threading.Event()
    eng.push(gate.wait)
    for _ in range(1000):
        eng.push(lambda: None)
    assert eng.statistics().pending > 900
    gate.set()
    eng.stop()


@pytest.mark.parametrize("kind", ["NaiveEngine", *KINDS, "Simulator"])
def test_a_push_inside_the_region_does_not_wait(bounded, kind, monkeypatch):
    """A destructor's, which would wait for the thread that it has interrupted."""
    eng = bounded(kind)
    dispatch, ran = eng._dispatch, []

    def interrupted():
        monkeypatch.setattr(eng, "_dispatch", dispatch)
        for i in range(20):
            eng.push(lambda i=i: ran.append(i))
        dispatch()

    monkeypatch.setattr(eng, "_dispatch", interrupted)
    eng.push(lambda: None)
    try:
        eng.wait_for_all()
    except EngineError as error:  # pragma: no cover
        pytest.fail(str(error))
    assert sorted(ran) == list(range(20))
    eng.stop()
