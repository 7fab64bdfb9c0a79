"""Common mistakes of users, and their error messages."""

import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest

from weftplan import engine
from weftplan.engine import FnProperty, failure
from weftplan.errors import ConfigError, EngineError


def bare_task():
    """Use the decorator without parentheses, which raises EngineError."""

    @engine.task
    def work(x):
        return x


def one_var():
    """Return a var of the process-wide engine."""
    return engine.get().new_variable()


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (bare_task, r"write @engine\.task\(writes="),
        (
            lambda: engine.create("ThreadedEngine", workers=3),
            "no options .'workers'.; did you mean 'task_workers'. there are cpu",
        ),
        (lambda: engine.create("Threaded"), "did you mean 'ThreadedEngine'.*Simulator"),
        (lambda: engine.get().push(int, prop="x"), "prop must be one of FnProperty's NORMAL.*got 'x'"),
        (lambda: engine.get().push_async(int, prop=99), "prop must be one of FnProperty's NORMAL.*got 99"),
        (lambda: engine.get().new_operator(int, prop=None), "prop must be one of FnProperty's NORMAL.*got None"),
        (lambda: engine.create("Simulator", sed=2), "Simulator has no options .'sed'.*seed and choose"),
        (lambda: engine.create("ThreadedEngine", cpu_workers=2.0), "cpu_workers must be an integer >= 1, got 2.0"),
        (
            lambda: engine.set_engine("NaiveEngine"),
            r"expected an engine, .*make one with engine.create\('NaiveEngine'\)",
        ),
        (lambda: engine.using(engine.create).__enter__(), "expected an engine made by engine.create"),
        (lambda: engine.set_tracer(5), "a tracer is a function, or None for none; got int"),
        (lambda: engine.get().push(int, (), one_var()), r"write \[var\] for one"),
        (lambda: engine.get().push_async(int, one_var()), r"write \[var\] for one"),
        (lambda: engine.get().new_operator(int, (), one_var()), r"write \[var\] for one"),
        (lambda: engine.get().push(int, priority=1.5), "priority must be an integer, got 1.5"),
        (lambda: engine.get().push_async(int, priority="1"), "priority must be an integer, got '1'"),
        (lambda: engine.set_bulk_size(1.0), "bulk size must be an integer >= 0, got 1.0"),
        (lambda: engine.set_bulk_size(-1), "bulk size must be an integer >= 0, got -1"),
        (lambda: engine.get().delete_variable(one_var(), 5), "needs a function without arguments, got int"),
        (lambda: engine.get().delete_operator(int), "made by engine.new_operator.., got type"),
        (lambda: engine.get().throw("a"), "made by engine.new_variable.., got str"),
    ],
)
def test_error_shows_the_correct_call(mistake, told):
    """A mistaken call raises EngineError or ConfigError with a hint, and no operation is pushed."""
    before = engine.get().statistics().pushed
    with pytest.raises((EngineError, ConfigError), match=told):
        mistake()
    assert engine.get().statistics().pushed == before


def test_numpy_integers_are_accepted():
    """NumPy integers, also unsigned, are accepted as worker counts, priorities and bulk sizes."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=np.int64(1), priority_workers=np.uint8(1))
    ran, gate = [], threading.Event()
    eng.push(gate.wait, prop=FnProperty.CPU_PRIORITIZED)
    for i in np.arange(4, dtype=np.uint8):
        eng.push(lambda i=int(i): ran.append(i), prop=FnProperty.CPU_PRIORITIZED, priority=i)
    gate.set()
    eng.wait_for_all()
    assert ran == [3, 2, 1, 0]
    assert (eng.set_bulk_size(np.int32(3)), eng.set_bulk_size(0)) == (0, 3)
    eng.stop()


def test_falsy_delete_function_is_called():
    """A delete function that is false in a boolean context is called like any other."""

    class Empty(list):
        def __call__(self):
            ran.append(1)

    ran, eng = [], engine.create("ThreadedEngine", cpu_workers=1)
    eng.delete_variable(eng.new_variable(), Empty())
    eng.wait_for_all()
    assert ran == [1]
    eng.stop()


def test_mxnet_property_numbers_are_accepted():
    """A push with MXNet's property number, ``prop=3``, runs its operation."""
    var, ran = engine.get().new_variable(), []
    engine.get().push(lambda: ran.append(1), (), [var], prop=3)
    engine.get().wait_for_var(var)
    assert ran == [1]


def test_simulator_runs_deletes_at_exit():
    """With the simulator, exit prints nothing and returns 0 if an array died after the last wait."""
    code = """
        import weftplan as mx
        a = mx.nd.zeros((4,)) + 1
        a.wait_to_read()
        del a
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {"MXNET_ENGINE_TYPE": "Simulator", "PATH": "", "PYTHONPATH": os.environ["PYTHONPATH"]}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_shared_exception_gets_each_note_once():
    """If two threads add the same note to one exception, the note appears once."""

    class Shared(Exception):
        def add_note(self, note):
            if not met.broken:
                met.wait(1)
            super().add_note(note)

    error, met = Shared("both"), threading.Barrier(2)

    threads = [threading.Thread(target=failure.add_note, args=(error, "raised in the same place")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert error.__notes__.count("raised in the same place") == 1


def test_dir_lists_public_names_only():
    """``dir(engine)`` lists ``__all__``, and an unknown name raises AttributeError with that name."""
    assert dir(engine) == sorted(engine.__all__)
    assert all(getattr(engine, name) is not None for name in engine.__all__)
    with pytest.raises(AttributeError, match=r"'weftplan\.engine' has no attribute 'pushh'"):
        engine.pushh  # noqa: B018
