"""Ctrl-C at every second bytecode that the main thread runs in the engine: no call hangs or stays half done.

A real SIGINT becomes pending just before the k-th bytecode, for every second k. The interpreter raises it at its next
check (a loop end, a function entry or a return from a call), usually several bytecodes later.
"""

import os
import subprocess
import sys

import pytest

HARNESS = """
import _thread, gc, os, signal, sys, threading, time, types
from functools import partial
from weftplan import engine
from weftplan.engine import FnProperty
from weftplan.errors import EngineError

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have set another handler
fire = iter(_thread.interrupt_main, 1)  # a loop over it sends the signal without a check of its own

class At:
    def __init__(self, k):
        self.k, self.count, self.where = k, 0, ""

    def now(self, code, place):
        self.count += 1
        if self.count == self.k:
            self.where = f"{code.co_name}:{place}"
            return True

# After the interrupt was sent, this code may make no call and trace no bytecode, or the interrupt is raised here.
if sys.version_info >= (3, 12):
    # Events are enabled in advance: a frame that enables them at its start, as below, gets none for its bytecodes.
    events, main = sys.monitoring, threading.get_ident()
    INSTRUCTION = events.events.INSTRUCTION
    events.use_tool_id(events.DEBUGGER_ID, "interrupts")
    codes = [f.__code__ for f in gc.get_objects() if isinstance(f, types.FunctionType)]
    while codes:
        code = codes.pop()
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
        if "weftplan" in code.co_filename:
            events.set_local_events(events.DEBUGGER_ID, code, INSTRUCTION)

    def start(at):
        def step(code, offset):
            if threading.get_ident() == main and at.now(code, offset):
                stop()
                for _ in fire:
                    break

        events.register_callback(events.DEBUGGER_ID, INSTRUCTION, step)

    def stop():
        events.register_callback(events.DEBUGGER_ID, INSTRUCTION, None)
else:
    def start(at):
        def enter(frame, event, arg):
            if "weftplan" in frame.f_code.co_filename:
                frame.f_trace_opcodes, frame.f_trace_lines = True, False
                return step

        def step(frame, event, arg):
            if event == "opcode" and at.now(frame.f_code, frame.f_lineno):
                stop()
                for _ in fire:
                    break
            return step

        sys.settrace(enter)

    def stop():
        sys.settrace(None)

def check(eng, variables):
    for var in variables:
        eng.push(lambda: None, (), [var])
    try:
        eng.wait_for_all()
    except KeyboardInterrupt:  # an operation has failed with it
        eng.wait_for_all()
    assert all(var.state == "IDLE" for var in variables), variables
    counts = eng.statistics()
    assert counts.pushed == counts.completed and not counts.pending, counts

# Each function prepares and returns a call to be interrupted; `promises` are checked after it.

def push(eng, a, b, promises):
    return lambda: (eng.push(int, [b], [a]), eng.push(int, [a], [b]))

def wait_for_var(eng, a, b, promises):
    return lambda: (eng.push(int, [b], [a]), eng.wait_for_var(a))

def wait_for_all(eng, a, b, promises):
    return lambda: (eng.push(int, [b], [a]), eng.push(int, [a], [b]), eng.wait_for_all())

def statistics(eng, a, b, promises):
    return lambda: (eng.push(int, [b], [a]), eng.statistics())

def short(eng, a, b, promises):
    return lambda: [eng.push(int, [x], [y], prop=FnProperty.ASYNC) for x, y in ((b, a), (a, b))]

def on_complete(eng, a, b, promises):
    # An interrupted caller calls on_complete again, in case the first call had no effect.
    started = []
    eng.push_async(started.append, [b], [a])
    while not started:
        time.sleep(0)

    def work():
        try:
            started[0]()
        except KeyboardInterrupt:
            stop()
            try:
                started[0]()
            except EngineError:
                pass
            raise

    return work

def delete_variable(eng, a, b, promises):
    var, ran = eng.new_variable(), []
    promises.append(lambda: var.deleted == bool(ran))
    return lambda: eng.delete_variable(var, partial(ran.append, 1))

def run_once(eng, a, b, promises):
    ran = []
    promises.append(lambda: len(ran) < 2)
    return lambda: eng.push(partial(ran.append, 1), (), [a])

def fork(eng, a, b, promises):
    # Child and parent both continue, or the child gets an error that says why it cannot. No interrupt is lost in a
    # hook, where the interpreter can only report it. Two exceptions: before the first line of the first hook, and at
    # the start of the interpreter's own callback for a weak reference to a thread.
    lost = []

    def hook(info):
        if getattr(info.object, "__module__", "") == "_weakrefset":
            return
        place = info.exc_traceback
        while place.tb_next:
            place = place.tb_next
        if place.tb_frame.f_code.co_name != "_before_fork" or place.tb_lineno != place.tb_frame.f_code.co_firstlineno:
            lost.append(f"{info.exc_value!r} in {place.tb_frame.f_code.co_name}:{place.tb_lineno}")

    def reaped():
        sys.unraisablehook = sys.__unraisablehook__
        status = []
        try:
            while True:
                status.append(os.waitpid(-1, 0)[1])
        except ChildProcessError:
            assert status in ([], [0]) and not lost, (status, lost)
            return True

    def work():
        sys.unraisablehook = hook
        eng.push(int, [b], [a])
        before = os.getpid()
        try:
            os.fork()
        finally:
            if os.getpid() != before:
                stop()
                signal.alarm(60)
                status = 1
                try:
                    check(eng, (a, b))
                    eng.stop()
                    status = 0
                except EngineError as error:
                    status = 0 if "before it was idle" in str(error) else 2
                finally:
                    os._exit(status)

    promises.append(reaped)
    return work

def once(k):
    eng = engine.create(sys.argv[1], cpu_workers=2)
    a, b, promises = eng.new_variable(), eng.new_variable(), []
    for _ in range(2):
        eng.push(lambda: None, (), [a])
        eng.wait_for_var(a)
    work = globals()[sys.argv[2]](eng, a, b, promises)
    at = At(k)
    late = []
    rescue = threading.Timer(20, lambda: (late.append(1), _thread.interrupt_main()))
    rescue.daemon = True
    rescue.start()
    try:
        start(at)
        try:
            work()
        finally:
            stop()
        time.sleep(0)
    except KeyboardInterrupt:
        pass
    rescue.cancel()
    assert not late, f"hangs after {at.where}"
    done = []
    checker = threading.Thread(target=lambda: (check(eng, (a, b)), done.append(1)), daemon=True)
    checker.start()
    checker.join(60)
    assert done, f"{k}: broken after {at.where}"
    assert all(kept() for kept in promises), f"{k}: half done after {at.where}"
    return at.count >= k

gc.disable()  # collecting an engine of an earlier round would be traced, too
k, step = int(sys.argv[3]), int(sys.argv[4])
while any(once(k) for _ in range(4)):  # the traced code depends on the timing of threads
    k += step
    if k % 25 == 0:
        gc.collect()  # otherwise the threads of hundreds of engines stay alive
print("bytecodes", k)
"""

THREADED = ("push", "wait_for_var", "wait_for_all", "statistics", "short", "on_complete", "delete_variable", "run_once")
THREADED += ("fork",) if hasattr(os, "fork") else ()
CASES = [("ThreadedEnginePerDevice", name) for name in THREADED]
CASES += [("NaiveEngine", name) for name in ("push", "wait_for_all", "delete_variable", "run_once")]


@pytest.mark.stress
@pytest.mark.skipif(sys.implementation.name != "cpython", reason="the places are those of this interpreter")
@pytest.mark.parametrize(("kind", "work"), CASES)
def test_an_interrupt_anywhere(kind, work):
    """After Ctrl-C at any tested bytecode, later operations run, none runs twice, and no delete is lost."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", HARNESS, kind, work, "1", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout.split()[1]) > 100
