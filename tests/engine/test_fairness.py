"""Fairness: no thread serves the requests of all others for long, and a limit on pending operations delays pushes."""

import threading

import pytest

from tests.contract.engines import together
from weftplan import engine
from weftplan.engine import region, waiting
from weftplan.engine.edges import forking
from weftplan.errors import EngineError

KINDS = ("ThreadedEngine", "ThreadedEnginePerDevice")


@pytest.mark.parametrize("kind", KINDS)
def test_region_is_left_during_a_request_storm(kind, monkeypatch):
    """A thread inside the region leaves it after MAX_SERVED requests, although new requests keep coming.

    After the limit it gives the token back and sleeps; then another thread can take the token.
    """
    eng = engine.create(kind, cpu_workers=1)
    busy, gate = threading.Event(), threading.Event()
    eng.push(lambda: (busy.set(), gate.wait(60)))  # a running worker would add requests
    assert busy.wait(60)
    monkeypatch.setattr(eng, "_dispatch", dispatch := Storm(eng))
    pauses = []

    def another_comes(seconds):
        pauses.append(dispatch.left)
        dispatch.left = 0
        gate.set()

    monkeypatch.setattr(region, "sleep", another_comes)
    eng.push(lambda: None)
    assert pauses == [10_000 - region.MAX_SERVED]
    eng.wait_for_all()
    eng.stop()


class Storm:
    """Replacement of ``_dispatch`` that also pushes one more operation each time, as other threads would."""

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
def make_bounded_engine(monkeypatch):
    """Return a function that creates an engine with at most eight pending operations."""
    monkeypatch.setenv("WEFTPLAN_ENGINE_MAX_PENDING", "8")
    return lambda kind, **options: engine.create(kind, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.shows("WEFTPLAN_ENGINE_MAX_PENDING")
def test_push_waits_at_the_pending_limit(make_bounded_engine, kind):
    """A push waits while eight operations are pending; four pushing threads may exceed the limit by one each."""
    eng = make_bounded_engine(kind, cpu_workers=1)
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
def test_push_below_the_limit_does_not_wait(make_bounded_engine, kind):
    """Eight operations that wait for a gate are pushed without a wait."""
    eng, gate = make_bounded_engine(kind, cpu_workers=1), threading.Event()
    pushing = threading.Thread(target=lambda: [eng.push(gate.wait) for _ in range(8)])
    pushing.start()
    pushing.join(20)
    waited = pushing.is_alive()
    gate.set()
    pushing.join()
    eng.stop()
    assert not waited


@pytest.mark.parametrize("kind", KINDS)
def test_unserved_requests_count_towards_the_limit(make_bounded_engine, kind, monkeypatch):
    """Requests that no thread has served yet count as pending, so the limit holds."""
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.02)  # shorten the time until waiting pushes check again
    eng = make_bounded_engine(kind, cpu_workers=1)
    var, ran = eng.new_variable(), []
    forking.seize(eng)  # as if the system had descheduled a thread inside
    pushing = [
        threading.Thread(target=lambda: [eng.push(lambda: ran.append(1), (), [var]) for _ in range(200)])
        for _ in range(4)
    ]
    for thread in pushing:
        thread.start()
    for thread in pushing:
        thread.join(0.05)  # too short for a push that waits, long enough for one that does not
    left = len(eng._region.requests)
    forking.leave(eng)
    for thread in pushing:
        thread.join()
    eng.wait_for_all()
    assert left <= 8 + 4
    assert len(ran) == 800
    eng.stop()


@pytest.mark.parametrize("wait", ["settle", "_wait_idle"])
def test_timed_wait_checks_repeatedly(wait, monkeypatch):
    """A timed wait checks again after each PATIENCE_S, so it notices an operation that ends after its first check.

    Repeated checks also let a Ctrl-C that comes just before Python blocks take effect; this is not tested here.
    """
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
def test_pushes_inside_operations_never_wait(make_bounded_engine, kind):
    """A push inside an operation never waits: the operation itself is pending, so the wait might not end."""
    eng = make_bounded_engine(kind, cpu_workers=1)
    var, ran = eng.new_variable(), []

    def outer():
        for i in range(50):
            eng.push(lambda i=i: ran.append(i), (), [var])

    eng.push(outer)
    eng.wait_for_all()
    assert ran == list(range(50))
    eng.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_limit_no_push_waits(kind):
    """By default no push waits: more than 900 operations may be pending."""
    eng = engine.create(kind, cpu_workers=1)
    gate = threading.Event()
    eng.push(gate.wait)
    for _ in range(1000):
        eng.push(lambda: None)
    assert eng.statistics().pending > 900
    gate.set()
    eng.stop()


@pytest.mark.parametrize("kind", ["NaiveEngine", *KINDS, "Simulator"])
def test_a_push_inside_the_region_does_not_wait(make_bounded_engine, kind, monkeypatch):
    """A push from inside the region does not wait, because it would wait for its own thread."""
    eng = make_bounded_engine(kind)
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
