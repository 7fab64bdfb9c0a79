"""What people write by mistake, and what they are told."""

import subprocess
import sys
import textwrap
import threading

import pytest

from weftplan import engine
from weftplan.engine import failure
from weftplan.errors import ConfigError, EngineError


def bare_task():
    """The decorator without parentheses."""

    @engine.task
    def work(x):
        return x


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (bare_task, r"write @engine\.task\(writes="),
        (lambda: engine.create("ThreadedEngine", workers=3), "no options .'workers'.; there are cpu_workers"),
        (lambda: engine.create("Threaded"), "did you mean 'ThreadedEngine'.*Simulator"),
        (lambda: engine.get().push(int, prop="x"), "prop must be one of FnProperty's NORMAL.*got 'x'"),
        (lambda: engine.get().push_async(int, prop=99), "prop must be one of FnProperty's NORMAL.*got 99"),
        (lambda: engine.get().new_operator(int, prop=None), "prop must be one of FnProperty's NORMAL.*got None"),
    ],
)
def test_the_error_says_what_to_write(mistake, told):
    """And nothing has been scheduled."""
    before = engine.get().statistics().pushed
    with pytest.raises((EngineError, ConfigError), match=told):
        mistake()
    assert engine.get().statistics().pushed == before


def test_mxnets_numbers_of_properties():
    """Are taken."""
    var, ran = engine.get().new_variable(), []
    engine.get().push(lambda: ran.append(1), (), [var], prop=3)
    engine.get().wait_for_var(var)
    assert ran == [1]


def test_a_simulator_ends_its_deletes_at_exit():
    """Arrays that die after the last wait are no work that was forgotten."""
    code = """
        import weftplan as mx
        a = mx.nd.zeros((4,)) + 1
        a.wait_to_read()
        del a
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {"MXNET_ENGINE_TYPE": "Simulator", "PATH": ""}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_one_exception_object_of_operations_that_fail_at_once():
    """
    Each text once, whoever else adds it: 1. A looks for the note  2. B looks for the note  3. both would add it.
    """

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
