"""Short operations (ASYNC, DELETE_VAR) run on the thread that makes them ready."""

import threading

import pytest

from weftplan import engine
from weftplan.engine import FnProperty
from weftplan.errors import WaitInWorkerError

SHORT = FnProperty.ASYNC


def test_wait_inside_is_refused(eng):
    """A wait inside a short operation or a delete raises WaitInWorkerError; afterwards the thread may wait again."""
    var, second, errors = eng.new_variable(), eng.new_variable(), []

    def waits():
        for wait in (lambda: eng.wait_for_var(second), eng.wait_for_all):
            try:
                wait()
            except WaitInWorkerError as error:
                errors.append(str(error))

    eng.push(waits, (), [var], prop=SHORT)
    eng.delete_variable(eng.new_variable(), waits)
    assert len(errors) == 4
    eng.wait_for_var(var)
    eng.wait_for_all()


def test_wait_on_another_engine_is_allowed(eng):
    """A short operation may wait for a var of another engine, and then sees both writes of that var."""
    other_engine = engine.create("ThreadedEnginePerDevice", cpu_workers=1)
    theirs, var, seen = other_engine.new_variable(), eng.new_variable(), []

    def waits():
        other_engine.push(lambda: None, (), [theirs], prop=SHORT)
        other_engine.push(lambda: None, (), [theirs])
        other_engine.wait_for_var(theirs)
        seen.append(theirs.version)

    eng.push(waits, (), [var], prop=SHORT)
    assert seen == [2]
    eng.wait_for_all()
    other_engine.stop()


def test_short_operations_do_not_nest(eng):
    """A short operation pushed by another runs after it on the same thread, a user's thread or a worker."""
    log = []

    def outer():
        eng.push(lambda: log.append(("inner", threading.get_ident())), prop=SHORT)
        log.append(("outer", threading.get_ident()))

    eng.push(outer, prop=SHORT)
    me = threading.get_ident()
    assert log == [("outer", me), ("inner", me)]
    var, gate = eng.new_variable(), threading.Event()
    eng.push(lambda: (gate.wait(60), log.append(("worker", threading.get_ident()))), (), [var])
    eng.push(outer, [var], prop=SHORT)
    del log[:]
    gate.set()
    eng.wait_for_all()
    assert [word for word, _ in log] == ["worker", "outer", "inner"]
    assert len({ident for _, ident in log}) == 1


def test_long_chain_does_not_recurse(eng):
    """20,000 short operations that each release the next run without recursion."""
    var, gate, count = eng.new_variable(), threading.Event(), [0]
    eng.push(gate.wait, (), [var])
    for _ in range(20_000):
        eng.push(lambda: count.__setitem__(0, count[0] + 1), (), [var], prop=SHORT)
    gate.set()
    eng.wait_for_var(var)
    assert count == [20_000]
    assert var.version == 20_001


@pytest.mark.parametrize("asynchronous", [False, True])
def test_successors_of_short_operations_run(eng, asynchronous):
    """The thread that ran a short operation dispatches its successors.

    The worker runs a blocked operation and then the short one; no thread waits or pushes meanwhile.
    """
    a, b, gate, done = eng.new_variable(), eng.new_variable(), threading.Event(), threading.Event()
    eng.push(gate.wait, (), [a])
    if asynchronous:
        eng.push_async(lambda on_complete: on_complete(), [a], [b], prop=SHORT)
    else:
        eng.push(lambda: None, [a], [b], prop=SHORT)
    eng.push(done.set, [b])
    gate.set()
    assert done.wait(60)


def test_late_thread_has_nothing_to_run(eng):
    """Without short operations, ``_run_short`` returns False and ``_run_outside`` raises no error."""
    assert eng._run_short() is False
    eng._run_outside()


def test_failure_is_raised_at_the_wait(eng):
    """A short operation's ZeroDivisionError is raised at the wait, not by its push; its dependant is skipped."""
    var, ran = eng.new_variable(), []
    eng.push(lambda: 1 / 0, (), [var], prop=SHORT, name="culprit")
    eng.push(lambda: ran.append(1), [var], prop=SHORT)
    with pytest.raises(ZeroDivisionError) as caught:
        eng.wait_for_var(var)
    assert "'culprit'" in caught.value.__notes__[0]
    assert ran == []
    counts = eng.statistics()
    assert (counts.failed, counts.skipped, counts.completed) == (1, 1, 2)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tracer_sees_short_operations(eng, asynchronous):
    """The tracer records a short operation in the queue ``inline``, with the thread that ran it."""
    records = []
    eng.tracer = lambda *record: records.append(record)
    if asynchronous:
        eng.push_async(lambda on_complete: on_complete(), prop=SHORT, name="short")
    else:
        eng.push(lambda: None, prop=SHORT, name="short")
    eng.tracer = None
    ((name, ctx, queue, worker, push_ns, start_ns, end_ns, number),) = records
    assert (name, str(ctx), queue, worker) == ("short", "cpu(0)", "inline", threading.current_thread().name)
    assert push_ns <= start_ns <= end_ns
    assert number == 1
