"""Ctrl-C at every bytecode that the main thread runs in the engine: nothing hangs, nothing stays half done.

A real SIGINT is made pending just before the k-th bytecode, for every second k in turn; the interpreter raises it where
it would raise any other: at the next end of a loop, beginning of a function or return of a call, which is nearly always
several bytecodes away.
"""

import subprocess
import sys
import textwrap

import pytest

HARNESS = """
import _thread, gc, sys, threading, time
from weftplan import engine
from weftplan.engine import FnProperty

fire = iter(_thread.interrupt_main, 1)  # a loop calls it without looking for signals itself

class At:
    def __init__(self, k):
        self.k, self.count, self.where = k, 0, ""

    def enter(self, frame, event, arg):
        if "weftplan" in frame.f_code.co_filename:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return self.step

    def step(self, frame, event, arg):
        if event == "opcode":
            self.count += 1
            if self.count == self.k:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                sys.settrace(None)
                for _ in fire:
                    break
        return self.step

def check(eng, variables):
    for var in variables:
        eng.push(lambda: None, (), [var])
    try:
        eng.wait_for_all()
    except KeyboardInterrupt:  # the failure of an operation
        eng.wait_for_all()
    assert all(var.state == "IDLE" for var in variables), variables
    counts = eng.statistics()
    assert counts.pushed == counts.completed and not counts.pending, counts

def once(k):
    eng = engine.create(sys.argv[1], cpu_workers=2)
    a, b = eng.new_variable(), eng.new_variable()
    for _ in range(2):
        eng.push(lambda: None, (), [a])
        eng.wait_for_var(a)
    at = At(k)
    rescue = threading.Timer(5, _thread.interrupt_main)
    rescue.daemon = True
    rescue.start()
    begun = time.monotonic()
    try:
        sys.settrace(at.enter)
        try:
            body(eng, a, b)
        finally:
            sys.settrace(None)
        time.sleep(0)
    except KeyboardInterrupt:
        pass
    rescue.cancel()
    assert time.monotonic() - begun < 4, f"hangs after {at.where}"
    done = []
    checker = threading.Thread(target=lambda: (check(eng, (a, b)), done.append(1)), daemon=True)
    checker.start()
    checker.join(10)
    assert done, f"{k}: broken after {at.where}"
    return at.count >= k

gc.disable()  # an engine of an earlier round is not to be collected while this one is traced
k, step = int(sys.argv[2]), int(sys.argv[3])
while once(k):
    k += step
print("bytecodes", k)
"""

BODIES = {
    "push": "eng.push(int, [b], [a]); eng.push(int, [a], [b])",
    "wait_for_var": "eng.push(int, [b], [a]); eng.wait_for_var(a)",
    "wait_for_all": "eng.push(int, [b], [a]); eng.push(int, [a], [b]); eng.wait_for_all()",
    "statistics": "eng.push(int, [b], [a]); eng.statistics()",
    "short": "eng.push(int, [b], [a], prop=FnProperty.ASYNC); eng.push(int, [a], [b], prop=FnProperty.ASYNC)",
}


@pytest.mark.stress
@pytest.mark.skipif(sys.implementation.name != "cpython", reason="the places are those of this interpreter")
@pytest.mark.parametrize("body", BODIES)
def test_an_interrupt_anywhere(body):
    """The interrupted call raises or counts; all later operations run."""
    code = HARNESS.replace("def once(k):", f"def body(eng, a, b):\n    {BODIES[body]}\n\ndef once(k):")
    command = [sys.executable, "-c", textwrap.dedent(code), "ThreadedEnginePerDevice", "1", "2"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout.split()[1]) > 100
