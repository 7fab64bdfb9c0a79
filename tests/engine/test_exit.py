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
    assert "weftplan: 1 operation had not run when the process ended; call wait_for_all() first" in err


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


@pytest.mark.parametrize("kind", ["NaiveEngine", *KINDS, "Simulator"])
def test_a_destructor_after_the_end(kind):
    """What it pushes would never run, and what it waits for might never come: it is told so, and the process ends."""
    code, out, err = script(
        """
        import sys
        from weftplan import engine
        from weftplan.errors import EngineError

        eng = engine.get()
        var = eng.new_variable()
        eng.push(lambda: None, (), [var])
        eng.wait_for_all()

        class Last:
            def __del__(self, eng=eng, var=var, write=sys.stdout.write, EngineError=EngineError):
                for act in (
                    lambda: eng.push(len),
                    lambda: eng.wait_for_var(var),
                    lambda: eng.wait_for_all(),
                    lambda: eng.future(var),
                ):
                    try:
                        act()
                        write("nothing said\\n")
                    except EngineError as error:
                        write(f"{error}\\n")

        sys.last_of_all = Last()
        """,
        MXNET_ENGINE_TYPE=kind,
    )
    assert (code, err) == (0, "")
    assert [line[:67] for line in out.splitlines()] == [
        "the interpreter is ending: nothing is pushed or waited for any more"
    ] * 4


def test_arrays_that_die_after_the_end():
    """Their finalizers say nothing, and no engine is made for them."""
    code, out, err = script(
        """
        import sys
        import weftplan as mx

        sys.kept = [mx.nd.ones((3,)) for _ in range(20)]
        """
    )
    assert (code, out, err) == (0, "", "")


def test_results_that_nobody_wanted(kind):
    """A script that ends with operations on arrays pending has lost nothing that anybody could see: silence."""
    code, out, err = script(
        """
        import threading, time
        import weftplan as mx
        from weftplan import engine

        a, begun = mx.nd.ones((3,)), threading.Event()
        engine.get().push(lambda: (begun.set(), time.sleep(0.2)), (), [a.var])
        begun.wait()
        for _ in range(20):
            a += 1
        """,
        MXNET_ENGINE_TYPE=kind,
    )
    assert (code, out, err) == (0, "", "")


def test_daemon_threads_that_go_on_pushing(kind):
    """They are told that the interpreter ends; the end does not wait for what they would push."""
    code, out, err = script(
        """
        import atexit, threading, time
        from weftplan import engine
        from weftplan.errors import EngineError

        eng = engine.get()
        told = []

        def storm(var):
            try:
                while True:
                    eng.push(lambda: None, (), [var])
            except EngineError as error:
                told.append(str(error))
                while True:
                    time.sleep(1)

        for _ in range(2):
            threading.Thread(target=storm, args=(eng.new_variable(),), daemon=True).start()
        time.sleep(0.1)
        from weftplan.engine import factory
        atexit.unregister(factory._at_exit)
        factory._at_exit()
        while len(told) < 2:
            time.sleep(0.01)
        print(eng.statistics().pending, told[0][:25])
        """,
        MXNET_ENGINE_TYPE=kind,
    )
    assert (code, out) == (0, "0 the interpreter is ending\n")
    assert "still busy" not in err
