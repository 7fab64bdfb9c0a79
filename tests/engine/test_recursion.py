"""Pushes at the limit of recursion: RecursionError or not, nothing is lost and the engine goes on."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from weftplan import engine

eng = engine.create(sys.argv[1], cpu_workers=1)
ran, pushed = [], []

def deep(frames, call):
    if frames:
        return deep(frames - 1, call)
    call()

def push(var):
    eng.push(lambda: ran.append(1), (), [var])
    pushed.append(1)

for busy in (False, True, False):
    for frames in range(sys.getrecursionlimit() - 40, sys.getrecursionlimit()):
        var = eng.new_variable()
        if busy:
            push(var)
        try:
            deep(frames, lambda: push(var))
        except RecursionError:
            pass
        eng.wait_for_all()
        assert var.state == "IDLE", (frames, var)
counts = eng.statistics()
assert counts.pushed == counts.completed == len(ran) >= len(pushed), (counts, len(ran), len(pushed))
assert not counts.pending
print(120 <= len(pushed) < 160)
"""


OTHERS = """
import sys, threading, time
from weftplan import engine
from weftplan.engine import combining, waiting

combining.PATIENCE_S = waiting.PATIENCE_S = 0.02
eng = engine.create(sys.argv[1], cpu_workers=1)
question = {"statistics": eng.statistics, "wait_for_all": eng.wait_for_all, "stop": eng.stop, "dump": eng.dump}
if sys.argv[2] == "wait_for_var":
    ask = lambda: eng._block(var)
else:
    ask = question[sys.argv[2]]

def deep(frames, call):
    if frames:
        return deep(frames - 1, call)
    call()

short = 0
for frames in range(sys.getrecursionlimit() - 40, sys.getrecursionlimit()):
    var, answers = eng.new_variable(), []

    def other():
        try:
            answers.append(ask())
        except BaseException as error:
            answers.append(error)

    eng._seize()
    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    while not eng._requests:
        time.sleep(0)
    eng._leave()
    try:
        deep(frames, eng._apply)
    except RecursionError:
        short += 1
    thread.join(20)
    assert answers and not isinstance(answers[0], BaseException), (frames, answers)
eng.wait_for_all()
counts = eng.statistics()
assert counts.pushed == counts.completed and not counts.pending, counts
print(short > 0)
"""


@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
@pytest.mark.parametrize("question", ["statistics", "wait_for_all", "wait_for_var", "stop", "dump"])
def test_questions_of_other_threads_at_the_limit_of_recursion(kind, question):
    """The thread inside has no room to answer, and does not come again: the asking thread gets its answer, no error."""
    done = subprocess.run(
        [sys.executable, "-c", OTHERS, kind, question], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]


@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
def test_pushes_at_the_limit_of_recursion(kind):
    """Some of 160 raise RecursionError: in the engine, where the call that has no room may be any."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]
