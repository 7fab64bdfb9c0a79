"""Calls near the recursion limit: no operation is lost or run twice, and later operations run."""

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


ACTS = """
import sys
from weftplan import engine
from weftplan.engine import FnProperty

kind = sys.argv[1]
eng = engine.create(kind, cpu_workers=1) if "Threaded" in kind else engine.create(kind)
limit = sys.getrecursionlimit()

def deep(frames, call):
    if frames:
        return deep(frames - 1, call)
    return call()

ran, started, kept = [], [], []

def act(var):
    note = lambda: ran.append(1)
    if name == "push":
        return eng.push(note, (), [var])
    if name == "short":
        return eng.push(note, (), [var], prop=FnProperty.ASYNC)
    if name == "prioritized":
        return eng.push(note, (), [var], prop=FnProperty.CPU_PRIORITIZED)
    if name == "async":
        return eng.push_async(lambda done: (note(), done()), (), [var])
    if name == "delete":
        return eng.delete_variable(eng.new_variable(), note)
    if name == "bulk":
        with eng.bulk(1):
            return eng.push(note, (), [var])
    if name == "on_complete":
        return started.pop()()
    if name == "future":
        kept.append(eng.future(var))
        return kept[-1].add_done_callback(lambda _: note())
    return getattr(eng, name)(*[var] * (name == "wait_for_var"))

NAMES = ["push", "short", "prioritized", "async", "delete", "bulk", "future", "wait_for_var", "wait_for_all"]
NAMES += ["statistics"] + ["on_complete"] * (kind != "NaiveEngine")
for name in NAMES:
    raised = done = 0
    for frames in range(limit - 80, limit - 3):
        busy = frames % 2
        var, before = eng.new_variable(), len(ran)
        if busy:
            eng.push(int, [], [var])
        if name == "on_complete":
            eng.push_async(started.append, (), [var])
            while not started:
                if kind == "Simulator":
                    eng.step()
            hold = started[0]
        try:
            deep(frames, lambda: act(var))
        except RecursionError:
            raised += 1
            count = 0
            if name == "on_complete":
                hold()
        else:
            done += 1
            count = 1
        try:
            eng.wait_for_all()
        except RecursionError:  # raised by the operation itself, if it ran on the pushing thread
            assert kind == "NaiveEngine" or name in ("short", "delete"), (frames, kind)
        assert var.state == "IDLE", (frames, var)
        if name not in ("wait_for_var", "wait_for_all", "statistics", "on_complete", "stop"):
            inline = kind == "NaiveEngine" or name in ("short", "delete", "future", "bulk")
            times = len(ran) - before
            assert times == count or (inline and times < 2), (name, frames, times, count)
    print(name, raised > 3 or name[:4] == "wait", done > 3)
counts = eng.statistics()
assert counts.pushed == counts.completed and not counts.pending, counts
var = eng.new_variable()
for _ in range(3):
    eng.push(int, (), [var])
    eng.wait_for_var(var)
assert var.version == 3
"""


@pytest.mark.parametrize("kind", ["NaiveEngine", "ThreadedEngine", "ThreadedEnginePerDevice", "Simulator"])
def test_every_action_happens_once_or_raises(kind):
    """Near the recursion limit, an operation runs once if its push returns, and never if it raises RecursionError.

    An operation that runs inline may raise RecursionError itself; it runs at most once.
    """
    done = subprocess.run([sys.executable, "-c", ACTS, kind], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert len(told) == 10 + (kind != "NaiveEngine")
    assert {depths for _, depths in told} == {"True True"}, told


OTHERS = """
import sys, threading, time
from weftplan import engine
from weftplan.engine import region, waiting
from weftplan.engine.edges import forking

region.PATIENCE_S = waiting.PATIENCE_S = 0.02

def deep(frames, call):
    if frames:
        return deep(frames - 1, call)
    call()

for question in ("statistics", "wait_for_all", "wait_for_var", "stop", "dump"):
    eng, short = engine.create(sys.argv[1], cpu_workers=1), 0
    for frames in range(sys.getrecursionlimit() - 40, sys.getrecursionlimit()):
        var, answers = eng.new_variable(), []
        # If nothing is pending or failed, the public waits send no request.
        asks = {"wait_for_var": lambda: eng._block(var, None),
                "wait_for_all": lambda: eng._exclusively(eng._observe_all)}

        def other():
            try:
                answers.append(asks.get(question, getattr(eng, question))())
            except BaseException as error:
                answers.append(error)

        forking.seize(eng)
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        while not eng._region.requests:
            time.sleep(0)
        forking.leave(eng)
        try:
            deep(frames, lambda: eng._wait_idle(0))
        except RecursionError:
            short += 1
        thread.join(60)
        assert answers and not isinstance(answers[0], BaseException), (question, frames, answers)
    eng.wait_for_all()
    counts = eng.statistics()
    assert counts.pushed == counts.completed and not counts.pending, (question, counts)
    print(question, short > 0)
"""


@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
def test_requests_of_other_threads_at_recursion_limit(kind):
    """Requests of other threads get answers even if the thread that serves them hits the recursion limit."""
    done = subprocess.run(
        [sys.executable, "-c", OTHERS, kind], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = [line.split() for line in done.stdout.splitlines()]
    assert told == [[q, "True"] for q in ("statistics", "wait_for_all", "wait_for_var", "stop", "dump")], done.stderr


@pytest.mark.parametrize("kind", ["ThreadedEngine", "ThreadedEnginePerDevice"])
def test_pushes_at_the_recursion_limit(kind):
    """Some of 120 pushes near the recursion limit raise RecursionError; every push that the statistics count runs."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-2000:]
