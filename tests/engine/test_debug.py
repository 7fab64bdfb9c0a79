"""Debug mode: the watchdog, complete dumps, read-only views of inputs, and stale operators."""

import threading
import time
import weakref

import numpy as np
import pytest

import weftplan as mx
from weftplan import engine
from weftplan.engine.debug import _watch, report
from weftplan.errors import EngineError, UndeclaredWriteError


@pytest.fixture
def debug(monkeypatch):
    """Enable debug mode, and let the watchdog report after 0.25 seconds without progress."""
    monkeypatch.setenv("WEFTPLAN_ENGINE_DEBUG", "1")
    monkeypatch.setenv("WEFTPLAN_ENGINE_WATCHDOG_S", "0.25")


def stuck_here(gate):
    """Wait at the gate; the watchdog must report this function."""
    gate.wait(60)


def until(condition):
    """Wait until ``condition()`` is true, at most a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_watchdog_names_stuck_operations(debug, capfd):
    """The watchdog reports a standstill once: waiting operations, their vars, the holders and the thread's stack."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    a, gate, told = eng.new_variable("weights"), threading.Event(), []
    eng.push(lambda: stuck_here(gate), (), [a], name="slow load")
    eng.push(lambda: None, [a], (), name="use")
    until(lambda: told.append(capfd.readouterr().err) or "watchdog" in "".join(told))
    time.sleep(0.6)
    text = "".join(told) + capfd.readouterr().err
    gate.set()
    eng.wait_for_all()
    assert text.count("watchdog: no operation has finished for 0.25 s") == 1
    assert "'use'" in text
    assert "for <Var 'weights' version 0: WRITING, 1 waiting>, held by #1 'slow load'" in text
    assert "operation #1 'slow load' runs on thread 'weftplan cpu(0) worker 0'" in text
    assert "in stuck_here" in text
    eng.stop()


@pytest.mark.parametrize(
    ("variables", "watched"),
    [
        ({}, False),
        ({"WEFTPLAN_ENGINE_DEBUG": "1"}, True),
        ({"WEFTPLAN_ENGINE_WATCHDOG_S": "5"}, True),
        ({"WEFTPLAN_ENGINE_DEBUG": "1", "WEFTPLAN_ENGINE_WATCHDOG_S": "0"}, False),
        ({"WEFTPLAN_ENGINE_WATCHDOG_S": "0"}, False),
    ],
    ids=str,
)
@pytest.mark.shows("WEFTPLAN_ENGINE_WATCHDOG_S")
def test_watched_engines(monkeypatch, variables, watched):
    """A watchdog runs in debug mode or if WEFTPLAN_ENGINE_WATCHDOG_S is set; 0 seconds disables it."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = set(threading.enumerate())
    eng = engine.create("NaiveEngine")
    names = [thread.name for thread in set(threading.enumerate()) - before]
    assert names.count("weftplan-engine-watchdog") == watched
    del eng


def test_watchdog_reports_each_standstill(debug, capfd):
    """Two standstills give two reports."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    told = []
    for round in range(2):
        gate = threading.Event()
        eng.push(lambda gate=gate: stuck_here(gate), name=f"stuck {round}")
        until(lambda: told.append(capfd.readouterr().err) or f"'stuck {round}'" in "".join(told))  # noqa: B023
        gate.set()
        eng.wait_for_all()
    text = "".join(told) + capfd.readouterr().err
    assert text.count("watchdog: no operation has finished for 0.25 s") == 2
    eng.stop()


class Looks:
    """Replacement of the watchdog's event: before each check it runs the next step of a script."""

    def __init__(self, script):
        self.script = iter(script)

    def wait(self, seconds):
        """Run the next step of the script; return True if there is none."""
        step = next(self.script, None)
        if step is not None:
            step()
        return step is None


def test_slow_progress_is_not_reported(monkeypatch, capsys):
    """Four checks without a completed operation give one report; a completion resets the count.

    There is no report if nothing is pending.
    """
    monkeypatch.setenv("WEFTPLAN_ENGINE_DEBUG", "1")
    monkeypatch.setenv("WEFTPLAN_ENGINE_WATCHDOG_S", "0")
    sim = engine.create("Simulator")
    var = sim.new_variable()
    for _ in range(30):
        sim.push(lambda: None, (), [var])

    def told(*looks):
        _watch(weakref.ref(sim), Looks(looks), 8)
        return capsys.readouterr().err.count("no operation has finished for 8 s")

    nothing = lambda: None  # noqa: E731
    assert told(nothing, *[sim.step, nothing, nothing, nothing] * 5) == 0
    assert told(nothing, nothing, nothing, nothing) == 0
    assert told(nothing, nothing, nothing, nothing, nothing) == 1
    assert told(*[nothing] * 50) == 1
    assert told(*[nothing] * 9, sim.step, *[nothing] * 9) == 2
    sim.wait_for_all()
    assert told(*[nothing] * 50) == 0  # nothing is pending


