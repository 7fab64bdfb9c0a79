"""Exit of the process: its messages, the operations that still run, and that it terminates."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

KINDS = ("ThreadedEngine", "ThreadedEnginePerDevice")


def run_program(text, **environment):
    """Run a program in its own process; return its exit status, output and error output."""
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
    """The name of each threaded engine."""
    return request.param


def test_exit_waits_for_endless_operation(kind):
    """Exit waits for an endless operation and reports the busy engine repeatedly; Ctrl-C then ends the process.

    In debug mode the report also names the operation.
    """
    text = """
        import signal, threading
        from weftplan import engine
        from weftplan.engine import factory

        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore SIGINT
        factory.EXIT_PATIENCE_S = 0.05
        eng, begun = engine.get(), threading.Event()
        eng.push(lambda: (begun.set(), threading.Event().wait()), (), [eng.new_variable()], name="endless")
        begun.wait()
    """
    for debug, tells in ("1", "#1 'endless' on cpu(0)"), ("0", "set WEFTPLAN_ENGINE_DEBUG=1"):
        environment = os.environ | {"MXNET_ENGINE_TYPE": kind, "WEFTPLAN_ENGINE_DEBUG": debug}
        with subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(text)], stderr=subprocess.PIPE, text=True, env=environment
        ) as child:
            told = ""
            while told.count("still busy") < 2:
                told += child.stderr.readline()
            child.send_signal(signal.SIGINT)
            told += child.stderr.read()
            assert child.wait(60) == 0
        assert f"weftplan: at exit <{kind}: 1 pushed, 1 pending> is still busy" in told
        assert tells in told


def test_pushed_and_submitted_work_runs_at_exit(kind):
    """At exit, user operations and tasks of all engines run, with the array operations that they depend on."""
    code, out, err = run_program(
        """
        import time, weakref
        import numpy as np
        import weftplan as mx
        from weftplan import engine

        class Gone:
            pass

        proxy = weakref.proxy(Gone())  # its __class__ raises
        a, b, x = np.zeros(2), np.zeros(2), mx.nd.zeros((2,))
        other_engine = engine.create("ThreadedEngine")
        other_engine.push(lambda: (time.sleep(0.3), print("pushed", flush=True)), (), [other_engine.new_variable()])
        engine.submit(time.sleep, 0.2, writes=[a])
        for _ in range(100):
            engine.submit(np.add, a, 1, out=a)
            x += 1
        engine.submit(lambda a, x: print(a, x, flush=True), a, x, writes=[])
        """,
        MXNET_ENGINE_TYPE=kind,
    )
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[100. 100.] [100. 100.]", "pushed"]


def test_ctrl_c_during_exit(kind):
    """After Ctrl-C during exit, exit reports the busy engine, and tasks that have not begun never run."""
    text = """
        import os, signal, threading
        import numpy as np
        from weftplan import engine
        from weftplan.engine import factory

        signal.signal(signal.SIGINT, signal.default_int_handler)
        a, waits, told = np.zeros(2), threading.Event(), threading.Event()
        finish, tell_busy = factory._finish, factory._print_busy
        factory._finish = lambda eng: (waits.set(), finish(eng))
        factory._print_busy = lambda eng: (tell_busy(eng), told.set())

        def first(out):
            waits.wait()  # from here on, Ctrl-C interrupts the wait at exit
            os.kill(os.getpid(), signal.SIGINT)
            told.wait()

        engine.submit(first, out=a)
        for _ in range(3):
            engine.submit(print, a, "ran", flush=True)
    """
    code, out, err = run_program(text, MXNET_ENGINE_TYPE=kind)
    assert (code, out) == (0, "")
    assert "still busy" in err


@pytest.mark.parametrize("wait", ["engine.wait(tasks)", "list(engine.as_completed(tasks))", "threading.Event().wait()"])
def test_ctrl_c_drops_tasks_not_begun(kind, wait):
    """An uncaught Ctrl-C ends the process without the tasks that have not begun; after a caught one all tasks run."""
    text = f"""
        import os, signal, threading, time
        from weftplan import engine

        signal.signal(signal.SIGINT, signal.default_int_handler)

        submitted = threading.Event()

        def step(number):
            while not submitted.is_set():  # a waiter is lost if the interrupt comes within `set`
                time.sleep(0.001)
            if number == 2:
                time.sleep(0.2)  # CPython loses a signal that comes just before a thread blocks on a lock
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.05)
            os.write(1, b"ran\\n")

        tasks = [engine.submit(step, number) for number in range(200)]
        try:
            submitted.set()
            {wait}
        except KeyboardInterrupt:
            if os.environ.get("CAUGHT") is None:
                raise
    """
    code, out, err = run_program(text, MXNET_ENGINE_TYPE=kind)
    assert code == -signal.SIGINT, err
    assert "KeyboardInterrupt" in err
    assert len(out.split()) < 150  # each worker runs 20 a second during one second of grace
    code, out, err = run_program(text, MXNET_ENGINE_TYPE=kind, CAUGHT="1")
    assert (code, len(out.split()), err) == (0, 200, "")


def test_silent_exit_without_failures(kind):
    """Exit prints nothing if a wait has raised, or a future has returned, every failure."""
    code, out, err = run_program(
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


def test_pending_custom_operator_may_use_arrays(kind):
    """A custom operator that runs during exit can still create and assign arrays, and exit reports no error."""
    text = """
        import threading, time

        import weftplan as mx

        begun, ending = threading.Event(), threading.Event()

        class Twice(mx.operator.CustomOp):
            def forward(self, is_train, req, in_data, out_data, aux):
                begun.set()
                ending.wait(60)
                time.sleep(0.1)  # exit now waits for this operation
                self.assign(out_data[0], req[0], mx.nd.array(in_data[0].asnumpy() * 2))
                print("computed")

        @mx.operator.register("twice_at_the_end")
        class TwiceProp(mx.operator.CustomOpProp):
            def create_operator(self, ctx, shapes, dtypes):
                return Twice()

        import weftplan.engine.factory as factory

        finish = factory._finish
        factory._finish = lambda engine: (ending.set(), finish(engine))
        symbol = mx.sym.Custom(mx.sym.Variable("x"), op_type="twice_at_the_end")
        executor = symbol.simple_bind(mx.cpu(), x=(2, 2))
        executor.forward(x=mx.nd.ones((2, 2)))
        begun.wait(60)
        """
    assert run_program(text, MXNET_ENGINE_TYPE=kind) == (0, "computed\n", "")


def test_bulk_members_run_at_exit(kind):
    """Bulk members that the main thread has not pushed yet are pushed and run at exit."""
    code, out, err = run_program(
        """
        import time
        from weftplan import engine
        from weftplan.engine import factory

        eng = engine.get()
        var = eng.new_variable()

        def until_the_end():
            while not factory._process.ending:
                time.sleep(0.001)

        eng.push(until_the_end, (), [var])
        eng.set_bulk_size(10)
        eng.push(lambda: print("ran"), (), [var])
        """,
        MXNET_ENGINE_TYPE=kind,
    )
    assert (code, out, err) == (0, "ran\n", "")


def test_exit_covers_every_engine(kind):
    """Deletes of every engine run, and exit reports each unraised ZeroDivisionError with its operation's name."""
    code, out, err = run_program(
        """
        import time
        from weftplan import engine

        engines = [engine.create(KIND), engine.create("ThreadedEnginePerDevice"), engine.get()]
        for i, eng in enumerate(engines):
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
def test_destructor_after_exit_is_refused(kind):
    """Pushes and waits of a destructor that runs after exit raise EngineError, which names the exit as the reason."""
    code, out, err = run_program(
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


def test_arrays_dying_after_exit_are_silent():
    """Arrays destroyed after exit print nothing."""
    code, out, err = run_program(
        """
        import sys
        import weftplan as mx

        sys.kept = [mx.nd.ones((3,)) for _ in range(20)]
        """
    )
    assert (code, out, err) == (0, "", "")


def test_unread_results_are_dropped_silently(kind):
    """Pending array operations whose results no code reads are dropped at exit without a message."""
    code, out, err = run_program(
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


def test_pushing_daemon_threads_are_refused_at_exit(kind):
    """At exit, pushes of daemon threads raise EngineError, and no operation stays pending."""
    code, out, err = run_program(
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
