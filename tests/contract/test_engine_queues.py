"""Engine contract: pushes from inside operations and from many threads, priorities, contexts and tracing."""

import threading
from contextlib import suppress

import pytest

from tests.contract.engines import Boom, boom, together
from weftplan import engine
from weftplan.device.context import cpu
from weftplan.engine import FnProperty


def test_pushes_from_inside_an_operation(eng):
    """An operation pushed from inside another runs after it if both write the same var."""
    var, log = eng.new_variable(), []

    def outer():
        eng.push(lambda: log.append("inner on the same var"), (), [var])
        eng.push(lambda: log.append("inner elsewhere"), (), [eng.new_variable()])
        log.append("outer")

    eng.push(outer, (), [var])
    eng.push(lambda: log.append("last"), (), [var])
    eng.wait_for_all()
    assert sorted(log) == ["inner elsewhere", "inner on the same var", "last", "outer"]
    assert log.index("outer") < log.index("inner on the same var")


def test_pushes_from_many_threads(eng):
    """No increment is lost if eight threads push 500 increments each of one var."""
    if eng.kind == "Simulator":
        pytest.skip("the simulator belongs to one thread")
    var, count = eng.new_variable(), [0]

    def add():
        count[0] += 1

    def work():
        for _ in range(500):
            eng.push(add, (), [var])

    together(work, 8)
    eng.wait_for_all()
    assert count[0] == 4000
    assert var.version == 4000


def test_priority_queue_order():
    """The CPU priority queue runs larger priorities first and keeps push order for equal priorities.

    The worker queue ignores priorities.
    """
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1, priority_workers=1)
    for prop, want in ((FnProperty.CPU_PRIORITIZED, [9, 9, 5, 1, 0]), (FnProperty.NORMAL, [1, 9, 5, 9, 0])):
        gate, order = threading.Event(), []
        eng.push(gate.wait, prop=prop, priority=100)
        for p in (1, 9, 5, 9, 0):
            eng.push(lambda p=p, order=order: order.append(p), prop=prop, priority=p)
        gate.set()
        eng.wait_for_all()
        assert order == want
    eng.stop()


def test_contexts_have_pools_of_their_own():
    """Operations on cpu(0) and cpu(1) run at the same time, with one worker each; statistics name the queues."""
    eng = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    barrier = threading.Barrier(2)
    for i in range(2):
        eng.push(lambda: barrier.wait(60), ctx=cpu(i))
    eng.push(lambda: None, prop=FnProperty.CPU_PRIORITIZED)
    eng.wait_for_all()
    rows = {(str(q.context), q.queue): q.completed for q in eng.statistics().queues}
    assert rows == {("cpu(0)", "worker"): 1, ("cpu(1)", "worker"): 1, ("None", "priority"): 1}
    eng.stop()


def test_statistics_of_engines_without_threads():
    """Statistics of the naive engine count operations per context; the simulator has no queues."""
    naive, simulator = engine.create("NaiveEngine"), engine.create("Simulator")
    for eng in (naive, simulator):
        for ctx in (cpu(0), None, cpu(1)):
            eng.push(lambda: None, ctx=ctx)
        eng.wait_for_all()
    rows = {(str(q.context), q.queue, q.completed, q.depth, q.workers) for q in naive.statistics().queues}
    assert rows == {("cpu(0)", "inline", 2, 0, 0), ("cpu(1)", "inline", 1, 0, 0)}
    assert simulator.statistics().queues == ()


def test_a_tracer_sees_every_operation_once(eng):
    """A tracer records every operation once: of each property, asynchronous, failed, skipped and deleting."""
    records, expected, numbers = [], [], set()
    bad, after = eng.new_variable(), eng.new_variable()
    eng.tracer = lambda *record: records.append(record)
    for prop in FnProperty:
        for ctx in (cpu(0), cpu(1)):
            for asynchronous in (False, True):
                expected.append(f"{prop.name} {ctx} {asynchronous}")
                if asynchronous:
                    eng.push_async(lambda done: done(), (), [], ctx, prop=prop, name=expected[-1])
                else:
                    eng.push(lambda: None, (), [], ctx, prop=prop, name=expected[-1])
    for fn, reads, writes, name in ((boom, [], [bad], "failed"), (int, [bad], [after], "skipped")):
        expected.append(name)
        with suppress(Boom):  # raised by the naive engine's pushes
            eng.push(fn, reads, writes, name=name)
    eng.delete_variable(eng.new_variable())
    with suppress(Boom):
        eng.wait_for_all()
    eng.stop()  # a wait may return before the tracer is called
    eng.tracer = None
    assert sorted(name for name, *_ in records) == sorted([*expected, "DeleteVariable"])
    for name, ctx, queue, worker, push_ns, start_ns, end_ns, number in records:
        assert str(ctx) == (name.split()[1] if " " in name else "cpu(0)")
        assert queue
        assert worker
        assert 0 < push_ns <= start_ns <= end_ns
        numbers.add(number)
    assert len(numbers) == len(records)