def test_watchdog_ignores_idle_engine(debug, capfd):
    """The watchdog prints nothing for an idle engine."""
    eng = engine.create("ThreadedEnginePerDevice")
    eng.push(lambda: None)
    eng.wait_for_all()
    time.sleep(0.7)
    assert capfd.readouterr().err == ""
    eng.stop()


def test_watchdog_ends_with_its_engine(debug):
    """The watchdog thread ends when its engine is dropped."""
    before = set(threading.enumerate())
    eng = engine.create("NaiveEngine")
    (watchdog,) = (t for t in set(threading.enumerate()) - before if t.name == "weftplan-engine-watchdog")
    del eng
    until(lambda: not watchdog.is_alive())


def test_the_report_of_a_thread_that_has_ended(debug):
    """The report names a pending asynchronous operation whose function has already returned."""
    eng = engine.create("ThreadedEnginePerDevice")
    kept, var = [], eng.new_variable("x")
    eng.push_async(kept.append, (), [var], name="forgetful")
    until(lambda: kept)
    text = report(eng, 1)
    assert "'forgetful'" in text
    kept[0]()
    eng.wait_for_all()
    eng.stop()


def test_dumps_as_text_and_graph(debug):
    """Dumps as text and as a graph show each pending operation and its holders; other formats raise EngineError."""
    eng = engine.create("Simulator")
    a, b = eng.new_variable("a"), eng.new_variable("b")
    eng.push(lambda: None, (), [a], name="first")
    eng.push(lambda: None, [a], [b], name="second")
    text, dot = eng.dump(), eng.dump("dot")
    assert "#1 'first'" in text
    assert "#2 'second'" in text
    assert "held by #1 'first'" in text
    assert 'op1 -> op2 [label="a"]' in dot
    with pytest.raises(EngineError, match="'text' or 'dot', got 'png'"):
        eng.dump("png")
    eng.wait_for_all()
    assert "first" not in eng.dump()


def test_dumps_name_every_holder(debug):
    """A dump shows for each waiting operation all operations that it waits for.

    Operations r1 and r2 read var a; w writes a and b and waits for both readers; the two operations pushed after w wait
    only for w.
    """
    eng = engine.create("Simulator")
    a, b, c = (eng.new_variable(name) for name in "abc")
    eng.push(lambda: None, [a, c], (), name="r1")
    eng.push(lambda: None, [a], (), name='r2 "quoted" \\')
    eng.push(lambda: None, [c], [a, b], name="w")
    eng.push(lambda: None, [b, c], (), name="last")
    eng.push(lambda: None, [a], (), mx.cpu(3), name="behind")
    dot, lines = eng.dump("dot"), eng.dump().splitlines()
    assert lines[0] == "<Simulator: 5 pushed, 5 pending>"
    assert "WEFTPLAN_ENGINE_DEBUG" not in "".join(lines)
    heads = [line for line in lines if line.startswith("  #")]
    assert [line.rpartition(": ")[2] for line in heads] == ["runs or is queued"] * 2 + ["waits"] * 3
    assert "#1 'r1' on cpu(0), pushed at" in heads[0]
    assert "#5 'behind' on cpu(3), pushed at" in heads[4]
    held = [(line.split("<Var ")[1][1], line.split("held by ")[1].split()[0]) for line in lines if "held by" in line]
    assert held == [("a", "#1"), ("a", "#2"), ("b", "#3"), ("a", "#3")]
    arrows = [line.strip() for line in dot.splitlines() if "->" in line]
    assert arrows == [
        'op1 -> op3 [label="a"];',
        'op2 -> op3 [label="a"];',
        'op3 -> op4 [label="b"];',
        'op3 -> op5 [label="a"];',
    ]
    assert [line.count("lightgreen") for line in dot.splitlines() if "[label=" in line][:5] == [1, 1, 0, 0, 0]
    assert r'op2 [label="#2 r2 \"quoted\" \\"' in dot
    assert (dot.splitlines()[0], dot.splitlines()[-1]) == ("digraph engine {", "}")
    eng.wait_for_all()
    assert eng.dump() == "<Simulator: 5 pushed, 0 pending>\n"
    assert (eng._region.in_flight, eng._running_on) == ({}, {})


