"""The end of the process: what is said, what still runs, and that it comes."""

import os
import subprocess
import sys
import textwrap

import pytest

KINDS = ("ThreadedEngine", "ThreadedEnginePerDevice")


def script(text, **environment):
    """Run a program in a process of its own; (exit status, output, errors)."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MXNET_", "WEFTPLAN_"))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean | environment,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(params=KINDS)
def kind(request):
    """Each threaded engine."""
    return request.param


def test_an_operation_that_never_ends(kind):
    """The end waits a while, then names the engine and, in debug mode, the operation; the process ends all the same."""
    text = """
        import threading
        from weftplan import engine
        from weftplan.engine import factory

        factory.EXIT_PATIENCE_S = 0.3
        eng, begun = engine.get(), threading.Event()
        eng.push(lambda: (begun.set(), threading.Event().wait()), (), [eng.new_variable()], name="endless")
        begun.wait()
    """
    code, out, err = script(text, MXNET_ENGINE_TYPE=kind, WEFTPLAN_ENGINE_DEBUG="1")
    assert (code, out) == (0, "")
    assert f"weftplan: at exit <{kind}: 1 pushed, 1 pending> is still busy" in err
    assert "#1 'endless' on cpu(0)" in err
    code, out, err = script(text, MXNET_ENGINE_TYPE=kind)
    assert (code, out) == (0, "")
    assert "set WEFTPLAN_ENGINE_DEBUG=1" in err


def test_nothing_is_said_when_all_is_well(kind):
    """Work waited for, a failure told by a wait and one told by a future: silence."""
    code, out, err = script(
        """
        from weftplan import engine

        eng = engine.get()
        var, other = eng.new_variable(), eng.new_variable()
        eng.push(lambda: 1 / 0, (), [var])
        eng.push(lambda: 1 / 0, (), [other])
        try:
            eng.wait_for_var(var)
        except ZeroDivisionError:
            print("told")
        print(type(eng.future(other).exception(60)).__name__)
        """,
        MXNET_ENGINE_TYPE=kind,
    )
    assert (code, out.split(), err) == (0, ["told", "ZeroDivisionError"], "")


def test_members_of_a_bulk_are_not_lost_silently(kind):
    """What the main thread collected and never flushed counts among what had not run."""
    code, out, err = script(
        """
        import time
        from weftplan import engine

        eng = engine.get()
        var = eng.new_variable()

        def until_the_end():
            while not eng._shutdown:
                time.sleep(0.001)

        eng.push(until_the_end, (), [var])
        eng.set_bulk_size(10)
        eng.push(lambda: print("ran"), (), [var])
        """,
        MXNET_ENGINE_TYPE=kind,
    )
    assert (code, out) == (0, "")
    assert "weftplan: 1 operations had not run when the process ended; call wait_for_all() first" in err


def test_every_engine_of_the_process(kind):
    """Not only the process-wide one: deletes of each run, failures of each are told, with operation and line."""
    code, out, err = script(
        """
        import time
        from weftplan import engine

        made = [engine.create(KIND), engine.create("ThreadedEnginePerDevice"), engine.get()]
        for i, eng in enumerate(made):
            var = eng.new_variable()
            eng.push(lambda: 1 / 0, (), [eng.new_variable()], name=f"lost {i}")
            eng.delete_variable(var, lambda i=i: print("deleted", i, flush=True))
            while eng.statistics().completed < 2:
                time.sleep(0.001)
        """.replace("KIND", repr(kind))
    )
    assert code == 0
    assert sorted(out.splitlines()) == ["deleted 0", "deleted 1", "deleted 2"]
    for i in range(3):
        assert f"nobody waited for it: ZeroDivisionError: division by zero (operation 'lost {i}', pushed at " in err
