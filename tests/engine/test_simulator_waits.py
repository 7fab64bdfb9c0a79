"""Waits of the simulator: completions by other threads, interrupts, awaited tasks, the pending limit, and exit."""

import asyncio
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from weftplan import engine
from weftplan.engine import simulator


def finishes(call):
    """Return whether ``call`` returns within a minute; otherwise its thread is abandoned."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


@pytest.mark.parametrize("what", ["var", "all"])
def test_completion_between_two_checks(what):
    """A wait runs an operation that becomes ready between two of its checks.

    (1) The wait finds no ready operation. (2) Another thread completes an asynchronous operation, which makes a second
    one ready. (3) The wait finds no asynchronous operation and must check for ready operations again.
    """
    sim = engine.create("Simulator")
    var, kept, log = sim.new_variable(), [], []
    sim.push_async(kept.append, (), [var])
    sim.push(lambda: log.append("second"), (), [var])
    assert sim.step()
    step = sim.step

    def step_then_the_end_of_the_first():
        stepped = step()
        if kept:
            thread = threading.Thread(target=kept.pop())
            thread.start()
            thread.join()
        return stepped

    sim.step = step_then_the_end_of_the_first
    assert finishes(lambda: sim.wait_for_var(var) if what == "var" else sim.wait_for_all())
    assert log == ["second"]
    assert var.version == 2


def test_push_served_by_another_thread():
    """A wait runs its var's write although another thread has not yet served the push of that write.

    (1) A thread inside the region completes an asynchronous operation. (2) A push leaves its request to that thread.
    (3) A wait for the pushed write begins before the request is served.
    """
    sim = engine.create("Simulator")
    first, second, kept, log = sim.new_variable(), sim.new_variable(), [], []
    inside, go, dispatch = threading.Event(), threading.Event(), sim._dispatch
    sim.push_async(kept.append, (), [first])
    sim.push(lambda: log.append("freed"), (), [first])
    assert sim.step()

    def slow_dispatch():
        inside.set()
        go.wait(60)
        dispatch()

    sim._dispatch = slow_dispatch
    thread = threading.Thread(target=kept.pop())
    thread.start()
    assert inside.wait(60)
    sim.push(lambda: log.append("mine"), (), [second])
    before_wait = sim._before_wait

    def wait_and_let_go(var=None):
        threading.Timer(0.05, go.set).start()
        before_wait(var)

    sim._before_wait = wait_and_let_go
    assert finishes(lambda: sim.wait_for_var(second))
    assert "mine" in log
    thread.join()
    sim.wait_for_all()
    assert sorted(log) == ["freed", "mine"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("where", ["append", "_execute", "_start_async", "once"])
def test_interrupt_around_a_simulated_operation(monkeypatch, where, asynchronous):
    """An interrupted wait raises KeyboardInterrupt; the function of its operation never runs, later operations do."""
    sim = engine.create("Simulator")
    var, ran = sim.new_variable(), []

    def interrupted(*args):
        monkeypatch.undo()
        raise KeyboardInterrupt

    class History(list):
        append = interrupted

    if where == "append":
        sim.history = History()
    elif where == "once":
        monkeypatch.setattr(simulator, "once", interrupted)
    else:
        monkeypatch.setattr(sim, where, interrupted)
    if asynchronous:
        sim.push_async(lambda done: (ran.append(1), done()), (), [var])
    else:
        sim.push(lambda: ran.append(1), (), [var])
    hit = where == "append" or asynchronous == (where != "_execute")
    if hit:
        with pytest.raises(KeyboardInterrupt):
            sim.wait_for_var(var)
    else:
        sim.wait_for_var(var)
    assert ran == [1] * (not hit)
    assert (var.state, var.version) == ("IDLE", 1)
    sim.history = []
    monkeypatch.undo()
    sim.push(lambda: ran.append(2), (), [var])
    sim.wait_for_all()
    assert ran[-1] == 2


def test_an_awaited_task_is_run():
    """Awaiting a task makes the simulator run the operations that the task needs."""
    with engine.using(engine.create("Simulator")):
        first = engine.submit(lambda: 4)

        async def main():
            return await engine.submit(lambda x: x + 1, first)

        assert finishes(lambda: asyncio.run(main()))
        assert engine.future(np.zeros(2)).done()


def test_push_over_the_limit_runs_operations(monkeypatch):
    """With a limit of 4 pending operations, 20 pushes make the simulator run more than 10 of them."""
    monkeypatch.setenv("WEFTPLAN_ENGINE_MAX_PENDING", "4")
    sim, ran = engine.create("Simulator"), []
    assert finishes(lambda: [sim.push(lambda: ran.append(None), (), [sim.new_variable()]) for _ in range(20)])
    assert len(ran) > 10


def test_process_exits_after_a_refused_wait():
    """If a wait inside a task has raised an error, an operation submitted later still runs at exit."""
    program = (
        "from weftplan import engine\n"
        "def nested(): engine.submit(int).result()\n"
        "task = engine.submit(nested)\n"
        "try: task.result()\n"
        "except engine.WaitInWorkerError: print('refused')\n"
        "engine.submit(print, 'ran at exit')\n"
    )
    program = program.replace("engine.WaitInWorkerError", "Exception")
    environment = {**os.environ, "MXNET_ENGINE_TYPE": "Simulator"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.split("\n")[:2] == ["refused", "ran at exit"]