def test_dump_mentions_debug_mode():
    """Without debug mode, a dump with a pending operation names the variable that enables debug mode."""
    eng = engine.create("Simulator")
    assert eng.dump() == "<Simulator: 0 pushed, 0 pending>\n"
    eng.push(lambda: None)
    assert "set WEFTPLAN_ENGINE_DEBUG=1" in eng.dump()
    assert "->" not in eng.dump("dot")
    eng.wait_for_all()


def test_stale_operator_is_refused(debug):
    """The push of a stored operator whose var has been deleted raises EngineError with both names."""
    eng = engine.create("ThreadedEnginePerDevice")
    var = eng.new_variable("gone")
    operator = eng.new_operator(lambda: None, [var], name="stale")
    eng.delete_variable(var)
    with pytest.raises(EngineError, match=r"'stale'.*'gone'.*has been deleted"):
        eng.push(operator)
    eng.stop()


def test_undeclared_write_names_its_line(debug):
    """A write to a read-only array raises UndeclaredWriteError with the names of operation and array and the line."""
    eng = engine.create("ThreadedEnginePerDevice")
    data, var = np.zeros(3), eng.new_variable()
    locked = data.view()
    locked.flags.writeable = False

    def body():
        inputs = locked
        inputs[0] = 1

    eng.push(body, [var], (), name="sneaky")
    with pytest.raises(UndeclaredWriteError, match=r"'sneaky'.*'inputs'.* at .*test_debug.py:\d+"):
        eng.wait_for_all()
    assert data[0] == 0
    eng.stop()


@pytest.mark.shows("WEFTPLAN_ENGINE_DEBUG")
def test_arrays_are_locked_only_in_debug_mode(monkeypatch):
    """``debug_enabled()`` is true with WEFTPLAN_ENGINE_DEBUG=1, and ``mx.nd.sum`` gives the right values."""
    assert not engine.debug_enabled()
    monkeypatch.setenv("WEFTPLAN_ENGINE_DEBUG", "1")
    with engine.using(engine.create("ThreadedEnginePerDevice")) as eng:
        assert engine.debug_enabled()
        total = mx.nd.sum(mx.nd.ones((3, 4)), axis=1)
        assert total.asnumpy().tolist() == [4, 4, 4]
    eng.stop()


@pytest.mark.parametrize("size", [0, 5])
def test_an_undeclared_write_in_a_bulk(debug, size):
    """The error of an undeclared write names the operation that wrote, in a bulk of 5 and without one."""
    eng, fixed = engine.create("ThreadedEngine", cpu_workers=1), np.zeros(3)
    fixed.flags.writeable = False
    var = eng.new_variable()

    def writes():
        mine = fixed
        mine[0] = 1

    with eng.bulk(size):
        eng.push(lambda: None, (), [eng.new_variable()])
        eng.push(writes, (), [var], name="stray")
    with pytest.raises(
        UndeclaredWriteError,
        match=r"operation 'stray' wrote to .* \('mine', ndarray of shape \(3,\) and dtype float64 at .*test_debug",
    ):
        eng.wait_for_var(var)
    eng.stop()


@pytest.mark.parametrize("size", [0, 5])
def test_objects_with_broken_attributes(debug, size):
    """A failure keeps its type if its ``__str__`` or an attribute of a local raises, and a later operation runs."""

    class Odd(ValueError):
        def __str__(self):
            raise RuntimeError("no text")

    class Closed:
        @property
        def flags(self):
            raise RuntimeError("closed")

    def first():
        raise Odd

    def second():
        local = Closed()
        raise ValueError(f"read-only, says {type(local).__name__}")

    eng = engine.create("ThreadedEngine", cpu_workers=1)
    var = eng.new_variable()
    for work, kind in (first, Odd), (second, ValueError):
        with eng.bulk(size):
            eng.push(work, (), [var])
        error = eng.future(var).exception(60)
        assert type(error) is kind
    eng.push(lambda: None, (), [var])
    eng.wait_for_var(var)
    eng.stop()
